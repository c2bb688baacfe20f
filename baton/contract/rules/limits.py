"""Bounds on the time and memory that a rule document can take."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Bounds of one document. The defaults apply to training processes; a smaller machine may pass smaller bounds."""

    text_chars: int = 2_000
    """Characters of one expression."""
    nodes: int = 200
    """Numbers, names, operators and calls of one expression."""
    depth: int = 20
    """Levels of one syntax tree, and of nested parentheses."""
    rules: int = 200
    window_points: int = 100_000
    median_points: int = 10_000
    """Points of a median. A median keeps its window sorted, therefore an update moves up to 80 kB of pointers."""
    total_points: int = 1_000_000
    """Points of all windows of a document; a window over a duration counts with its capacity."""
    duration_points: int = 20_000
    """Capacity of a window over a duration; the window drops its oldest points first."""
    group_values: int = 16
    """Pairs of metric and step for which the jobs of a group keep a value."""


LIMITS = Limits()

MAX_STEP = 10**12
MAX_NUMBER_CHARS = 40
MAX_NAME_CHARS = 64
