"""Convert Python values to and from attribute values of the low-level DynamoDB client."""

from __future__ import annotations

from typing import Any

Item = dict[str, Any]
"""Attribute values by name, `{"pk": {"S": "JOB#..."}, "rev": {"N": "3"}}`; also a key, or a part of a request."""


def number(value: int) -> Item:
    """Encode a number as an attribute value."""
    return {"N": str(value)}


def attribute(value: str | int | bool) -> Item:
    """Encode a value as an attribute value."""
    if isinstance(value, bool):
        return {"BOOL": value}
    return number(value) if isinstance(value, int) else {"S": value}


def value_of(found: Item) -> str | int | bool:
    """Decode an attribute value; the inverse of `attribute`."""
    ((kind, value),) = found.items()
    return int(value) if kind == "N" else value
