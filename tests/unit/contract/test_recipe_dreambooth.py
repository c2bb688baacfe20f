"""What the Dreambooth recipes hand to their script is what the script takes."""

from __future__ import annotations

import pytest

from contract.recipes.rendering import plan_of
from functions.recipes import built_in_recipe
from gpu_client.training.dreambooth import class_images, validation
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.lora import WEIGHTS_FILE


@pytest.mark.parametrize("recipe_id", ["dreambooth-lora-sdxl@1", "dreambooth-lora-sd@1"])
@pytest.mark.parametrize("given", [{}, {"num_train_epochs": 3}, {"max_train_steps": 7, "snr_gamma": 5.0}])
def test_the_file_of_parameters_is_the_scripts_config(recipe_id: str, given: dict[str, object]) -> None:
    recipe = built_in_recipe(recipe_id)
    assert recipe is not None
    filled = recipe.filled({"instance_prompt": "a dog", **given})
    config = DreamboothConfig.model_validate(filled)
    assert {name: getattr(config, name) for name in filled} == filled
    assert {one.into for one in recipe.inputs} == {config.instance_data_dir, config.class_data_dir}
    defaults = {name: spec.default for name, spec in recipe.parameters.items() if spec.default is not None}
    own = {"pretrained_model_name_or_path", "pretrained_vae_model_name_or_path", "resolution"}
    assert {name: DreamboothConfig.model_fields[name].default for name in defaults if name not in own} == {
        name: value for name, value in defaults.items() if name not in own
    }


@pytest.mark.parametrize("recipe_id", ["dreambooth-lora-sdxl@1", "dreambooth-lora-sd@1"])
@pytest.mark.parametrize(
    ("given", "required", "optional"),
    [
        ({}, [], []),
        ({"validation_prompt": "a dog"}, ["validation", "validation_grid.png"], []),
        ({"with_prior_preservation": True, "class_prompt": "a dog"}, [], ["class_images"]),
    ],
    ids=["plain", "validation", "prior"],
)
def test_what_must_be_left_follows_from_the_parameters(
    recipe_id: str, given: dict[str, object], required: list[str], optional: list[str]
) -> None:
    recipe = built_in_recipe(recipe_id)
    assert recipe is not None
    plan, faults = plan_of(recipe, {"instance_prompt": "a dog", **given}, ["instance"])
    assert plan is not None and not faults
    assert [check.path for check in plan.outputs] == [WEIGHTS_FILE, *required]
    assert [check.path for check in plan.optional_outputs] == optional
    assert not plan.needs_plan, "workers that know no plans leave out what is optional"
    assert {validation.OUTPUT_DIR, validation.GRID_FILE, class_images.OUTPUT_DIR} == {
        output.path for output in recipe.outputs[1:]
    }
