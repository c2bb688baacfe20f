"""The Dreambooth recipes accept the parameters that their script accepts, and refuse all others at submit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.contract.errors import Fault
from baton.contract.jobs.dreambooth import DreamboothSubmit
from baton.contract.recipes.model import Parameter, Recipe
from baton.contract.recipes.rendering import parameter_faults
from baton.contract.recipes.templates import references
from functions.api.jobs import legacy_api
from functions.recipes import built_in_recipe
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.errors import ConfigError

RECIPES = ["dreambooth-lora-sdxl@2", "dreambooth-lora-sd@2"]
FIRST_VERSIONS = ["dreambooth-lora-sdxl@1", "dreambooth-lora-sd@1"]
"""First versions of the recipes, with the original orchestrator's learning rate."""
NEEDED = {"instance_prompt": "a photo of sks dog"}
NOT_THE_USERS = {"instance_data_dir", "class_data_dir", "cache_dir"}
"""Folders: the recipes' inputs set the first two, the worker sets the third."""
OF_THE_RECIPE = {"pretrained_model_name_or_path", "pretrained_vae_model_name_or_path", "model_type", "resolution"}
"""Defaults that follow from the kind of model."""
WITHOUT_DEFAULT = {"max_train_steps", "num_train_epochs"}
"""The recipes take one of the two; without either it is the script's 500 steps."""
BOUNDS = {
    "minimum": "minimum",
    "exclusiveMinimum": "exclusive_minimum",
    "maximum": "maximum",
    "exclusiveMaximum": "exclusive_maximum",
    "minLength": "min_length",
    "maxLength": "max_length",
    "enum": "choices",
}
CONFIG = DreamboothConfig.model_json_schema()["properties"]
FLAT = DreamboothSubmit.model_json_schema()["properties"]


def recipe_of(recipe_id: str) -> Recipe:
    recipe = built_in_recipe(recipe_id)
    assert recipe is not None
    return recipe


def kind_and_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Translate type and bounds of a field from JSON schema to recipe names; null is left out."""
    kind = next((one for one in schema.get("anyOf", ()) if one["type"] != "null"), schema)
    return {"type": kind["type"]} | {ours: kind[name] for name, ours in BOUNDS.items() if name in kind}


def bounds_of(spec: Parameter) -> dict[str, Any]:
    said = spec.model_dump(include={"type", *BOUNDS.values()}, exclude_defaults=True)
    return {"type": spec.type} | said


def config_problems(parameters: dict[str, Any]) -> list[str]:
    try:
        DreamboothConfig.of(parameters)
    except ConfigError as error:
        return error.problems
    return []


def fields_of(faults: Sequence[Fault | str]) -> set[str]:
    """Return the first field of each fault: "class_prompt" for "class_prompt, other: is needed"."""
    named = [fault.field.removeprefix("parameters.") if isinstance(fault, Fault) else fault for fault in faults]
    return {name.partition(":")[0].partition(",")[0] for name in named}


@pytest.mark.parametrize("recipe_id", RECIPES)
def test_every_field_of_the_config_is_a_parameter_with_its_default_and_bounds(recipe_id: str) -> None:
    recipe = recipe_of(recipe_id)
    assert recipe.parameters.keys() == DreamboothConfig.model_fields.keys() - NOT_THE_USERS
    for name, spec in recipe.parameters.items():
        field = DreamboothConfig.model_fields[name]
        assert spec.required == field.is_required(), name
        if name not in OF_THE_RECIPE | WITHOUT_DEFAULT and not spec.required:
            assert spec.default == field.default, name
        if name != "model_type":
            assert bounds_of(spec) == kind_and_bounds(CONFIG[name]), name
        assert spec.description, name
    assert all(recipe.parameters[name].default is None for name in WITHOUT_DEFAULT)


def test_each_recipe_is_for_one_kind_of_model() -> None:
    kinds = {recipe_id: recipe_of(recipe_id).parameters["model_type"] for recipe_id in RECIPES}
    assert {recipe_id: (spec.default, spec.choices) for recipe_id, spec in kinds.items()} == {
        "dreambooth-lora-sdxl@2": ("sdxl", ["sdxl"]),
        "dreambooth-lora-sd@2": ("sd", ["sd"]),
    }


def test_the_two_recipes_differ_in_nothing_else() -> None:
    sdxl, sd = (
        recipe_of(recipe_id).model_dump(exclude={"name", "description", "requirements"}) for recipe_id in RECIPES
    )
    for recipe in (sdxl, sd):
        for name in OF_THE_RECIPE:
            recipe["parameters"][name] |= {"default": None, "choices": None}
    assert sdxl == sd


@pytest.mark.parametrize(("first", "second"), [*zip(FIRST_VERSIONS, RECIPES, strict=True)])
def test_the_second_versions_differ_in_the_learning_rate(first: str, second: str) -> None:
    """2e-6 is a rate for whole models; 500 steps at 2e-6 hardly change a LoRA."""
    before, after = (recipe_of(recipe_id).model_dump(exclude={"version"}) for recipe_id in (first, second))
    rates = [recipe["parameters"]["learning_rate"].pop("default") for recipe in (before, after)]
    assert rates == [2e-6, 1e-4]
    assert before == after


@pytest.mark.parametrize("recipe_id", RECIPES)
@pytest.mark.parametrize("given", [{}, {"num_train_epochs": 3}, {"max_train_steps": 7, "snr_gamma": 5.0}])
def test_the_file_of_parameters_is_the_scripts_config(recipe_id: str, given: dict[str, object]) -> None:
    recipe = recipe_of(recipe_id)
    filled = recipe.filled({**NEEDED, **given})
    config = DreamboothConfig.model_validate(filled)
    assert {name: getattr(config, name) for name in filled} == filled
    assert {one.into for one in recipe.inputs} == {config.instance_data_dir, config.class_data_dir}


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"resolution": 100}, "resolution"),
    ({"aspect_ratio_buckets": True, "bucket_step": 12}, "bucket_step"),
    ({"aspect_ratio_buckets": True, "resolution": 64, "bucket_step": 128}, "bucket_step"),
    ({"with_prior_preservation": True}, "class_prompt"),
    ({"with_prior_preservation": True, "class_prompt": " "}, "class_prompt"),
    ({"with_prior_preservation": True, "class_prompt": "a dog", "num_class_images": 0}, "num_class_images"),
    ({"cache_text_embeddings": True}, "cache_text_embeddings"),
    ({"cache_latents": True}, "cache_latents"),
    ({"lr_warmup_steps": 501}, "lr_warmup_steps"),
    ({"lr_warmup_steps": 8, "max_train_steps": 7}, "lr_warmup_steps"),
    ({"lr_scheduler": "polynomial", "learning_rate": 1e-7}, "learning_rate"),
]
CONSISTENT: list[dict[str, Any]] = [
    {"bucket_step": 128, "resolution": 64},
    {"aspect_ratio_buckets": True, "bucket_step": 64, "resolution": 64},
    {"with_prior_preservation": True, "class_prompt": "a dog"},
    {"num_class_images": 0},
    {"cache_text_embeddings": True, "train_text_encoder": False},
    {"cache_latents": True, "center_crop": True},
    {"cache_latents": True, "aspect_ratio_buckets": True},
    {"lr_warmup_steps": 501, "max_train_steps": 501},
    {"lr_warmup_steps": 501, "num_train_epochs": 1},
    {"lr_scheduler": "polynomial", "learning_rate": 1.1e-7, "text_encoder_lr": 1e-8},
    {"lr_scheduler": "cosine", "learning_rate": 1e-8},
]


@pytest.mark.parametrize("recipe_id", RECIPES)
@pytest.mark.parametrize(("changed", "field"), CONTRADICTIONS, ids=[str(case[0]) for case in CONTRADICTIONS])
def test_a_contradiction_is_refused_by_both_with_the_same_field(
    recipe_id: str, changed: dict[str, Any], field: str
) -> None:
    recipe = recipe_of(recipe_id)
    (fault,) = parameter_faults(recipe, NEEDED | changed)
    assert fields_of([fault]) == {field} and fault.reason and fault.remedy
    assert fields_of(config_problems(recipe.filled(NEEDED | changed))) == {field}


@pytest.mark.parametrize("recipe_id", RECIPES)
@pytest.mark.parametrize("changed", CONSISTENT, ids=str)
def test_what_is_no_contradiction_is_taken_by_both(recipe_id: str, changed: dict[str, Any]) -> None:
    recipe = recipe_of(recipe_id)
    assert parameter_faults(recipe, NEEDED | changed) == []
    assert config_problems(recipe.filled(NEEDED | changed)) == []


def test_no_rule_and_no_contradiction_is_without_a_case_above() -> None:
    recipe = recipe_of(RECIPES[0])
    cases = [*(changed for changed, _ in CONTRADICTIONS), {"max_train_steps": 1, "num_train_epochs": 1}]
    told = {fault.reason for changed in cases for fault in parameter_faults(recipe, NEEDED | changed)}
    assert {rule.message for rule in recipe.rules} <= told
    wrong = [[one[0] for one in unchecked(changed)._contradictions()] for changed, _ in CONTRADICTIONS]
    assert all(map(any, zip(*wrong, strict=True)))


def unchecked(changed: dict[str, Any]) -> DreamboothConfig:
    """Make a config without the check of the whole."""
    return DreamboothConfig.model_construct(_fields_set=set(changed), **NEEDED, **changed)


def edges(spec: Parameter) -> list[Any]:
    """Return values at, inside and beyond the bounds of a parameter."""
    if spec.type == "boolean":
        return [True, False]
    if spec.type == "string":
        long = [spec.max_length, spec.max_length + 1]
        return ["", " ", "a", "nothing that is known", *(["x" * n for n in long]), *(spec.choices or [])]
    bounds = [
        one for one in (spec.minimum, spec.exclusive_minimum, spec.maximum, spec.exclusive_maximum) if one is not None
    ]
    if spec.type == "integer":
        return [int(bound) + by for bound in bounds for by in (-8, -1, 0, 1, 8)]
    return [*(bound + by for bound in bounds for by in (-1, -1e-9, 0, 1e-9, 1)), 1e-8, 0.5, 1e300]


@pytest.mark.parametrize("recipe_id", RECIPES)
def test_one_value_at_a_time_is_taken_by_both_or_by_neither(recipe_id: str) -> None:
    recipe = recipe_of(recipe_id)
    seen = set()
    for name, spec in recipe.parameters.items():
        for value in [None, *edges(spec)]:
            given = NEEDED | {name: value}
            faults, problems = parameter_faults(recipe, given), config_problems(recipe.filled(given))
            only = name == "model_type" and value in ("auto", "sd", "sdxl")
            assert only or fields_of(faults) == fields_of(problems), given
            seen.add((name, bool(faults)))
    takes_all = {name for name in recipe.parameters if (name, True) not in seen}
    assert takes_all == {name for name, spec in recipe.parameters.items() if spec.type == "boolean"} - {
        "cache_latents",
        "cache_text_embeddings",
        "with_prior_preservation",
    }


NEAR: dict[str, list[Any]] = {
    "class_prompt": ["a dog", " "],
    "max_train_steps": [1, 10, 500, 501],
    "num_train_epochs": [1, 2],
    "lr_warmup_steps": [0, 1, 2, 10, 11, 500, 501],
    "learning_rate": [1e-8, 1e-7, 1.5e-7],
    "lr_scheduler": ["polynomial", "constant"],
    "resolution": [64, 72, 128],
    "bucket_step": [8, 64, 72, 128],
    "num_class_images": [0, 1],
}
"""Values that are valid one by one and close to a contradiction with others."""


def sets_of(recipe: Recipe) -> st.SearchStrategy[dict[str, Any]]:
    """Draw all parameters that rules read, each given or not, and some of the others."""
    read = {one.member for rule in recipe.rules for one in references(rule.require, bare=True)}
    assert read >= NEAR.keys()
    fields, others = {"instance_prompt": st.just("a dog")}, {}
    for name, spec in recipe.parameters.items():
        values = NEAR.get(name) or [value for value in edges(spec) if spec.problem(value) is None]
        if name in read:
            fields[name] = st.sampled_from([None, *values])
        elif name not in fields:
            others[name] = st.sampled_from(values)
    some = st.lists(st.sampled_from(sorted(others)), max_size=4, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries(fields | {name: others[name] for name in names}))


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(RECIPES))
def test_a_set_of_parameters_is_taken_by_both_or_by_neither(data: st.DataObject, recipe_id: str) -> None:
    """Exception: steps and epochs together. The script lets epochs win, as the original did; a recipe refuses both."""
    recipe = recipe_of(recipe_id)
    given = data.draw(sets_of(recipe))
    faults = parameter_faults(recipe, given)
    both = given.get("max_train_steps") is not None and given.get("num_train_epochs") is not None
    if both:
        assert "contradicts num_train_epochs" in [fault.reason for fault in faults]
    else:
        assert fields_of(faults) == fields_of(config_problems(recipe.filled(given)))


# The original's flat payload


def test_its_fields_are_those_of_the_config_with_their_defaults_and_bounds() -> None:
    prefixes = {"instance_data_prefix", "class_data_prefix"}
    names = FLAT.keys() - prefixes
    assert names <= CONFIG.keys()
    defaults = DreamboothSubmit(instance_data_prefix="dogs/", **NEEDED)
    for name in names:
        theirs, ours = kind_and_bounds(FLAT[name]), kind_and_bounds(CONFIG[name])
        if name in ("class_prompt", "validation_prompt"):
            theirs |= {"min_length": 1}  # an empty one is none
        assert theirs == ours, name
        if name != "learning_rate":
            assert getattr(defaults, name) == getattr(DreamboothConfig.of(NEEDED), name), name


def test_its_default_rate_is_the_original_s() -> None:
    job, columns = legacy_api.convert_job(DreamboothSubmit(instance_data_prefix="dogs/", **NEEDED), "j-1")
    assert columns["learning_rate"] == job.parameters["learning_rate"] == 2e-6


def flat_bodies() -> st.SearchStrategy[dict[str, Any]]:
    recipe = recipe_of(legacy_api.RECIPE)
    drawn = sets_of(recipe)
    nullable = {"class_prompt", "validation_prompt"}
    return drawn.map(
        lambda given: {
            name: value for name, value in given.items() if name in FLAT and (value is not None or name in nullable)
        }
    )


def without_a_class_that_has_no_name(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what Baton's agent trains: without prior preservation where the class has no prompt."""
    return asked | ({} if (asked.get("class_prompt") or "").strip() else {"with_prior_preservation": False})


@settings(max_examples=400, deadline=None)
@given(flat_bodies(), st.sampled_from([{}, {"class_prompt": ""}, {"validation_prompt": ""}]))
def test_a_flat_payload_is_taken_if_the_script_would_take_it(body: dict[str, Any], change: dict[str, Any]) -> None:
    body = body | change
    job, columns = legacy_api.convert_job(DreamboothSubmit(instance_data_prefix="dogs/", **body), "j-1")
    recipe = recipe_of(legacy_api.RECIPE)
    faults = parameter_faults(recipe, job.parameters)
    # The original's rule: its epochs count if there are more than 1 of them.
    asked = {name: value or None if isinstance(value, str) else value for name, value in body.items()}
    asked.setdefault("max_train_steps", 500)
    asked = without_a_class_that_has_no_name(asked)
    assert fields_of(faults) == fields_of(config_problems(asked))
    assert body.items() <= columns.items()
    if not faults:
        ours, theirs = DreamboothConfig.of(recipe.filled(job.parameters)), DreamboothConfig.of(asked)
        assert ours.total_steps(40) == theirs.total_steps(40)


@pytest.mark.parametrize("name", sorted(FLAT.keys() - {"instance_data_prefix", "class_data_prefix"}))
def test_a_field_of_the_flat_payload_has_the_bounds_of_the_script(name: str) -> None:
    spec = recipe_of(legacy_api.RECIPE).parameters[name]
    for value in edges(spec):
        try:
            job, _ = legacy_api.convert_job(
                DreamboothSubmit.model_validate(NEEDED | {"instance_data_prefix": "dogs/", name: value}), "j-1"
            )
        except ValidationError:
            taken = False
        else:
            taken = not parameter_faults(recipe_of(legacy_api.RECIPE), job.parameters)
        if name in ("class_prompt", "validation_prompt") and value == "":
            assert taken
        else:
            asked = without_a_class_that_has_no_name(NEEDED | {"max_train_steps": 500} | {name: value})
            assert taken == (not config_problems(asked)), (value, taken)
