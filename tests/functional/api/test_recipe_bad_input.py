"""Bad input of recipes, case by case: a clear error with a stable code, the field and a remedy, and nothing is stored.

What only a machine can know (images, base models, hardware, checkpoints) is in
tests/unit/dreambooth/test_dreambooth_bad_input.py and test_dreambooth_resume.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from tests.functional.api.calls import reasons_by_field
from tests.kits.api.harness import Api

RECIPES = ["dreambooth-lora-sdxl@2", "dreambooth-lora-sd@2"]
TOOL = """\
name: tool
version: 1
description: Saves.
parameters:
  to: {type: string, default: a}
steps:
  - name: save
    run: [save, "{{ dirs.output }}/{{ parameters.to }}"]
outputs:
  - {path: a}
"""


def job(recipe: str, **parameters: Any) -> dict[str, Any]:
    given = {"instance_prompt": "a dog", **parameters}
    return {"recipe": recipe, "parameters": given, "inputs": [{"prefix": "dogs/", "into": "instance"}]}


def refused(api: Api, body: dict[str, Any], field: str, code: ErrorCode = ErrorCode.INVALID_VALUE) -> dict[str, str]:
    with api.unchanged():
        error = api.post("/job", body).refused(code, field)
    return reasons_by_field(error) if code is ErrorCode.INVALID_VALUE else {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_good_input_is_accepted(api: Api, recipe: str) -> None:
    view = api.post("/job", job(recipe)).ok()
    assert view["parameters"]["model_type"] == recipe.split("-")[2].partition("@")[0]


def test_an_unknown_recipe(api: Api) -> None:
    refused(api, job("dreambooth-lora-flux@1"), "recipe", ErrorCode.UNKNOWN_RECIPE)


def test_an_unknown_version(api: Api) -> None:
    refused(api, job("dreambooth-lora-sdxl@999"), "recipe", ErrorCode.UNKNOWN_RECIPE)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("instance_prompt", 5, "must be a string"),
        ("instance_prompt", None, "must not be null"),
        ("max_train_steps", "500", "must be a whole number"),
        ("max_train_steps", 0.5, "must be a whole number"),
        ("learning_rate", "2e-6", "must be a number"),
        ("train_text_encoder", "yes", "must be true or false"),
        ("mixed_precision", False, "must be a string"),
    ],
)
def test_a_wrong_type(api: Api, recipe: str, name: str, value: Any, reason: str) -> None:
    field = f"parameters.{name}"
    assert refused(api, job(recipe, **{name: value}), field) == {field: reason}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("instance_prompt", "", "must not be empty"),
        ("max_train_steps", -1, "must be at least 1"),
        ("learning_rate", 0, "must be more than 0"),
        ("lora_dropout", 1, "must be less than 1"),
        ("ema_decay", 1.0, "must be less than 1"),
        ("lora_rank", 1025, "must be at most 1024"),
        ("mixed_precision", "fp8", "is none of its choices"),
    ],
)
def test_out_of_bounds(api: Api, recipe: str, name: str, value: Any, reason: str) -> None:
    field = f"parameters.{name}"
    assert refused(api, job(recipe, **{name: value}), field) == {field: reason}


def test_a_model_of_the_other_kind(api: Api) -> None:
    for recipe, other in zip(RECIPES, ("sd", "sdxl"), strict=True):
        refused(api, job(recipe, model_type=other), "parameters.model_type")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        ({"max_train_steps": 5, "num_train_epochs": 2}, "max_train_steps", "contradicts num_train_epochs"),
        ({"lr_warmup_steps": 501}, "lr_warmup_steps", "must not be more than max_train_steps"),
        ({"lr_scheduler": "polynomial", "learning_rate": 1e-8}, "learning_rate", "must be more than 1e-7 with the"),
        ({"cache_latents": True}, "cache_latents", "needs center_crop or aspect_ratio_buckets"),
        ({"cache_text_embeddings": True}, "cache_text_embeddings", "contradicts train_text_encoder"),
        ({"aspect_ratio_buckets": True, "bucket_step": 128, "resolution": 64}, "bucket_step", "must not be more than"),
        (
            {"with_prior_preservation": True, "class_prompt": "a dog", "num_class_images": 0},
            "num_class_images",
            "must be at least 1 with with_prior_preservation",
        ),
    ],
)
def test_contradictory_fields(api: Api, recipe: str, given: dict[str, Any], name: str, reason: str) -> None:
    field = f"parameters.{name}"
    said = refused(api, job(recipe, **given), field)
    assert set(said) == {field} and said[field].startswith(reason)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("prompt", [None, " "])
def test_a_missing_prior_prompt(api: Api, recipe: str, prompt: str | None) -> None:
    body = job(recipe, with_prior_preservation=True, class_prompt=prompt)
    said = refused(api, body, "parameters.class_prompt")
    assert said == {"parameters.class_prompt": "is needed with with_prior_preservation"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_prefix(api: Api, recipe: str) -> None:
    body = {**job(recipe), "inputs": [{"prefix": "", "into": "instance"}]}
    assert refused(api, body, "inputs") == {"inputs": "the input for 'instance' has an empty prefix"}
    assert refused(api, {**body, "inputs": []}, "inputs") == {"inputs": "the input for 'instance' is missing"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("resolution", [65, 511, 1020])
def test_a_resolution_that_is_not_divisible_by_8(api: Api, recipe: str, resolution: int) -> None:
    said = refused(api, job(recipe, resolution=resolution), "parameters.resolution")
    assert said == {"parameters.resolution": "must be a multiple of 8"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_of_it_at_once(api: Api, recipe: str) -> None:
    body = job(recipe, resolution=100, stpes=5, mixed_precision=16, cache_latents=True, with_prior_preservation=True)
    said = refused(api, {**body, "inputs": []}, "parameters.stpes")
    assert set(said) == {
        *("parameters.stpes", "parameters.resolution", "parameters.mixed_precision"),
        *("parameters.cache_latents", "parameters.class_prompt", "inputs"),
    }


@pytest.mark.parametrize(
    ("old", "new", "field", "line"),
    [
        ("{{ dirs.output }}/{{ parameters.to }}", "{{ dirs.output }}/../x", "steps.0.run.1", 8),
        ("{{ dirs.output }}/{{ parameters.to }}", "--to=${BATON_DATA_DIR}/a/../../x", "steps.0.run.1", 8),
        ("{{ dirs.output }}/{{ parameters.to }}", "--to=../../x", "steps.0.run.1", 8),
        ("run:", 'environment: {TO: "$BATON_OUTPUT_DIR/.."}\n    run:', "steps.0.environment.TO", 8),
        ("{path: a}", "{path: ../a}", "outputs.0.path", 10),
        ("{path: a}", "{path: /etc/passwd}", "outputs.0.path", 10),
        ("    run:", "    keeps: [../x]\n    run:", "steps.0.keeps.0", 8),
        ("default: a}", "default: ../../x}", "steps.0.run.1", 8),
    ],
)
def test_a_recipe_step_that_writes_outside_its_directories(api: Api, old: str, new: str, field: str, line: int) -> None:
    assert TOOL.count(old) == 1
    with api.unchanged():
        error = api.post("/recipes", {"document": TOOL.replace(old, new)})
        problems = error.refused(ErrorCode.INVALID_RECIPE, "document")["problems"]
    assert [(one["field"], one["line"]) for one in problems] == [(field, line)]
    assert all(one["reason"] and one["remedy"] for one in problems)


def test_a_parameter_that_makes_a_step_write_outside_its_directories(api: Api) -> None:
    api.post("/recipes", {"document": TOOL}).ok()
    api.post("/job", {"recipe": "tool@1", "parameters": {"to": "b/../c"}}).ok()
    for path in ("../x", "a/../../x", "a/b/../../../etc/cron.d/x"):
        said = refused(api, {"recipe": "tool@1", "parameters": {"to": path}}, "steps.0.run.1")
        assert said["steps.0.run.1"].endswith("leads out of the job's directory")
    own = ["sh", "-c", "true > $BATON_OUTPUT_DIR/../x"]
    refused(api, {"recipe": "command@1", "parameters": {"command": own}}, "steps.0.run.0")


@pytest.mark.parametrize(
    ("old", "new", "field", "reason"),
    [
        ("parameters.to }}", "parameters.form }}", "steps.0.run.1", "there is no parameters.form"),
        ("parameters.to }}", "to }}", "steps.0.run.1", "there is no variable 'to'"),
        ("dirs.output", "dirs.outputs", "steps.0.run.1", "there is no dirs.outputs"),
        ("    run:", "    when: parameter.to == 'a'\n    run:", "steps.0.when", "there is no variable 'parameter'"),
    ],
)
def test_a_template_that_names_an_unknown_variable(api: Api, old: str, new: str, field: str, reason: str) -> None:
    assert TOOL.count(old) == 1
    with api.unchanged():
        error = api.post("/recipes", {"document": TOOL.replace(old, new)})
        (problem,) = error.refused(ErrorCode.INVALID_RECIPE, "document")["problems"]
    assert (problem["field"], problem["reason"], problem["line"]) == (field, reason, 8)
    assert problem["remedy"]
