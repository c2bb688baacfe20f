"""Tenants' recipes: every store keeps the same promises."""

from __future__ import annotations

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.records import StoredRecipe
from tests.conformance.store_kit import NOW
from tests.kits.clouds.paging import all_pages
from tests.kits.clouds.store_sets import Cloud


def recipe(name: str = "train", version: int = 1, tenant: str = "acme", document: str = "name: train") -> StoredRecipe:
    return StoredRecipe(
        tenant=tenant, name=name, version=version, description="Trains.", created_at=NOW, document=document
    )


def test_a_recipe_is_kept_as_it_is_and_only_for_its_tenant(cloud: Cloud) -> None:
    kept = recipe(document="name: träin\n" * 4000)
    assert cloud.recipes.add(kept) is True
    assert cloud.recipes.get("acme", "train", 1) == kept
    assert cloud.recipes.get("rival", "train", 1) is None
    assert cloud.recipes.get("acme", "train", 2) is None
    assert cloud.recipes.add(recipe(tenant="rival")) is True


def test_what_is_there_is_never_replaced(cloud: Cloud) -> None:
    first = recipe()
    assert cloud.recipes.add(first) is True
    assert cloud.recipes.add(recipe(document="other")) is False
    assert cloud.recipes.add(first) is False
    assert cloud.recipes.get("acme", "train", 1) == first


def test_recipes_are_listed_in_pages_by_name_and_version(cloud: Cloud) -> None:
    names = [("b", 2), ("a", 10), ("a", 9), ("a-b", 1), ("b", 1), ("ab", 1)]
    for name, version in names:
        cloud.recipes.add(recipe(name, version))
    cloud.recipes.add(recipe("a", 1, tenant="rival"))
    found = all_pages(lambda cursor: cloud.recipes.list("acme", limit=2, cursor=cursor), full=2)
    assert [one.id for one in found] == ["a-b@1", "a@9", "a@10", "ab@1", "b@1", "b@2"]
    assert found[1] == recipe("a", 9).entry
    assert list(cloud.recipes.list("nobody", limit=5).items) == []
    cursor = cloud.recipes.list("acme", limit=2).cursor
    with pytest.raises(Refusal) as refused:
        cloud.recipes.list("rival", limit=2, cursor=cursor)
    assert refused.value.code is ErrorCode.INVALID_CURSOR
