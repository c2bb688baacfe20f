"""`baton recipes`: check, register, document and run recipes."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.functional.cli.people import Baton
from tests.kits.stack.stack import Stack

pytestmark = pytest.mark.emulator

GOOD = """\
name: {name}
version: {version}
description: Says a word. And more.
parameters:
  word: {{type: string, required: true, choices: [hello, bye], description: What is said.}}
  times: {{type: integer, default: 2, minimum: 1, maximum: 9, description: How often.}}
rules:
  - {{require: parameters.times < 9 or parameters.word == 'bye', fields: [times], message: is too often, remedy: Less.}}
inputs:
  - {{into: names, description: Who is spoken to.}}
steps:
  - name: say
    run:
      - python
      - -c
      - |
        import pathlib, sys
        word, times, data, output = sys.argv[1:]
        who = pathlib.Path(data, "names/who.txt").read_text().strip()
        print(word, who)
        pathlib.Path(output, "said").write_text((word + who) * int(times))
      - "{{{{ parameters.word }}}}"
      - "{{{{ parameters.times }}}}"
      - "{{{{ dirs.data }}}}"
      - "{{{{ dirs.output }}}}"
    checkpoints: none
  - name: copy
    run:
      - python
      - -c
      - import shutil, sys; shutil.copy(sys.argv[1] + "/said", sys.argv[1] + "/copied")
      - "{{{{ dirs.output }}}}"
    checkpoints: none
outputs:
  - {{path: copied, min_bytes: 1, description: What was said.}}
"""
BAD = """\
name: Bad
version: 1
description: Two faults that are seen at once, and a third.
steps:
  - name: a
    run: [echo, "{{ parameters.x }}"]
    whn: "1"
"""


@pytest.fixture
def name() -> str:
    return f"say-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def file(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "say.yaml"
    path.write_text(GOOD.format(name=name, version=1))
    return path


def test_lint_tells_every_fault_with_its_place_and_remedy(baton: Baton, file: Path, tmp_path: Path, name: str) -> None:
    assert f"{name}@1 has no faults" in baton("recipes", "lint", file).ok().out
    assert baton("recipes", "lint", file, "--json").ok().json["faults"] == []
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)
    said = baton("recipes", "lint", bad)
    assert said.code == 1
    assert said.out.splitlines() == [
        f"{bad}:1:1: name: cannot be a name. Use up to 63 lower-case letters, digits and hyphens, a letter or digit "
        "first.",
        f"{bad}:6:17: steps.0.run.1: there is no parameters.x. There are none.",
        f"{bad}:7:5: steps.0.whn: is not a field of recipes. Did you mean 'when'?",
    ]
    told = baton("recipes", "lint", bad, "--json")
    assert told.code == 1
    assert [(one["line"], one["field"]) for one in told.json["faults"]] == [
        (1, "name"),
        (6, "steps.0.run.1"),
        (7, "steps.0.whn"),
    ]
    for command in (["push", bad], ["run", "--local", bad], ["docs", bad]):
        baton("recipes", *command).refused(2, f"{bad} has 3 faults", *said.out.splitlines())
    baton("recipes", "lint", tmp_path / "nowhere").failed(2, "cannot be read")


def test_a_pushed_recipe_is_listed_shown_explained_and_used(baton: Baton, file: Path, name: str) -> None:
    assert f"{name}@1 is registered" in baton("recipes", "push", file).ok().out
    again = baton("recipes", "push", file, "--json").ok().json
    assert again["id"] == f"{name}@1" and again["document"] == file.read_text()
    file.write_text(GOOD.format(name=name, version=1).replace("Says a", "Shouts a"))
    baton("recipes", "push", file).failed(3, "recipe_exists", "other contents", "next one")
    file.write_text(GOOD.format(name=name, version=10))
    baton("recipes", "push", file).ok()

    listed = {one["id"]: one for one in baton("recipes", "list", "--json").ok().json}
    assert {"command@1", "digits@1", "dreambooth-lora-sd@1", "dreambooth-lora-sdxl@1", f"{name}@1"} < set(listed)
    assert listed["digits@1"]["built_in"] and not listed[f"{name}@10"]["built_in"]
    assert f"{name}@1" in baton("recipes", "list").ok().out
    assert baton("recipes", "show", name).ok().out == file.read_text(), "the highest version"
    assert baton("recipes", "show", f"{name}@1", "--json").ok().json["id"] == f"{name}@1"
    baton("recipes", "show", "nothing").failed(2, "no recipe 'nothing'")
    baton("recipes", "docs", "digit").failed(2, "no recipe 'digit'. Did you mean 'digits'?")
    baton("recipes", "show", "nothing@1").failed(3, "recipe_not_found")

    page = baton("recipes", "docs", name).ok().out
    for part in (
        f"# {name}@10",
        "| `word` | required | one of hello, bye | What is said. |",
        "| `times` | `2` | a whole number, at least 1, at most 9 | How often. |",
        "- `times` is too often. Less.",
        "| `names` | yes | Who is spoken to. |",
        "1. **say**:",
        "| `copied` | at least 1 bytes | What was said. |",
        f"baton submit --recipe {name}@10 --set word=... --input PREFIX/:names",
    ):
        assert part in page, page
    assert baton("recipes", "docs", file).ok().out == page
    assert baton("recipes", "docs", file, "--json").ok().json["name"] == name
    submitted = baton(*("submit", "--recipe", f"{name}@1", "--set", "word=bye", "--input", "n/:names", "--json"))
    assert [step["name"] for step in submitted.ok().json["plan"]["steps"]] == ["say", "copy"]


def test_all_that_is_wrong_with_a_submission_is_told_at_once(baton: Baton, file: Path, name: str) -> None:
    baton("recipes", "push", file).ok()
    said = baton("submit", "--recipe", f"{name}@1", "--set", "tims=3", "--set", "times=10")
    said.refused(
        3,
        "invalid_value: 4 problems",
        f"parameters.tims: is not a parameter of {name}@1. Did you mean 'times'?",
        "parameters.word: is required. Give one of hello, bye.",
        "parameters.times: must be at most 9. Give a whole number, at least 1, at most 9.",
        """inputs: the input for 'names' is missing. Add {"prefix": "...", "into": "names"}: Who is spoken to.""",
    )
    baton("submit", "--recipe", f"{name}@7").failed(3, "unknown_recipe", "baton recipes list")


def test_all_that_contradicts_itself_in_a_dreambooth_job_is_told_at_once(baton: Baton, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        """\
        recipe: dreambooth-lora-sdxl@2
        inputs: [{prefix: dogs/, into: instance}]
        parameters:
          instance_prompt: a dog
          mixed_precision: no
          learning_rate: 1e-8
          lr_scheduler: polynomial
          with_prior_preservation: true
          cache_text_embeddings: true
        """
    )
    said = baton("submit", file)
    assert said.code == 3
    summary, *problems = said.err.splitlines()
    assert summary == "baton: invalid_value: 3 problems"
    assert [problem.partition(":")[0] for problem in problems] == [
        "parameters.learning_rate",
        "parameters.cache_text_embeddings",
        "parameters.class_prompt",
    ]
    good = ("learning_rate=2e-6", "class_prompt=a dog", "cache_text_embeddings=false")
    made = baton("submit", file, *(word for one in good for word in ("--set", one)), "--json").ok().json
    assert made["parameters"]["mixed_precision"] == "no"


@pytest.mark.processes
def test_a_recipe_runs_on_this_machine_and_leaves_its_outputs(baton: Baton, file: Path, tmp_path: Path) -> None:
    people, out = tmp_path / "people", tmp_path / "out"
    people.mkdir()
    (people / "who.txt").write_text("world\n")
    common: list[Any] = ["recipes", "run", "--local", file, "--input", f"{people}:names", "--out", out]
    out.mkdir()
    (out / "copied").write_text("mine")
    (out / "notes").write_text("mine too")
    run = (*common, "--set", "word=hello", "--set", "times=3")
    baton(*run).failed(2, f"copied in {out} would be overwritten", "--force")
    assert (out / "copied").read_text() == "mine"
    said = baton(*run, "--force").ok()
    assert "hello world" in said.out and "step copy (2 of 2)" in said.out
    assert (out / "copied").read_text() == "helloworld" * 3
    assert (out / "notes").read_text() == "mine too"
    (tmp_path / "file").touch()
    baton(*common[:-1], tmp_path / "file", "--set", "word=bye").failed(2, "file is not a directory")
    baton("recipes", "run", file).failed(2, "--local")


@pytest.mark.processes
def test_a_built_in_recipe_runs_from_its_document_and_a_run_that_fails_says_so(baton: Baton, tmp_path: Path) -> None:
    """A changed copy of a built-in recipe needs another name, on this machine too."""
    file = tmp_path / "mine.yaml"
    file.write_text(baton("recipes", "show", "command").ok().out)
    command = 'command=["python", "-c", "print(6 * 7); raise SystemExit(3)"]'
    run = ("recipes", "run", "--local", file, "--set", command)
    said = baton(*run, "--json")
    assert "42" in said.err.splitlines() and "the job is failed" in said.err
    assert said.code == 1 and said.json["state"] == "failed"
    file.write_text(file.read_text() + "# mine\n")
    baton(*run).failed(3, "recipe_exists", "'command' is the name of a built-in recipe", "under another name")


def test_what_cannot_be_run_is_said_before_anything_starts(baton: Baton, file: Path, name: str, stack: Stack) -> None:
    run = ("recipes", "run", "--local", file)
    good = ("--set", "word=hello", "--set", "times=1")
    baton(*run, *good, "--input", "/nowhere:names").failed(2, "--input /nowhere:names: /nowhere is not a directory")
    baton(*run, *good).failed(2, "--input DIR:names is missing: Who is spoken to.")
    baton(*run, "--set", "word=hi", "--set", "times=10", "--set", "tims=1", "--input", "/nowhere:names").refused(
        2,
        "4 problems",
        f"parameters.tims: is not a parameter of {name}@1. Did you mean 'times'?",
        "parameters.word: is none of its choices. Give one of hello, bye.",
        "parameters.times: must be at most 9. Give a whole number, at least 1, at most 9.",
        "--input /nowhere:names: /nowhere is not a directory",
    )


def test_the_page_of_a_built_in_recipe_needs_no_account(baton: Baton, tmp_path: Path) -> None:
    stranger = {"BATON_API_URL": "", "BATON_API_KEY": "", "XDG_CONFIG_HOME": str(tmp_path)}
    page = baton("recipes", "docs", "digits@1").ok().out
    assert baton("recipes", "docs", "digits@1", **stranger).ok().out == page
    assert baton("recipes", "docs", "digits", **stranger).ok().out == page
    for name in ("digits@77", "mine", "../digits@1"):
        baton("recipes", "docs", name, **stranger).failed(2, "no profile", "baton login URL")
