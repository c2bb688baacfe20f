"""Faults of rule documents: stable codes, and suggestions of the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from itertools import islice


class Code(StrEnum):
    """Codes of faults and warnings. Programs may branch on codes; the texts may change."""

    # Documents
    UNREADABLE = "unreadable"
    WRONG_SHAPE = "wrong_shape"
    UNKNOWN_KEY = "unknown_key"
    MISSING_KEY = "missing_key"
    INVALID_VALUE = "invalid_value"
    DUPLICATE_NAME = "duplicate_name"
    CONFLICT = "conflict"
    UNKNOWN_EVENT = "unknown_event"
    UNKNOWN_ACTION = "unknown_action"
    INVALID_TEXT = "invalid_text"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    """The construct has no safe or exact counterpart in this language."""
    # Expressions
    SYNTAX = "syntax"
    UNKNOWN_METRIC = "unknown_metric"
    UNKNOWN_FUNCTION = "unknown_function"
    UNKNOWN_UNIT = "unknown_unit"
    WRONG_TYPE = "wrong_type"
    WRONG_ARITY = "wrong_arity"
    INVALID_WINDOW = "invalid_window"
    # Warnings: the document is accepted
    NEVER_FIRES = "never_fires"
    ALWAYS_TRUE = "always_true"
    NEVER_CLEARS = "never_clears"
    ALWAYS_CLEARS = "always_clears"
    DOUBTFUL_NAME = "doubtful_name"
    HEARTBEAT_PACE = "heartbeat_pace"
    # Faults of actions, warnings of texts
    MISPLACED = "misplaced"
    """The action or metric is unavailable where the rule is evaluated."""
    # Notes of an import
    DIFFERS = "differs"
    DROPPED = "dropped"


class ExpressionError(Exception):
    """Fault of an expression. `offset` counts characters of its text from 0."""

    def __init__(self, code: Code, reason: str, remedy: str, offset: int) -> None:
        """Create the fault; `remedy` says how to correct the text."""
        super().__init__(f"{reason} (character {offset + 1})")
        self.code = code
        self.reason = reason
        self.remedy = remedy
        self.offset = offset


def find_nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Find the known name that `name` probably means."""
    candidates = list(known)
    close = get_close_matches(name[:80].lower(), candidates, n=1, cutoff=cutoff)
    if close:
        return close[0]
    # Match a prefix or a last part: `eval.f1` and `f1_macro` for `eval.f1_macro`.
    inside = [one for one in candidates if len(name) > 1 and (one.startswith(name) or one.endswith(f".{name}"))]
    return min(inside, key=len, default=None)


_MAX_OFF = 2
_LEAST_CHARS = {1: 4, 2: 6}
"""Least length of a known name for 1 or 2 edits: `kl` is not a typo of `lr`."""
_MAX_CHARS = 40
_MAX_COMPARED = 200
"""Candidates compared at most, since a document may declare thousands of metrics."""


def find_typo(name: str, known: Iterable[str]) -> str | None:
    """Find the known name within one edit of `name`, or within two if the name is long; a swap of neighbours is one
    edit.
    """
    if len(name) > _MAX_CHARS:
        return None
    alike = (one for one in known if abs(len(one) - len(name)) <= _MAX_OFF)
    found: list[tuple[int, str]] = []
    for one in islice(alike, _MAX_COMPARED):
        off = _letters_off(name.lower(), one)
        if not 0 < off <= _MAX_OFF or len(one) < _LEAST_CHARS[off]:
            continue
        # A name with one more part is another metric: `g.loss` is no typo of `loss`.
        if off == 1 or (len(name) >= _LEAST_CHARS[off] and one.count(".") == name.count(".")):
            found.append((off, one))
    return min(found)[1] if found else None


def _letters_off(left: str, right: str) -> int:
    """Count edits (delete, insert, replace, swap neighbours) between two names; stops above two."""
    many = _MAX_OFF + 1
    two_ago, before = [many] * (len(right) + 1), list(range(len(right) + 1))
    for row, letter in enumerate(left, 1):
        now = [row, *([many] * len(right))]
        for column in range(max(1, row - _MAX_OFF), min(len(right), row + _MAX_OFF) + 1):
            other = right[column - 1]
            off = min(before[column] + 1, now[column - 1] + 1, before[column - 1] + (letter != other))
            if row > 1 and column > 1 and letter == right[column - 2] and left[row - 2] == other:
                off = min(off, two_ago[column - 2] + 1)
            now[column] = off
        if min(now) > _MAX_OFF and min(before) > _MAX_OFF:
            return many
        two_ago, before = before, now
    return before[-1]


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Suggest a remedy: the nearest name, or all names if none is near and they are few."""
    candidates = sorted(known)
    found = find_nearest(name, candidates)
    if found is not None:
        return f"Did you mean {found}?"
    return f"There are {', '.join(candidates)}." if 0 < len(candidates) <= 40 else "Check its spelling."
