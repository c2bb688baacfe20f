"""A metric's history: its newest value, and as many points as the longest window needs.

All windows of a metric look at the same points, each from its own first one on. Points are counted through from the
beginning of the training; memory is bounded by the longest window.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any, Protocol

from baton.contract.rules.numbers import decoded, encoded, packed, unpacked
from baton.contract.rules.sums import Sums

_SLACK = 128


class Clock:
    """The time of the newest observation, in seconds: it never goes back, and stands still between observations."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = -math.inf


class Follower(Protocol):
    """What is kept up to date with a series."""

    @property
    def wants_points(self) -> bool:
        """Whether it is to be told of each point as it comes; else it looks at the series when it is asked."""

    def push(self, value: float, now: float) -> None:
        """Take the newest point, which the series holds already."""

    def first_needed(self) -> int:
        """Number of the oldest point that it will still look at."""

    def state(self) -> Any:
        """As plain values."""

    def restore(self, state: Any) -> None:
        """Take that back, or begin with the next point if it is None; the series has its points already.

        Raises ValueError, TypeError or KeyError if it is damaged.
        """


class Series:
    """The points of one metric."""

    __slots__ = (
        "at", "base", "current", "followers", "keeps", "keeps_times", "newest", "previous", "problem", "pushes",
        "sums", "times", "total", "trim_at", "values",
    )  # fmt: skip

    def __init__(self) -> None:
        self.current: float | None = None
        """The value; None while it is not known."""
        self.problem = ""
        """Why the newest value could not be taken."""
        self.newest: float | None = None
        """The newest point, whether or not the value is still known."""
        self.previous: float | None = None
        """The point before that."""
        self.at: float | None = None
        """When the newest point came."""
        self.total = 0
        self.base = 0
        """Number of the oldest point that is kept."""
        self.values = array("d")
        self.times = array("d")
        self.keeps = False
        self.keeps_times = False
        self.trim_at = _SLACK
        """As soon as there are more points than that, old ones go."""
        self.sums: Sums | None = None
        self.followers: dict[str, Follower] = {}
        self.pushes: list[Callable[[float, float], None]] = []

    def follow(self, name: str, follower: Follower) -> None:
        """Keep it up to date from now on."""
        self.followers[name] = follower
        if follower.wants_points:
            self.pushes.append(follower.push)

    def summed(self) -> Sums:
        """Its running sums, kept from now on."""
        if self.sums is None:
            self.sums = Sums()
            self.pushes.append(self.sums.push)
        return self.sums

    def push(self, value: float, now: float) -> None:
        """Take a point; amortised O(1) besides what the followers take."""
        self.previous = self.newest
        self.newest = self.current = value
        self.at = now
        self.total = total = self.total + 1
        if self.keeps:
            self.values.append(value)
            if self.keeps_times:
                self.times.append(now)
            for push in self.pushes:
                push(value, now)
            if total > self.trim_at:
                self._trim()
        else:
            for push in self.pushes:
                push(value, now)

    def _trim(self) -> None:
        drop = self._droppable()
        del self.values[:drop]
        del self.times[:drop]
        if self.sums is not None:
            self.sums.drop(drop)
        self.base += drop
        self._trim_later()

    def _trim_later(self) -> None:
        """So late that each point is moved a few times at most, and a quarter more is kept than is needed."""
        self.trim_at = self.total + len(self.values) // 4 + _SLACK

    def _droppable(self) -> int:
        needed = min((follower.first_needed() for follower in self.followers.values()), default=self.total)
        return max(0, needed - self.base)

    def state(self) -> dict[str, Any]:
        """As plain values."""
        skip = self._droppable()
        return {
            "current": encoded(self.current),
            "newest": encoded(self.newest),
            "previous": encoded(self.previous),
            "at": encoded(self.at),
            "total": self.total,
            "values": packed(self.values[skip:]),
            "times": packed(self.times[skip:]),
            "problem": self.problem,
        }

    def restore(self, state: Any) -> None:
        """Take that back. Raises ValueError, TypeError or KeyError if it is damaged."""
        values, times = unpacked(state["values"]), unpacked(state["times"])
        total = state["total"]
        if type(total) is not int or len(values) > total or len(times) not in (0, len(values)):
            raise ValueError("counts of points disagree")
        self.current, self.newest = decoded(state["current"]), decoded(state["newest"])
        self.previous, self.at = decoded(state["previous"]), decoded(state["at"])
        if total and (self.at is None or self.newest is None):
            raise ValueError("the newest point is missing")
        self.total, self.problem = total, str(state["problem"])
        self.values = array("d", values if self.keeps else ())
        # who looks at times begins anew if there were none: older points need some, whichever
        self.times = array("d", (times or [0.0] * len(values)) if self.keeps_times else ())
        self.base = total - len(self.values)
        if self.sums is not None:
            self.sums.rebuild(self.values, self.base)
        self._trim_later()
