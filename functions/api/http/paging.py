"""Pages that an answer can hold: Lambda's end at 6 MB, and a body is quoted once more on its way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pydantic import BaseModel

from functions.domain.ports import ResultPage

T = TypeVar("T")
V = TypeVar("V", bound=BaseModel)

MAX_ANSWER_BYTES = 4_000_000
"""As Lambda sends them, which escapes every quote, backslash and perhaps every character that is not ASCII."""


def every_item(read: Callable[[str | None], ResultPage[T]]) -> Iterator[T]:
    """The items of every page. `read` gives the page behind a cursor."""
    cursor: str | None = None
    while True:
        page = read(cursor)
        yield from page.items
        cursor = page.cursor
        if cursor is None:
            return


def size_of(views: Sequence[BaseModel]) -> int:
    """Bytes that the views take in an answer, which carries its JSON as a JSON string."""
    return sum(sent_bytes(view.model_dump_json()) for view in views)


def sent_bytes(body: str) -> int:
    """Bytes that a part of a body takes on its way."""
    return len(json.dumps(body)) - 2


def fitting(
    read: Callable[[int], ResultPage[T]], view: Callable[[Sequence[T]], list[V]], limit: int
) -> tuple[list[V], str | None]:
    """The views of the first `limit` items, or of fewer if an answer could not hold them, and where to go on.

    `read` gives the page with a limit. It is asked again with a smaller one where items are large.
    """
    while True:
        page = read(limit)
        views = view(page.items)
        size_bytes = size_of(views)
        if size_bytes <= MAX_ANSWER_BYTES or len(views) <= 1:
            return views, page.cursor
        limit = max(len(views) * MAX_ANSWER_BYTES // size_bytes, 1)
