"""Encode stored values as JSON text, in which floats, large numbers and nesting stay exact on every store."""

from __future__ import annotations

from typing import TypeVar

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.record_base import Record

MAX_DOCUMENT_BYTES = 350_000
"""Size limit of a document: DynamoDB allows 400 KB per item, including keys and index attributes."""

R = TypeVar("R", bound=Record)


def dump(record: Record) -> str:
    """Encode the record as JSON, without the fields that are stored beside the document.

    The document omits fields with default values, so that most items fit into one write unit. Therefore a changed
    default changes the meaning of stored documents: tests/unit/storage/test_storage_documents.py lists the defaults.

    Raises Refusal(PAYLOAD_TOO_LARGE) if the document exceeds MAX_DOCUMENT_BYTES.
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
    """Decode the record in a document."""
    return kind.model_validate_json(text)
