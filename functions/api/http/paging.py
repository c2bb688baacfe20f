"""Pages within Lambda's limit: an answer ends at 6 MB, and Lambda quotes the body once more as a JSON string."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pydantic import BaseModel

from functions.domain.ports import ResultPage

T = TypeVar("T")
V = TypeVar("V", bound=BaseModel)

MAX_ANSWER_BYTES = 4_000_000
"""Limit in bytes after Lambda's escaping of quotes, backslashes, and perhaps all non-ASCII characters."""


def iterate_items(read: Callable[[str | None], ResultPage[T]]) -> Iterator[T]:
    """Yield the items of every page. `read` returns the page behind a cursor."""
    cursor: str | None = None
    while True:
        page = read(cursor)
        yield from page.items
        cursor = page.cursor
        if cursor is None:
            return


def count_answer_bytes(views: Sequence[BaseModel]) -> int:
    """Return the bytes of the views in an answer, which carries its JSON as a JSON string."""
    return sum(count_sent_bytes(view.model_dump_json()) for view in views)


def count_sent_bytes(body: str) -> int:
    """Return the bytes of a part of a body after Lambda's escaping."""
    return len(json.dumps(body)) - 2


def read_fitting_page(
    read: Callable[[int], ResultPage[T]], view: Callable[[Sequence[T]], list[V]], limit: int
) -> tuple[list[V], str | None]:
    """Return the views of at most `limit` items that fit into an answer, and the cursor of the next page.

    `read` returns the page with a limit. Where items are large, `read` is called again with a smaller limit.
    """
    while True:
        page = read(limit)
        views = view(page.items)
        size_bytes = count_answer_bytes(views)
        if size_bytes <= MAX_ANSWER_BYTES or len(views) <= 1:
            return views, page.cursor
        limit = max(len(views) * MAX_ANSWER_BYTES // size_bytes, 1)
