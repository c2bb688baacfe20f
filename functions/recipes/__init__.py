"""Built-in recipes, one YAML file each: `<name>@<version>.yaml`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Only a submission with a recipe loads the recipe language.
    from baton.contract.recipes.model import Recipe


@cache
def built_in_ids() -> tuple[str, ...]:
    """Return `name@version` of every built-in recipe."""
    names = (entry.name for entry in files(__package__).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


@cache
def built_in_document(recipe_id: str) -> str | None:
    """Return the text of a built-in recipe; None for an unknown id."""
    if recipe_id not in built_in_ids():
        return None
    return files(__package__).joinpath(f"{recipe_id}.yaml").read_text(encoding="utf-8")


@cache
def built_in_recipe(recipe_id: str) -> Recipe | None:
    """Return the recipe `name@version`; None for an unknown id."""
    from baton.contract.recipes.model import Recipe
    from baton.contract.yaml_documents import read_document

    document = built_in_document(recipe_id)
    return None if document is None else Recipe.model_validate(read_document(document).value, strict=True)


def is_built_in_name(name: str) -> bool:
    """Return True if any version of a built-in recipe has the name."""
    return any(recipe_id.partition("@")[0] == name for recipe_id in built_in_ids())
