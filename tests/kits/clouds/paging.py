"""Paging: read lists to their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from functions.domain.ports import ResultPage

T = TypeVar("T")


def all_pages(fetch: Callable[[str | None], ResultPage[T]], *, full: int | None = None) -> list[T]:
    """Read all pages; `fetch` takes a cursor.

    `full`: what each page but the last has to have; and none is empty but an only one.
    """
    found: list[T] = []
    cursor: str | None = None
    while True:
        page = fetch(cursor)
        assert full is None or page.items or not found, "an empty page behind others"
        found += page.items
        cursor = page.cursor
        assert full is None or len(page.items) == full or (cursor is None and len(page.items) < full)
        if cursor is None:
            return found
