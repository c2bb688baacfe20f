"""Test that the Dreambooth recipes declare exactly the outputs of their script."""

from __future__ import annotations

import pytest

from baton.contract.recipes.rendering import plan_of
from functions.recipes import built_in_recipe
from gpu_client.training.dreambooth.model.lora import WEIGHTS_FILE
from gpu_client.training.dreambooth.sampling import validation


@pytest.mark.parametrize("recipe_id", ["dreambooth-lora-sdxl@2", "dreambooth-lora-sd@2"])
@pytest.mark.parametrize(
    ("given", "pictures"),
    [({}, []), ({"validation_prompt": "a dog"}, ["validation", "validation_grid.png"])],
    ids=["plain", "validation"],
)
def test_what_must_be_left_follows_from_the_parameters(
    recipe_id: str, given: dict[str, object], pictures: list[str]
) -> None:
    recipe = built_in_recipe(recipe_id)
    assert recipe is not None
    plan, faults = plan_of(recipe, {"instance_prompt": "a dog", **given}, ["instance"])
    assert plan is not None and not faults
    assert [check.path for check in plan.outputs] == [WEIGHTS_FILE, *pictures]
    assert [output.path for output in recipe.outputs] == [WEIGHTS_FILE, validation.OUTPUT_DIR, validation.GRID_FILE]
