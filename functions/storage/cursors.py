"""Encode and decode opaque cursors: the identity of a list, and the position of the next page."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal

MAX_TEXT_BYTES = 990
"""Limit of a text in a cursor: S3 and DynamoDB allow keys of 1,024 bytes, of which prefixes take a part."""

Position = Sequence[str | int]
"""Position of the last item of a page; all positions of a list have equal types."""


def encode(list_id: Sequence[str], position: Position) -> str:
    """Encode the cursor of the page after `position` in the list `list_id`."""
    text = json.dumps([list(list_id), list(position)], separators=(",", ":"), ensure_ascii=False)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode(cursor: str, list_id: Sequence[str], shape: Sequence[type[str] | type[int]]) -> list[str | int]:
    """Decode the position in a cursor. `shape`: the types of the position; numbers must not be negative.

    Raises Refusal(INVALID_CURSOR) for a damaged cursor and for a cursor of another list.
    """
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found = json.loads(text.decode())
    except (binascii.Error, ValueError, RecursionError) as error:
        raise _invalid() from error
    if not isinstance(found, list) or len(found) != 2 or found[0] != list(list_id):
        raise _invalid()
    position = found[1]
    if not isinstance(position, list) or len(position) != len(shape):
        raise _invalid()
    for value, type_ in zip(position, shape, strict=True):
        if type(value) is not type_ or not (_is_number(value) if isinstance(value, int) else _is_text(value)):
            raise _invalid()
    return position


def _is_number(value: int) -> bool:
    return 0 <= value < 10**13


def _is_text(value: str) -> bool:
    """Return True if a key can contain the text: encodable as UTF-8, and within MAX_TEXT_BYTES."""
    try:
        return 1 <= len(value.encode()) <= MAX_TEXT_BYTES
    except UnicodeEncodeError:
        return False


def _invalid() -> Refusal:
    return Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
