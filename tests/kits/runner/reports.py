"""Reports of tests on their way from a worker of pytest-xdist to where they are shown."""

from __future__ import annotations

from typing import Any


def without_surrogates(value: Any) -> Any:
    """The same lists, tuples, dictionaries and texts, but with escapes for what cannot be sent as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_surrogates(item) for item in value)
    return value
