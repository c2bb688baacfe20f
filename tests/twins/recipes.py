"""Tenants' recipes in memory."""

from __future__ import annotations

from functions.domain import table_keys
from functions.domain.ports import ResultPage
from functions.domain.records import RecipeEntry, StoredRecipe
from functions.storage.paging import page, recipes_list
from tests.twins.state import MemoryState


class MemoryRecipeStore:
    """Twin of DynamoRecipeStore."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def add(self, recipe: StoredRecipe) -> bool:
        place = (recipe.tenant, table_keys.recipe_sk(recipe.name, recipe.version))
        with self._state.lock:
            if place in self._state.recipes:
                return False
            self._state.recipes[place] = recipe
            return True

    def get(self, tenant: str, name: str, version: int) -> StoredRecipe | None:
        with self._state.lock:
            return self._state.recipes.get((tenant, table_keys.recipe_sk(name, version)))

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[RecipeEntry]:
        listed = recipes_list(tenant)
        position = listed.position(cursor)
        after = "" if position is None else table_keys.recipe_sk(str(position[0]), int(position[1]))
        with self._state.lock:
            found = [
                recipe.entry
                for (owner, place), recipe in sorted(self._state.recipes.items(), key=lambda stored: stored[0])
                if owner == tenant and place > after
            ]
        return page(found[: limit + 1], limit, listed, lambda entry: (entry.name, entry.version))
