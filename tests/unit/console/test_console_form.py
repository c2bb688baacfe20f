"""The form of a submission: command lines as a shell splits them, and the document of a job to submit again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cdk import NODE

SOURCES = Path(__file__).parents[3] / "console" / "src" / "submit"
LINES = [
    "python train.py --lr 1e-4",
    r"""grep "\d+" '\d+' \d""",
    r'''sh -c "echo \"it's\" \$HOME \\ \`x\` \n"''',
    "a\\\nb 'c\\\nd' \"e\\\nf\"",
    "  '' \"\" x'y'\"z\"  ",
    "tail\\",
]


def evaluate(module: str, expression: str) -> Any:
    script = f"import * as m from {json.dumps((SOURCES / module).as_uri())}; console.log(JSON.stringify({expression}))"
    done = subprocess.run([NODE, "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_command_line_is_split_as_a_shell_splits_it() -> None:
    shells = []
    for line in LINES:
        done = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
        shells.append(done.stdout.split("\0")[:-1])
    assert evaluate("form.js", f"{json.dumps(LINES)}.map(m.splitCommand)") == shells
    assert evaluate("form.js", f"{json.dumps(shells)}.map(m.joinCommand).map(m.splitCommand)") == shells


@pytest.mark.parametrize(
    ("outputs", "planned", "kept"),
    [(["model.bin"], ["model.bin"], None), (["model.bin", "report.json"], ["model.bin"], ["model.bin", "report.json"])],
)
def test_a_job_of_a_recipe_keeps_outputs_of_its_own(outputs: list[str], planned: list[str], kept: Any) -> None:
    """Parameters can change the outputs of a recipe, therefore these are left to the recipe."""
    plan = {"outputs": [{"path": one} for one in planned]}
    job = {"recipe": "digits@1", "outputs": outputs, "plan": plan, "queue": "default", "priority": 50}
    assert evaluate("document.js", f"m.documentOf({json.dumps(job)})").get("outputs") == kept


def test_an_empty_parameter_of_a_job_is_submitted_again_and_a_cleared_one_is_not() -> None:
    """A default may be another text, and an original job may name none."""
    job = {"recipe": "own@1", "parameters": {"prompt": "", "words": [], "variant": None, "steps": 40}}
    recipe = {"parameters": {"prompt": {"type": "string"}, "words": {"type": "strings"}, "steps": {"type": "integer"}}}
    form = f"m.formOf({json.dumps(job)})"
    submitted = evaluate("form.js", f"m.documentOf({form}, {json.dumps(recipe)}).parameters")
    assert submitted == {"prompt": "", "words": [], "steps": 40}
    cleared = f"{{...{form}, parameters: {{prompt: undefined, steps: undefined}}}}"
    assert "parameters" not in evaluate("form.js", f"m.documentOf({cleared}, {json.dumps(recipe)})")


def test_a_text_with_the_mark_ends_no_command() -> None:
    command = evaluate("document.js", 'm.withInput("cat", "a\\nEND\\nb", "END")')
    assert command == "cat <<'END_'\na\nEND\nb\nEND_"
