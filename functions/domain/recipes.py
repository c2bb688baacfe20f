"""Recipes that tenants have registered, as they are stored."""

from __future__ import annotations

from typing import ClassVar

from functions.domain.stored import Record


class RecipeEntry(Record):
    """One version of a tenant's recipe, without its document. Never changes."""

    tenant: str
    name: str
    version: int
    description: str
    created_at: int

    @property
    def id(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


class StoredRecipe(RecipeEntry):
    """With the document, as it was pushed."""

    BESIDE: ClassVar[frozenset[str]] = frozenset(("document",))
    """Lists read entries only."""

    document: str

    @property
    def entry(self) -> RecipeEntry:
        """What lists show of it."""
        return RecipeEntry(**self.model_dump(exclude={"document"}))
