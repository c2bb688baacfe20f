"""How large rules may be: what bounds the time and memory that any document can take."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """The defaults hold for training processes; a smaller machine may hand in smaller ones."""

    text_chars: int = 2_000
    """Of one expression."""
    nodes: int = 200
    """Numbers, names, operators and calls of one expression."""
    depth: int = 20
    """Of one expression's tree, and of its parentheses."""
    rules: int = 200
    window_points: int = 100_000
    median_points: int = 10_000
    """A median keeps its window sorted: an update moves up to 80 kB of pointers."""
    total_points: int = 1_000_000
    """Of all windows of one document together; a window over a duration counts with what it may hold."""
    duration_points: int = 20_000
    """What a window over a duration may hold; the oldest go first."""
    group_values: int = 16
    """Metrics and steps of which the jobs of a group keep a value."""


LIMITS = Limits()

MAX_STEP = 10**12
MAX_NUMBER_CHARS = 40
MAX_NAME_CHARS = 64
