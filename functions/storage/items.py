"""What items of the low-level DynamoDB client are made of."""

from __future__ import annotations

from typing import Any

Item = dict[str, Any]
"""Attributes by name, `{"pk": {"S": "JOB#..."}, "rev": {"N": "3"}}`; also a key, or a part of a request."""


def number(value: int) -> Item:
    """A number as DynamoDB writes it."""
    return {"N": str(value)}
