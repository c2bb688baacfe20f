"""What changes from one look at a ring to the next: rates, for who watches. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gpu_client.ring.status import Status

KEPT_LOOKS = 120
REUSE_LOOKS = 30
"""Reuse now is counted over so many looks: single ones say little, since samples come one at a time."""


class _Told(NamedTuple):
    at: float
    samples: int
    size_bytes: int
    waited_s: float


@dataclass(frozen=True)
class Pace:
    """How fast one writer or reader is, of late."""

    per_s: float
    """Samples."""
    bytes_per_s: float
    waited_share: float
    """Of its time."""


class Trend:
    """Is given one look after the other."""

    def __init__(self) -> None:
        self._looks: deque[Status] = deque(maxlen=KEPT_LOOKS)
        self._writers: dict[str, list[_Told]] = {}
        self._readers: dict[str, list[_Told]] = {}

    def look(self, found: Status) -> None:
        """The ring as it is now."""
        self._looks.append(found)
        told = {row.name: _Told(found.at, row.put, row.put_bytes, row.waited_s) for row in found.at_work}
        self._writers = _followed(self._writers, told)
        told = {row.name: _Told(found.at, row.read, 0, row.waited_s) for row in found.readers}
        self._readers = _followed(self._readers, told)

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Samples that became readable, and were read, per second between each two looks."""
        return [found for before, after in pairwise(self._looks) if (found := after.rates(before)) is not None]

    @property
    def reuse(self) -> float | None:
        """Reads of a sample of late; None while nothing comes."""
        looks = list(self._looks)[-REUSE_LOOKS:]
        if len(looks) < 2 or looks[-1].inserted == looks[0].inserted:
            return None
        return max(looks[-1].read - looks[0].read, 0) / (looks[-1].inserted - looks[0].inserted)

    def writer(self, name: str) -> Pace | None:
        """None before it has told twice."""
        return self._pace(self._writers.get(name, ()))

    def reader(self, name: str) -> Pace | None:
        """None before it has told twice."""
        return self._pace(self._readers.get(name, ()))

    @property
    def bytes_per_s(self) -> float:
        """Of all writers."""
        return sum(pace.bytes_per_s for pace in self._paces(self._writers))

    @property
    def writers_waited_share(self) -> float | None:
        """In the mean of those that have told twice."""
        return _mean(pace.waited_share for pace in self._paces(self._writers))

    @property
    def readers_waited_share(self) -> float | None:
        """In the mean of those that have told twice."""
        return _mean(pace.waited_share for pace in self._paces(self._readers))

    def _paces(self, told: dict[str, list[_Told]]) -> list[Pace]:
        return [pace for one in told.values() if (pace := self._pace(one)) is not None]

    def _pace(self, told: Sequence[_Told]) -> Pace | None:
        if len(told) < 2:
            return None
        before, after = told
        # Each tells at intervals of its own. One that is overdue has become slower.
        seconds = max(after.at - before.at, self._looks[-1].at - after.at)
        if seconds <= 0:
            return None
        waited_share = min(max(after.waited_s - before.waited_s, 0.0) / seconds, 1.0)
        return Pace(
            max(after.samples - before.samples, 0) / seconds,
            max(after.size_bytes - before.size_bytes, 0) / seconds,
            waited_share,
        )


def _followed(before: dict[str, list[_Told]], now: dict[str, _Told]) -> dict[str, list[_Told]]:
    """Of each that is there, the last two things that it told; one look that shows nothing new is none."""
    found = {}
    for name, one in now.items():
        told = before.get(name, [])
        if told and one[1:] == told[-1][1:]:
            found[name] = told
        elif told and one.samples < told[-1].samples:
            found[name] = [one]  # it has begun anew
        else:
            found[name] = [*told[-1:], one]
    return found


def _mean(values: Iterable[float]) -> float | None:
    there = list(values)
    return sum(there) / len(there) if there else None
