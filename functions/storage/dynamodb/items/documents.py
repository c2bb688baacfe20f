"""Stored values as JSON text: floats, big numbers and nesting stay exact, on every store alike."""

from __future__ import annotations

from typing import TypeVar

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.record_base import Record

MAX_DOCUMENT_BYTES = 350_000
"""DynamoDB allows 400 KB an item; keys and index attributes need some of it."""

R = TypeVar("R", bound=Record)


def dump(record: Record) -> str:
    """Return the record as JSON, without the fields that are stored beside it.

    Fields that have their default value are left out, which makes most items fit into one write unit. So a default that
    changes would change what is stored: tests/unit/storage/test_storage_documents.py lists them.

    Raises Refusal(PAYLOAD_TOO_LARGE) if no item could hold it.
    """
    text = record.model_dump_json(exclude=set(record.BESIDE) or None, exclude_defaults=True)
    size_bytes = len(text.encode())
    if size_bytes > MAX_DOCUMENT_BYTES:
        kind = type(record).__name__.lower()
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The {kind} would take {size_bytes} bytes to store; at most {MAX_DOCUMENT_BYTES} are allowed.",
        )
    return text


def load(kind: type[R], text: str) -> R:
    """Return the record in a document."""
    return kind.model_validate_json(text)
