"""JSON form of the numbers in saved states: NaN and infinity become words, since JSON lacks both."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from typing import Any

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: float | None) -> float | str | None:
    """Encode a number so that JSON preserves its value."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def decode(value: Any) -> float | None:
    """Decode a number. Raises ValueError if `encode` cannot have produced the value."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _WORDS:
            raise ValueError("a number is damaged")
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("a number is damaged")
    return float(value)


PACKED_FROM = 64
"""Length from which `pack` writes one base64 text, because a JSON list of 100,000 numbers delays a checkpoint by a
second.
"""


def pack(values: array[float]) -> str | list[float | str | None]:
    """Pack numbers for JSON: a short list stays a list, a long one becomes base64 of little-endian doubles."""
    if len(values) < PACKED_FROM:
        return [encode(value) for value in values]
    return base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode()


def unpack(values: Any) -> array[float]:
    """Unpack numbers. Raises ValueError or TypeError if `pack` cannot have produced the value."""
    if not isinstance(values, str):
        return array("d", decode_all(values))
    data = base64.b64decode(values, validate=True)
    if len(data) % 8:
        raise ValueError("the bits of a number are missing")
    return array("d", struct.unpack(f"<{len(data) // 8}d", data))


def decode_all(values: Any) -> list[float]:
    """Decode a list of numbers. Raises ValueError if a number is missing."""
    found = [decode(value) for value in values]
    if any(value is None for value in found):
        raise ValueError("a number is missing")
    return [value for value in found if value is not None]
