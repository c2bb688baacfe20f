"""Built-in recipes, one YAML file each."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from contract.recipes import Recipe


@cache
def built_in_recipes() -> dict[str, Recipe]:
    """Every built-in recipe by its id, `name@version`."""
    import yaml  # only a submission that names a recipe pays for it

    recipes = [
        Recipe.model_validate(yaml.safe_load(entry.read_text(encoding="utf-8")))
        for entry in files(__package__).iterdir()
        if entry.name.endswith(".yaml")
    ]
    return {recipe.id: recipe for recipe in recipes}


def find_recipe(recipe_id: str) -> Recipe | None:
    """The recipe called `name@version`; None if there is none."""
    return built_in_recipes().get(recipe_id)
