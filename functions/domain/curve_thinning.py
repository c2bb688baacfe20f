"""Thin the curves of metrics: merge neighboring readings into buckets that keep lowest, highest and mean. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class CurveBucket(NamedTuple):
    """Neighboring readings of one metric in one attempt, up to and including `step`."""

    step: int
    readings: int
    """Finite readings; `low`, `high` and `total` are 0 without one."""
    low: float
    high: float
    total: float
    not_finite: int

    def exact(self) -> bool:
        """Return True if the bucket has one reading only."""
        return self.readings + self.not_finite == 1


CurveKey = tuple[int, str]
"""Attempt and name of the metric."""
Curves = Mapping[CurveKey, Sequence[CurveBucket]]


def read_points(epoch: int, points: Iterable[Mapping[str, Any]]) -> dict[CurveKey, list[CurveBucket]]:
    """Return the reported points of one attempt as curves of exact buckets, in reported order."""
    found: dict[CurveKey, list[CurveBucket]] = {}
    for point in points:
        step = point["step"]
        for name, reading in point["metrics"].items():
            value = float(reading)
            bucket = (
                CurveBucket(step, 1, value, value, value, 0)
                if math.isfinite(value)
                else CurveBucket(step, 0, 0, 0, 0, 1)
            )
            found.setdefault((epoch, name), []).append(bucket)
    return found


def join_curves(parts: Iterable[Curves]) -> dict[CurveKey, list[CurveBucket]]:
    """Join consecutive parts of curves."""
    found: dict[CurveKey, list[CurveBucket]] = {}
    for part in parts:
        for key, buckets in part.items():
            found.setdefault(key, []).extend(buckets)
    return found


def thin_evenly(buckets: Sequence[CurveBucket], limit: int) -> list[CurveBucket]:
    """Merge equally many neighbors, so that `limit` buckets remain; each step backwards begins another bucket."""
    every = -(-len(buckets) // limit)
    return _merge(buckets, (index // every for index in range(len(buckets)))) if every > 1 else list(buckets)


def thin_to_width(buckets: Sequence[CurveBucket], first_step: int, last_step: int, width: int) -> list[CurveBucket]:
    """Merge the neighbors that lie in one of `width` equal parts of the range of steps."""
    span = last_step - first_step + 1
    return _merge(buckets, ((bucket.step - first_step) * width // span for bucket in buckets))


def _merge(buckets: Iterable[CurveBucket], places: Iterable[int]) -> list[CurveBucket]:
    merged: list[CurveBucket] = []
    before: int | None = None
    for bucket, place in zip(buckets, places, strict=True):
        if place == before and bucket.step >= merged[-1].step:
            merged[-1] = _merge_two(merged[-1], bucket)
        else:
            merged.append(bucket)
        before = place
    return merged


def _merge_two(first: CurveBucket, second: CurveBucket) -> CurveBucket:
    low, high = first.low, first.high
    if not first.readings:
        low, high = second.low, second.high
    elif second.readings:
        low, high = min(low, second.low), max(high, second.high)
    return CurveBucket(
        second.step,
        first.readings + second.readings,
        low,
        high,
        first.total + second.total,
        first.not_finite + second.not_finite,
    )


def cut(buckets: Sequence[CurveBucket], first_step: int, last_step: int) -> list[CurveBucket]:
    """Return the buckets that reach into a range of steps, and those outside to which lines through the range lead."""
    inside = [begin < last_step and bucket.step >= first_step for begin, bucket in _with_begins(buckets)]
    for place, (one, other) in enumerate(pairwise(buckets)):
        if one.step <= min(other.step, last_step) and other.step >= first_step:
            inside[place] = inside[place + 1] = True
    return [bucket for bucket, kept in zip(buckets, inside, strict=True) if kept]


def is_coarse(buckets: Sequence[CurveBucket], first_step: int, last_step: int, needed: float) -> bool:
    """Return True if merged buckets reach into a range of steps, and fewer than `needed` buckets lie there."""
    inside = [bucket for begin, bucket in _with_begins(buckets) if begin < last_step and bucket.step >= first_step]
    return len(inside) < needed and not all(bucket.exact() for bucket in inside)


def _with_begins(buckets: Sequence[CurveBucket]) -> Iterator[tuple[int, CurveBucket]]:
    """Yield each bucket with the step before its first reading, as far as known."""
    before = -1
    for bucket in buckets:
        yield (bucket.step - 1 if bucket.exact() else before if before < bucket.step else -1), bucket
        before = bucket.step
