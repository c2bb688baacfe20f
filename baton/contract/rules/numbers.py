"""Numbers in saved states: JSON has neither NaN nor infinity, so these are words."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from typing import Any

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encoded(value: float | None) -> float | str | None:
    """As JSON can say it, and read it as the same number."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def decoded(value: Any) -> float | None:
    """From that. Raises ValueError for what `encoded` never gives."""
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
"""So many numbers and more are one text: a list of 100,000 holds a checkpoint up for a second."""


def packed(values: array[float]) -> str | list[float | str | None]:
    """As JSON can say them: few as a list, many as the base64 of their bits, lowest byte first."""
    if len(values) < PACKED_FROM:
        return [encoded(value) for value in values]
    return base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode()


def unpacked(values: Any) -> array[float]:
    """From that. Raises ValueError or TypeError for what `packed` never gives."""
    if not isinstance(values, str):
        return array("d", decoded_all(values))
    data = base64.b64decode(values, validate=True)
    if len(data) % 8:
        raise ValueError("the bits of a number are missing")
    return array("d", struct.unpack(f"<{len(data) // 8}d", data))


def decoded_all(values: Any) -> list[float]:
    """Each of them; none may be missing."""
    found = [decoded(value) for value in values]
    if any(value is None for value in found):
        raise ValueError("a number is missing")
    return [value for value in found if value is not None]
