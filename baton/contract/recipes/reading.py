"""A recipe as a document."""

from __future__ import annotations

from baton.contract.documents import write_document
from baton.contract.recipes.model import Recipe


def dump(recipe: Recipe) -> str:
    """The recipe as a document: what is not said is left out."""
    return write_document(recipe.model_dump(mode="json", exclude_defaults=True))
