"""The calls that register, list and read recipes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, Cursor, EpochSeconds, JsonObject, PageLimit, WireModel

RECIPE_ID_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}@[1-9][0-9]{0,5}$"


class RecipePush(WireModel):
    """A recipe to register: the YAML text, as it is. Its name and version are in it.

    Example: `{"document": "{name: hello, version: 1, description: Says hello.,
    steps: [{name: hello, run: [echo, hello]}]}"}`
    """

    document: Annotated[str, Field(min_length=1, max_length=64 * 1024)]


class RecipeSummary(AnswerModel):
    """A recipe in a list. Example: `{"id": "digits@1", "description": "...", "built_in": true}`"""

    id: str
    """`name@version`, the value of `recipe` in a job."""
    description: str
    built_in: bool = False
    created_at: EpochSeconds | None = None
    """Time of registration; None for a built-in recipe."""


class RecipeView(RecipeSummary):
    """A recipe with its document.

    Example: `{"id": "digits@1", "description": "...", "built_in": true, "document": "name: digits\\nversion: 1\\n...",
    "recipe": {"name": "digits", "version": 1, "parameters": {}, "steps": []}}`
    """

    document: str
    recipe: JsonObject | None = None
    """The document as JSON, in which each field without a value has its default: the schema of a form. None from an
    older control plane."""


class RecipeQuery(WireModel):
    """Query of `GET /recipes`. Example: `?limit=100`"""

    limit: PageLimit = 100
    cursor: Cursor | None = None


class RecipePage(AnswerModel):
    """Built-in recipes, on the first page, then the tenant's own by name and version.

    Example: `{"recipes": [], "next_cursor": null}`
    """

    recipes: list[RecipeSummary]
    next_cursor: str | None = None
