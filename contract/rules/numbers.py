"""Numbers in saved states: JSON has neither NaN nor infinity, so these are words."""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def encoded_all(values: Iterable[float]) -> list[float | str | None]:
    """Each of them."""
    return [encoded(value) for value in values]


def decoded_all(values: Any) -> list[float]:
    """Each of them; none may be missing."""
    found = [decoded(value) for value in values]
    if any(value is None for value in found):
        raise ValueError("a number is missing")
    return [value for value in found if value is not None]
