"""A recipe as a document."""

from __future__ import annotations

from baton.contract.recipes.model import Recipe
from baton.contract.yaml_documents import write_document


def dump(recipe: Recipe) -> str:
    """The recipe as a document: what is not said is left out."""
    return write_document(recipe.model_dump(mode="json", exclude_defaults=True))
