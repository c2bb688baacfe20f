"""Recipes: what parameters they take, and the command they become."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from contract.recipes import ParameterSpec, Recipe


@pytest.mark.parametrize(
    ("spec", "value", "problem"),
    [
        ({"type": "integer"}, 3, None),
        ({"type": "integer"}, 3.0, "must be a whole number"),
        ({"type": "integer"}, True, "must be a whole number"),
        ({"type": "integer"}, "3", "must be a whole number"),
        ({"type": "integer", "minimum": 1}, 0, "must be at least 1"),
        ({"type": "integer", "minimum": 1}, 1, None),
        ({"type": "integer", "maximum": 10_000_000}, 10_000_001, "must be at most 10000000"),
        ({"type": "integer", "maximum": 1_234_567}, 1_234_568, "must be at most 1234567"),
        ({"type": "number"}, 3, None),
        ({"type": "number"}, 2e-6, None),
        ({"type": "number"}, False, "must be a number"),
        ({"type": "number"}, "0.1", "must be a number"),
        ({"type": "number"}, float("nan"), "must be finite"),
        ({"type": "number"}, float("inf"), "must be finite"),
        ({"type": "number", "minimum": 1e-8}, 0, "must be at least 1e-08"),
        ({"type": "string"}, "x", None),
        ({"type": "string"}, 1, "must be a string"),
        ({"type": "string", "max_length": 3}, "abcd", "must have at most 3 characters"),
        ({"type": "string"}, "a\0b", "must not contain a NUL character"),
        ({"type": "string", "choices": ["fp16", "bf16"]}, "fp8", "must be one of fp16, bf16"),
        ({"type": "string", "choices": ["fp16", "bf16"]}, "bf16", None),
        ({"type": "boolean"}, True, None),
        ({"type": "boolean"}, 1, "must be true or false"),
        ({"type": "boolean"}, "true", "must be true or false"),
        ({"type": "integer"}, None, None),
        ({"type": "integer", "required": True}, None, "must not be null"),
        ({"type": "string"}, ["x"], "must be a string"),
        ({"type": "number"}, {"x": 1}, "must be a number"),
    ],
)
def test_problem_of_a_value(spec: dict[str, Any], value: object, problem: str | None) -> None:
    assert ParameterSpec(**spec).problem(value) == problem


def recipe(**fields: Any) -> Recipe:
    return Recipe(
        **{
            "name": "digits",
            "version": 1,
            "title": "Digits",
            "command": ["python", "-m", "digits"],
            "parameters": {
                "steps": {"type": "integer", "default": 600, "minimum": 1},
                "prompt": {"type": "string", "required": True},
                "shuffle": {"type": "boolean", "default": False},
                "note": {"type": "string"},
            },
            **fields,
        }
    )


def test_problems_name_each_parameter_once() -> None:
    assert recipe().problems({"steps": 0, "colour": "red"}) == [
        ("colour", "is not a parameter of digits@1"),
        ("steps", "must be at least 1"),
        ("prompt", "is required"),
    ]
    assert recipe().problems({"prompt": "dog", "steps": None}) == []


def test_filled_takes_defaults_for_what_is_absent_or_null() -> None:
    assert recipe().filled({"prompt": "dog"}) == {"steps": 600, "prompt": "dog", "shuffle": False}
    assert recipe().filled({"prompt": "dog", "steps": None}) == {"steps": 600, "prompt": "dog", "shuffle": False}
    assert recipe().filled({"prompt": "dog", "steps": 5, "shuffle": True, "note": "n"}) == {
        "steps": 5,
        "prompt": "dog",
        "shuffle": True,
        "note": "n",
    }


def test_command_with_a_parameter_file() -> None:
    assert recipe().command_for({"steps": 5}) == ["python", "-m", "digits"]


def test_command_with_flags_quotes_nothing() -> None:
    """The original wrapped prompts in quotes that ended up in the prompt: no shell is used."""
    command = recipe(pass_parameters="flags").command_for({"prompt": "a dog; rm", "steps": 5, "a": True, "b": False})
    assert command == ["python", "-m", "digits", "--prompt=a dog; rm", "--steps=5", "--a"]


def test_command_for_does_not_share_the_recipes_list() -> None:
    one = recipe()
    one.command_for({}).append("more")
    assert one.command == ["python", "-m", "digits"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Digits"),
        ("version", 0),
        ("command", []),
        ("outputs", ["../x"]),
        ("outputs", ["a"] * 65),
        ("parameters", {"steps": {"type": "integer", "default": 0, "minimum": 1}}),
        ("parameters", {"mode": {"type": "string", "default": "c", "choices": ["a", "b"]}}),
        ("parameters", {"mode": {"type": "strange"}}),
        ("parameters", {"mode": {"type": "string", "choices": []}}),
        ("parameters", {"--evil=1": {"type": "string"}}),
    ],
)
def test_recipes_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        recipe(**{field: value})


def test_id() -> None:
    assert recipe(version=12).id == "digits@12"
