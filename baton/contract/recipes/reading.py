"""Write a recipe as a document."""

from __future__ import annotations

from baton.contract.recipes.model import Recipe
from baton.contract.yaml_documents import write_document


def dump(recipe: Recipe) -> str:
    """Write a recipe as YAML, without the fields that have their default."""
    return write_document(recipe.model_dump(mode="json", exclude_defaults=True))
