"""Calls about recipes."""

from __future__ import annotations

from baton.contract.recipes.calls import RecipePage, RecipePush, RecipeView
from gpu_client.transport.calls import ApiCalls, read_answer, segment


class RecipeCalls(ApiCalls):
    """Registering and seeing recipes."""

    def push_recipe(self, document: str) -> RecipeView:
        """Register a recipe; the same document again is fine."""
        body = RecipePush(document=document)
        return read_answer("push_recipe", self._send("push_recipe", "POST", "/recipes", body=body), RecipeView)

    def recipes(self, *, limit: int = 100, cursor: str | None = None) -> RecipePage:
        """One page of the recipes that jobs may name, built-in ones first."""
        query = {"limit": limit, "cursor": cursor}
        return read_answer("recipes", self._send("recipes", "GET", "/recipes", query=query), RecipePage)

    def recipe(self, recipe_id: str) -> RecipeView:
        """One recipe, `name@version`."""
        return read_answer("recipe", self._send("recipe", "GET", f"/recipes/{segment(recipe_id)}"), RecipeView)
