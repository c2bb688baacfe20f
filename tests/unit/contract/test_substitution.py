"""Forms in a command that cannot be what was meant are refused when the job is submitted."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from baton.contract.jobs.job import JobSubmit
from baton.contract.recipes.rendering import plan_of
from functions.recipes import built_in_recipe

MALFORMED = [
    "${BATON_RESUME_FROM:-none}",
    "${BATON_RESUME_FROM:+--resume",
    "${BATON_RESUME_FROM:+{x}}",
    "${BATON_RESUME_FROM:+${HOME}}",
    "${BATON_RESUME_FROM:+${BATON_EPOCH:+x}}",
    "${BATON_RESUME_FROM:",
]
FINE = [
    "${BATON_RESUME_FROM:+--resume_from_checkpoint=$BATON_RESUME_FROM}",
    "${BATON_RESUME_FROM:+${BATON_RESUME_FROM}} and {more}",
    "${BATON_RESUME_FROM}",
    "echo ${BATON_RESUME_FROM:-none}",
    "${HOME:-x}",
]


@pytest.mark.parametrize("argument", MALFORMED)
def test_a_malformed_argument_is_refused(argument: str) -> None:
    with pytest.raises(ValidationError, match=r"item 1, .* is not of the form"):
        JobSubmit(command=["python", argument])


@pytest.mark.parametrize("argument", FINE)
def test_all_else_is_taken(argument: str) -> None:
    assert JobSubmit(command=["python", argument]).command == ["python", argument]


def test_a_recipe_s_command_is_looked_at_when_it_is_rendered() -> None:
    recipe = built_in_recipe("command@1")
    assert recipe is not None
    for argument in MALFORMED:
        plan, faults = plan_of(recipe, {"command": ["python", argument]})
        assert plan is None
        (fault,) = faults
        assert "item 1" in fault.reason and fault.remedy.startswith("Write ${BATON_NAME:+WORD}")
    for argument in FINE:
        plan, faults = plan_of(recipe, {"command": ["python", argument]})
        assert faults == [] and plan is not None
        assert plan.steps[0].command == ["python", argument]


def test_a_program_is_named_always() -> None:
    with pytest.raises(ValidationError, match=r"item 0, .* must name a program"):
        JobSubmit(command=["${BATON_RESUME_FROM:+python}", "train.py"])
