"""Compute with sets of whole numbers, written as spans.

Spans are half-open ranges `[start, end]` in ascending order; none is empty, and no two are adjacent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Spans = Sequence[Sequence[int]]


def merge_spans(*sets: Spans) -> list[list[int]]:
    """Return the union of sets of spans. Each argument may also have unordered or overlapping ranges."""
    merged: list[list[int]] = []
    for start, end in sorted((span[0], span[1]) for one in sets for span in one):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def subtract_spans(spans: Spans, other: Spans) -> list[list[int]]:
    """Return the numbers of `spans` that `other` lacks."""
    left: list[list[int]] = []
    place = 0
    for first, end in spans:
        start = first
        while place < len(other) and other[place][1] <= start:
            place += 1
        following = place
        while start < end and following < len(other) and other[following][0] < end:
            if start < other[following][0]:
                left.append([start, other[following][0]])
            start = other[following][1]
            following += 1
        if start < end:
            left.append([start, end])
    return left


def count_spans(spans: Spans) -> int:
    """Count the numbers of the spans."""
    return sum(end - start for start, end in spans)


def has_number(spans: Spans, number: int) -> bool:
    """Return True if the spans have `number`."""
    return any(start <= number < end for start, end in spans)


def list_numbers(spans: Spans) -> Iterator[int]:
    """Yield the numbers of the spans, ascending."""
    for start, end in spans:
        yield from range(start, end)


def make_spans(numbers: Iterable[int]) -> list[list[int]]:
    """Return the spans of single numbers."""
    return merge_spans([[one, one + 1] for one in numbers])


def take_free(taken: Spans, below: int | None, count: int) -> list[list[int]]:
    """Return the `count` lowest numbers from 0 that `taken` lacks, fewer if `below` numbers are not enough."""
    end = count_spans(taken) + count if below is None else below
    free: list[list[int]] = []
    for start, stop in subtract_spans([[0, end]] if end else [], taken):
        if not count:
            break
        free.append([start, min(stop, start + count)])
        count -= free[-1][1] - start
    return free
