"""Test shared outputs of recipes: a recipe declares them, later jobs find them by a key."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.names import SHARED_DIR
from baton.contract.recipes.lint import lint
from baton.contract.recipes.model import Recipe
from baton.contract.recipes.rendering import plan_of
from baton.contract.yaml_documents import read_document
from functions.recipes import built_in_recipe

DOCUMENT = """\
name: words
version: 1
description: Makes a dictionary, and trains with it.
parameters:
  language: {type: string, default: en}
  size: {type: integer, default: 10}
  steps: {type: integer, default: 100}
  dictionary: {type: boolean, default: true}
steps:
  - {name: train, run: [python, train.py, "{{ dirs.shared }}/words.bin"]}
shared:
  - {path: words.bin, key: [language, size], when: parameters.dictionary, description: The dictionary.}
"""


def recipe(text: str = DOCUMENT) -> Recipe:
    return Recipe.model_validate(read_document(text).value, strict=True)


def keys(text: str = DOCUMENT, **given: Any) -> list[str]:
    plan, faults = plan_of(recipe(text), given)
    assert plan is not None, faults
    return [shared.key for shared in plan.shared]


def test_a_plan_says_what_is_shared_and_where_it_lies() -> None:
    assert lint(DOCUMENT).faults == []
    plan, _ = plan_of(recipe(), {})
    assert plan is not None
    (shared,) = plan.shared
    assert shared.path == "words.bin" and len(shared.key) == 64
    assert plan.steps[0].command[2] == f"${{BATON_DATA_DIR}}/{SHARED_DIR}/words.bin"
    assert not plan.needs_plan, "a worker that knows no plans shares nothing, and trains as well"
    assert keys(dictionary=False) == []


def test_the_key_is_of_the_parameters_that_it_names() -> None:
    usual = keys()
    assert keys(steps=7) == keys(language="en", size=None) == usual
    others = [keys(language="de"), keys(size=11), keys(language="en", size=1)]
    assert len({key for (key,) in [usual, *others]}) == 4


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("version: 1", "version: 2", True),
        ("key: [language, size]", "key: [size, language]", True),
        ("name: words", "name: other-words", False),
        ("path: words.bin", "path: more.bin", False),
        ("key: [language, size]", "key: [language]", False),
    ],
)
def test_the_key_is_of_the_recipe_whatever_its_version(old: str, new: str, same: bool) -> None:
    assert old in DOCUMENT
    assert (keys(DOCUMENT.replace(old, new)) == keys()) is same


@pytest.mark.parametrize(
    ("old", "new", "place", "reason"),
    [
        ("[language, size]", "[language, sizes]", "shared.0.key.1", "there is no parameter 'sizes'"),
        ("when: parameters.dictionary", "when: parameters.size", "shared.0.when", "is neither true nor false"),
        ("when: parameters.dictionary", "when: parameters.no", "shared.0.when", "there is no parameters.no"),
        ("path: words.bin", "path: ../words.bin", "shared.0.path", "has an empty, '.' or '..' part"),
        ("key: [language, size], ", "", "shared.0.key", "is missing"),
        ("shared:\n", "shared:\n  - {path: words.bin, key: [size]}\n", "shared.1.path", "'words.bin' occurs twice"),
    ],
)
def test_what_cannot_be_shared_is_told_with_its_place(old: str, new: str, place: str, reason: str) -> None:
    assert old in DOCUMENT
    faults = lint(DOCUMENT.replace(old, new)).faults
    assert [(fault.field, reason in fault.reason) for fault in faults] == [(place, True)]


@pytest.mark.parametrize("recipe_id", ["dreambooth-lora-sd@2", "dreambooth-lora-sdxl@2"])
def test_dreambooth_shares_class_images_where_it_needs_some(recipe_id: str) -> None:
    found = built_in_recipe(recipe_id)
    assert found is not None
    plain, _ = plan_of(found, {"instance_prompt": "a dog"})
    prior = {"instance_prompt": "a dog", "class_prompt": "dog", "with_prior_preservation": True}
    first, _ = plan_of(found, prior)
    more, _ = plan_of(found, {**prior, "num_class_images": 200, "instance_prompt": "a cat"})
    assert plain is not None and first is not None and more is not None
    assert plain.shared == []
    assert [one.path for one in first.shared] == ["class_images.zip"]
    assert more.shared == first.shared
