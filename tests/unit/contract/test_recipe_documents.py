"""Recipes as documents: what is read is what was written, no text breaks the reader, no fault gets past it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from baton.contract.errors import Fault
from baton.contract.recipes.lint import lint
from baton.contract.recipes.model import Recipe
from baton.contract.recipes.reading import dump
from baton.contract.yaml_documents import MAX_DOCUMENT_BYTES, read_document
from functions.recipes import built_in_document, built_in_ids, built_in_recipe

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="{\x00"), max_size=30)
NAME = st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True)
PATH = st.lists(st.from_regex(r"[a-z0-9_][a-z0-9_.]{0,5}", fullmatch=True), min_size=1, max_size=3).map("/".join)
SECONDS = st.integers(1, 10**6)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "number", "string", "boolean", "strings"]))
    default: st.SearchStrategy[Any] = {
        "integer": st.integers(-(10**6), 10**6),
        "number": st.floats(-1e6, 1e6) | st.integers(-9, 9),
        "string": TEXT,
        "boolean": st.booleans(),
        "strings": st.lists(TEXT, max_size=3),
    }[kind]
    required = draw(st.booleans())
    spec = {"type": kind, "required": required, "description": draw(TEXT)}
    return spec if required else {**spec, "default": draw(default)}


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    specs = draw(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), parameters(), max_size=5))
    words = [f"{{{{ parameters.{name} }}}}" for name, spec in specs.items() if spec["type"] != "strings"]
    argument = st.sampled_from([*words, "{{ dirs.output }}/x", "--a={{ dirs.data }}"]) | TEXT
    # something in front that is never nothing: a program needs a name
    commands = st.lists(argument, max_size=4).map(lambda rest: ["python", *rest])
    conditions = st.none() | st.sampled_from([f"parameters.{name} is not none" for name in specs] or ["true"])
    outputs = st.lists(
        st.fixed_dictionaries({"path": PATH, "min_bytes": st.integers(0, 99), "description": TEXT}),
        max_size=3,
        unique_by=lambda output: output["path"],
    )
    steps = st.lists(
        st.fixed_dictionaries(
            {
                "name": NAME,
                "run": commands,
                "description": TEXT,
                "timeout_s": st.none() | SECONDS,
                "retries": st.integers(0, 10),
                "outputs": outputs,
                "keeps": st.none() | st.lists(PATH, max_size=2),
                "checkpoints": st.sampled_from(["directories", "session", "none"]),
            },
            optional={"when": conditions},
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda step: step["name"],
    )
    rules = [
        {"require": f"parameters.{name} is not none or true", "fields": [name], "message": "m", "remedy": draw(TEXT)}
        for name in draw(st.lists(st.sampled_from(sorted(specs)), max_size=2) if specs else st.just([]))
    ]
    return Recipe.model_validate(
        {
            "name": draw(NAME),
            "version": draw(st.integers(1, 999_999)),
            "description": draw(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=50)),
            "parameters": specs,
            "rules": rules,
            "requirements": {"min_vram_gib": draw(st.none() | st.floats(0, 99))},
            "inputs": [{"into": into} for into in draw(st.lists(PATH, max_size=2, unique=True))],
            "steps": draw(steps),
            "outputs": draw(outputs),
            "health": {"check": draw(st.none() | commands.map(lambda run: {"run": run}))},
            "cleanup": [{"run": run} for run in draw(st.lists(commands, max_size=2))],
        }
    )


@settings(max_examples=60, deadline=None)
@given(recipes())
def test_what_is_written_is_read_again_without_faults(recipe: Recipe) -> None:
    """A recipe is read as it was written, with any words in it: `no`, `1e3`, `~`, dates, tabs, quotes, emojis."""
    linted = lint(dump(recipe))
    unrelated = [fault for fault in linted.faults if "no step is left" not in fault.reason]
    assert unrelated == []
    assume(linted.recipe is not None)
    assert linted.recipe == recipe


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
@example("a: &a [*a, *a]")
@example("? [a]\n: b")
@example("<<: {a: b}")
@example("--- a\n--- b")
@example("%YAML 9.9\n--- a")
@example("\ufeffname: a")
@example("!!python/object/apply:os.system [ls]")
@example("a: 0x" + "f" * 100)
@example("steps: [{run: '{{ 9**9**9 }}'}]")
@example("version: " + "9" * 5000)
@example("\ud800")
def test_no_text_breaks_the_reader(text: str) -> None:
    linted = lint(text)
    assert (linted.recipe is None) == bool(linted.faults)
    assert all(fault.reason and (fault.line or 0) >= 1 and (fault.column or 0) >= 1 for fault in linted.faults)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted(Recipe.model_fields))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=6))
def test_no_value_in_any_field_breaks_it(fields: dict[str, Any]) -> None:
    base = {"name": "a", "version": 1, "description": "d", "steps": [{"name": "s", "run": ["echo"]}]}
    document = yaml.safe_dump({**base, **fields}, allow_unicode=True)
    linted = lint(document)
    assert (linted.recipe is None) == bool(linted.faults)


def test_the_next_line_character_survives() -> None:
    """PyYAML writes it so that it reads it as a space."""
    recipe = built_in_recipe("digits@1")
    assert recipe is not None
    odd = recipe.model_copy(update={"description": "a\x85b \x85"})
    assert lint(dump(odd)).recipe == odd


def test_a_bomb_is_defused() -> None:
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12))
    (fault,) = lint(f"l0: &l0 lol\n{levels}").faults
    assert "anchors and aliases" in fault.reason
    assert "nested" in lint("[" * 5000 + "]" * 5000).faults[0].reason
    assert str(MAX_DOCUMENT_BYTES) in lint("a" * (MAX_DOCUMENT_BYTES + 1)).faults[0].reason


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[no, yes, on, off, true, False]", ["no", "yes", "on", "off", True, False]),
        ("[2e-6, 1e3, 1.5, .5, -3, +4, 007]", [2e-6, 1e3, 1.5, 0.5, -3, 4, 7]),
        (
            "[2026-11-22, 12:30:00, 1_000, 0x1f, .inf, .nan]",
            ["2026-11-22", "12:30:00", "1_000", "0x1f", ".inf", ".nan"],
        ),
        ("[~, null, '', 'null']", [None, None, "", "null"]),
        ("{1: a, true: b}", {"1": "a", "true": "b"}),
    ],
)
def test_plain_words_mean_what_they_seem_to(text: str, value: Any) -> None:
    document = read_document(text)
    assert document.faults == [] and document.value == value
    assert [type(one) for one in document.value] == [type(one) for one in value]


GOOD = """\
name: train
version: 3
description: Trains.
parameters:
  steps: {type: integer, default: 10, minimum: 1, maximum: 100}
  warmup: {type: integer, default: 0}
  mode: {type: string, default: a, choices: [a, b]}
rules:
  - require: parameters.warmup <= parameters.steps
    fields: [warmup, steps]
    message: is more than steps
inputs:
  - {into: pictures}
steps:
  - name: prepare
    run: [python, prepare.py, "{{ dirs.data }}/pictures"]
    when: parameters.mode == 'b'
  - name: train
    run: [python, train.py, "--steps={{ parameters.steps }}"]
    environment: {MODE: "{{ parameters.mode }}"}
    outputs: [{path: log.txt}]
outputs:
  - {path: model.bin, min_bytes: 1}
health:
  check: {run: [nvidia-smi]}
cleanup:
  - run: [rm, -f, "{{ dirs.output }}/tmp"]
"""

FAULTS: list[tuple[str, str, str, int]] = [
    ("name: train\n", "name: Train it\n", "name", 1),
    ("version: 3", "version: 0", "version", 2),
    ("version: 3", "version: '3'", "version", 2),
    ("version: 3", "verson: 3", "verson", 2),
    ("description: Trains.\n", "", "description", 1),
    ("type: integer, default: 10", "type: integr, default: 10", "parameters.steps.type", 5),
    ("default: 10", "default: 1000", "parameters.steps.default", 5),
    ("default: 10", "default: ten", "parameters.steps.default", 5),
    ("minimum: 1,", "minimum: 101,", "parameters.steps.maximum", 5),
    ("minimum: 1,", "exclusive_minimum: 101,", "parameters.steps.maximum", 5),
    ("minimum: 1,", "exclusive_minimum: 100,", "parameters.steps.maximum", 5),
    ("maximum: 100", "exclusive_maximum: 1", "parameters.steps.exclusive_maximum", 5),
    ("maximum: 100", "exclusive_maximum: 10", "parameters.steps.default", 5),
    ("choices: [a, b]", "choices: [a, b], exclusive_maximum: 3", "parameters.mode.exclusive_maximum", 7),
    ("choices: [a, b]", "choices: [a, 1]", "parameters.mode.choices.1", 7),
    ("choices: [a, b]", "choices: [a, b], minimum: 3", "parameters.mode.minimum", 7),
    ("parameters.warmup <= parameters.steps", "parameters.warmup <= parameters.step", "rules.0.require", 9),
    ("parameters.warmup <= parameters.steps", "parameters.warmup <=", "rules.0.require", 9),
    ("parameters.warmup <= parameters.steps", "range(3)", "rules.0.require", 9),
    ("fields: [warmup, steps]", "fields: [warm, steps]", "rules.0.fields.0", 10),
    ("into: pictures", "into: ../pictures", "inputs.0", 13),
    ("{into: pictures}", "{into: pictures}\n  - {into: pictures}", "inputs.1.into", 14),
    ("name: prepare", "name: train", "steps.1.name", 18),
    ("{{ dirs.data }}/pictures", "{{ dirs.date }}/pictures", "steps.0.run.2", 16),
    ("{{ dirs.data }}/pictures", "{{ dirs.data }}/../../x", "steps.0.run.2", 16),
    ("{{ dirs.data }}/pictures", "${BATON_DATA_DIR}/../x", "steps.0.run.2", 16),
    ("parameters.mode == 'b'", "mode == 'b'", "steps.0.when", 17),
    ("parameters.mode == 'b'", "parameters.mode", "steps.0.when", 17),
    ("run: [python, train.py", "run: python, train.py #", "steps.1.run", 19),
    ("--steps={{ parameters.steps }}", "--steps={% for a in b %}{% endfor %}", "steps.1.run.2", 19),
    ("--steps={{ parameters.steps }}", "--steps={{ parameters.steps", "steps.1.run.2", 19),
    ('MODE: "{{ parameters.mode }}"', 'MODE: "{{ mode }}"', "steps.1.environment.MODE", 20),
    ('MODE: "', 'MO DE: "', "steps.1.environment.MO DE", 20),
    ("{path: log.txt}", "{path: ../log.txt}", "steps.1.outputs.0.path", 21),
    ("{path: log.txt}", "{path: a, format: exe}", "steps.1.outputs.0.format", 21),
    ("{path: log.txt}", "{path: a}, {path: a}", "steps.1.outputs.1.path", 21),
    ("min_bytes: 1}", "min_bytes: -1}", "outputs.0.min_bytes", 23),
    ("min_bytes: 1}", "min_bytes: 1}\nname: again", "name", 24),
    ("run: [nvidia-smi]", "run: []", "health.check.run", 25),
    ("run: [nvidia-smi]", 'run: ["{{ x }}"]', "health.check.run.0", 25),
    ("run: [rm, -f", "rn: [rm, -f", "cleanup.0.rn", 27),
]


def test_the_document_of_the_faults_has_none() -> None:
    assert lint(GOOD).faults == []


@pytest.mark.parametrize(("old", "new", "field", "line"), FAULTS)
def test_a_fault_is_found_with_its_place_reason_and_remedy(old: str, new: str, field: str, line: int) -> None:
    assert old in GOOD
    faults = lint(GOOD.replace(old, new, 1)).faults
    found = [fault for fault in faults if fault.field == field or field.startswith(f"{fault.field}.")]
    assert found, faults
    assert found[0].line == line, faults
    assert all(fault.reason and fault.remedy for fault in faults)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 4))
def test_several_faults_are_found_at_once(chance: random.Random, count: int) -> None:
    text, injected = GOOD, []
    # Only faults that keep the lines, each on a line of its own.
    for old, new, field, line in chance.sample(FAULTS, len(FAULTS)):
        if len(injected) == count:
            break
        if old in text and "\n" not in old + new and line not in [other for _, other in injected]:
            text, injected = text.replace(old, new, 1), [*injected, (field, line)]
    faults = lint(text).faults
    for field, line in injected:
        assert [one for one in faults if one.line == line], (field, line, faults)


def test_the_example_of_the_documentation_has_no_faults() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/recipes.md").read_text()
    example = page.partition("```yaml\n")[2].partition("```")[0]
    linted = lint(example)
    assert linted.faults == [] and linted.recipe is not None and linted.recipe.id == "caption-and-train@1"


def test_faults_come_in_the_order_of_lines() -> None:
    text = GOOD.replace("version: 3", "version: 0").replace("min_bytes: 1}", "min_bytes: -1}")
    assert [fault.line for fault in lint(text).faults] == [2, 23]
    assert lint(text).faults[0] == Fault(
        "version", "input should be greater than or equal to 1", "Change the value accordingly.", 2, 1
    )


@pytest.mark.parametrize("recipe_id", built_in_ids())
def test_built_in_recipes_are_without_faults_and_say_what_everything_is(recipe_id: str) -> None:
    document = built_in_document(recipe_id)
    assert document is not None
    linted = lint(document)
    assert linted.faults == []
    recipe = built_in_recipe(recipe_id)
    assert recipe == linted.recipe and recipe is not None and recipe.id == recipe_id
    assert [name for name, spec in recipe.parameters.items() if not spec.description] == []
    assert [one.path for one in recipe.outputs if not one.description] == []
    assert [one.into for one in recipe.inputs if not one.description] == []
