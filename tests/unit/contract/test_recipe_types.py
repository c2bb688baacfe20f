"""Templates whose values are of the wrong kind are found before a version is registered; those that fit never are."""

from __future__ import annotations

import pytest
import yaml

from baton.contract.recipes.lint import lint
from baton.contract.recipes.model import Parameter
from baton.contract.recipes.samples import values_of
from functions.recipes import built_in_document, built_in_ids

PARAMETERS = {
    "steps": {"type": "integer", "required": True, "minimum": 10},
    "rate": {"type": "number", "required": True, "exclusive_minimum": 0, "maximum": 1},
    "word": {"type": "string", "required": True},
    "names": {"type": "strings", "required": True},
    "mode": {"type": "string", "choices": ["a", "b", "c"], "default": "a"},
    "extra": {"type": "integer"},
    "flag": {"type": "boolean", "default": False},
}


def document(argument: str, **more: object) -> str:
    step = {"name": "a", "run": ["x", argument], **more}
    return yaml.safe_dump(
        {"name": "w", "version": 1, "description": "d", "parameters": PARAMETERS, "steps": [step]}, sort_keys=False
    )


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("{{ parameters.steps + parameters.word }}", "arithmetic takes numbers"),
        ("--x={{ parameters.names }}", "a list cannot be part of a text"),
        ("{{ parameters.steps | upper }}", "this filter takes text"),
        ("{{ parameters.word | abs }}", "arithmetic takes numbers"),
        ("{{ parameters.word | join(',') }}", "'join' takes a list"),
        ("{{ parameters.rate | length }}", "'length' takes text or a list"),
        ("{{ 1 if parameters.word < 3 else 2 }}", "not supported between"),
        ("{{ parameters.extra + parameters.word }}", "arithmetic takes numbers"),
    ],
)
def test_a_type_that_never_fits_is_told_with_its_line(argument: str, says: str) -> None:
    text = document(argument)
    (fault,) = lint(text).faults
    assert fault.field == "steps.0.run.1"
    assert says in fault.reason and fault.remedy
    assert fault.line is not None and "parameters." in text.splitlines()[fault.line - 1]


@pytest.mark.parametrize("field", ["when", "environment", "rules", "outputs", "cleanup"])
def test_wherever_it_stands(field: str) -> None:
    made = yaml.safe_load(document("{{ parameters.word }}"))
    wrong = "parameters.steps < parameters.word"
    if field == "when":
        made["steps"][0]["when"] = wrong
    elif field == "environment":
        made["steps"][0]["environment"] = {"A": "{{ parameters.names }}"}
    elif field == "rules":
        made["rules"] = [{"require": wrong, "fields": ["steps"], "message": "m"}]
    elif field == "outputs":
        made["outputs"] = [{"path": "a", "when": wrong}]
    else:
        made["cleanup"] = [{"run": ["x", "{{ parameters.names | abs }}"]}]
    (fault,) = lint(yaml.safe_dump(made)).faults
    assert fault.field.startswith("steps.0" if field in ("when", "environment") else field)


@pytest.mark.parametrize(
    "argument",
    [
        "{{ parameters.steps + parameters.rate }}",
        "{{ parameters.word + 'x' }}",
        "{{ parameters.names }}",
        "{{ parameters.names | join(',') }}",
        "{{ parameters.names[0] + 'x' }}",
        "{{ parameters.names[7] + 1 }}",
        "{{ parameters.extra + 1 }}",
        "{{ parameters.word | int + 1 }}",
        "{{ 10 // (parameters.steps - 10) }}",
        "{{ parameters.steps + parameters.word if parameters.mode == 'c' and parameters.flag else 1 }}",
        "{{ parameters.steps if parameters.mode == 'c' else parameters.word }}",
        "{{ (parameters.word if parameters.mode != 'b' else 1) + 1 }}",
    ],
)
def test_what_some_values_fit_is_no_fault(argument: str) -> None:
    assert lint(document(argument)).faults == []


def test_what_is_never_rendered_is_passed_over() -> None:
    assert (
        lint(document("{{ parameters.extra + 1 }}", when="parameters.word == 'a word that nobody guesses'")).faults
        == []
    )
    wrong = "{{ parameters.steps + parameters.word }}"
    assert lint(document(wrong, when="parameters.word == 'a word that nobody guesses'")).faults == []
    (fault,) = lint(document(wrong, when="parameters.mode == 'c'")).faults
    assert fault.field == "steps.0.run.1"


def test_samples_that_break_a_rule_say_nothing() -> None:
    made = yaml.safe_load(document("{{ parameters.steps + parameters.word }}"))
    made["rules"] = [{"require": "parameters.word == 'nobody guesses it'", "fields": ["word"], "message": "m"}]
    assert lint(yaml.safe_dump(made)).faults == []


@pytest.mark.parametrize("name", built_in_ids())
def test_the_built_in_recipes_have_no_such_fault(name: str) -> None:
    assert lint(built_in_document(name)).faults == []


@pytest.mark.parametrize(
    ("spec", "some"),
    [
        ({"type": "integer", "minimum": 64, "maximum": 2048, "multiple_of": 8}, {64, 2048}),
        ({"type": "number", "exclusive_minimum": 0, "exclusive_maximum": 1}, {0.5}),
        ({"type": "integer", "minimum": 5, "multiple_of": 7}, {7}),
        ({"type": "string", "min_length": 9}, {"a" * 9}),
        ({"type": "string", "choices": ["x", "y"]}, {"x", "y"}),
        ({"type": "boolean", "default": False}, {True, False}),
    ],
)
def test_samples_are_values_that_are_allowed(spec: dict[str, object], some: set[object]) -> None:
    made = Parameter.model_validate(spec)
    found = values_of(made)
    assert some <= set(found)
    assert [value for value in found if made.problem(value)] == []
