"""Reports of tests on the way from a worker of pytest-xdist to the terminal."""

from __future__ import annotations

from typing import Any


def without_surrogates(value: Any) -> Any:
    """Copy lists, tuples, dictionaries and texts, with escapes for text that UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_surrogates(item) for item in value)
    return value
