"""What is known of a series without keeping a window of its points: averages, streaks, the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from baton.contract.rules.metrics import Goal
from baton.contract.rules.numbers import decoded, encoded
from baton.contract.rules.windows.series import Clock, Series


class Trail:
    """How many points it has seen, and since when."""

    __slots__ = ("began", "clock", "series", "unseen")
    saved: ClassVar[tuple[str, ...]] = ()
    """Attributes besides these two: numbers or None."""

    def __init__(self, series: Series, clock: Clock) -> None:
        self.series = series
        self.clock = clock
        self.began: float | None = None
        self._clear()

    @property
    def wants_points(self) -> bool:
        """Whether it is to be told of each point."""
        return True

    @property
    def seen(self) -> int:
        """How many points it has seen."""
        return self.series.total - self.unseen

    def push(self, value: float, now: float) -> None:
        """Take the newest point."""
        if self.began is None:
            self.began = now

    def covers(self, seconds: float) -> bool:
        """Whether it has gone on for so long."""
        return self.began is not None and self.clock.now - self.began >= seconds

    def first_needed(self) -> int:
        """None of the points."""
        return self.series.total

    def _clear(self) -> None:
        """As without points."""
        self.unseen = self.series.total
        """How many points had come before it was there."""
        self.began = None

    def state(self) -> Any:
        """As plain values."""
        own = {name: encoded(getattr(self, name)) for name in self.saved}
        return {"seen": self.seen, "began": encoded(self.began), **own}

    def restore(self, state: Any) -> None:
        """Take that back, or begin anew."""
        self._clear()
        if state is None:
            return
        seen, began = state["seen"], decoded(state["began"])
        if type(seen) is not int or not 0 <= seen <= self.series.total or (began is not None and not seen):
            raise ValueError("a count is damaged")
        self.unseen, self.began = self.series.total - seen, began
        for name in self.saved:
            value = decoded(state[name])
            if value is None and getattr(self, name) is not None:
                raise ValueError("a number is missing")
            setattr(self, name, value)


class Lagged(Trail):
    """An earlier point, and how far the newest one is from it."""

    __slots__ = ("points",)

    def __init__(self, series: Series, clock: Clock, points: int) -> None:
        """`points`: how much earlier."""
        super().__init__(series, clock)
        self.points = points
        series.keeps = True

    @property
    def wants_points(self) -> bool:
        """It looks at the series."""
        return False

    def first_needed(self) -> int:
        """The earlier one, and all after it."""
        return self.series.total - min(self.points + 1, self.seen)

    def earlier(self) -> float | None:
        """None until there is one."""
        series = self.series
        return series.values[-1 - self.points] if series.total - self.unseen > self.points else None

    def change(self) -> float | None:
        """From the earlier one to the newest; None until there is one."""
        series = self.series
        if series.total - self.unseen <= self.points:
            return None
        return series.values[-1] - series.values[-1 - self.points]

    def restore(self, state: Any) -> None:
        """Take that back, or begin anew."""
        super().restore(state)
        if min(self.seen, self.points + 1) > len(self.series.values):
            raise ValueError("points are missing")


class Sample(Trail):
    """The value that another metric had when the newest point came."""

    __slots__ = ("due", "sampled", "value")
    saved = ("value",)

    def __init__(self, series: Series, clock: Clock, sampled: Series) -> None:
        """`sampled`: the other metric."""
        super().__init__(series, clock)
        self.sampled = sampled

    def _clear(self) -> None:
        super()._clear()
        self.due = False
        self.value: float | None = None

    def push(self, value: float, now: float) -> None:
        """Take the newest point; the other metric may come later in the same observation."""
        super().push(value, now)
        self.due = True

    def take(self) -> None:
        """The observation is complete."""
        if self.due:
            self.due = False
            self.value = self.sampled.current


class Average(Trail):
    """Exponential moving average of the finite points; a point that is not finite is told as it is and forgotten."""

    __slots__ = ("average", "constant_s", "rest", "taken_at", "weight")
    saved = ("average", "taken_at")

    def __init__(self, series: Series, clock: Clock, points: int, seconds: float) -> None:
        """A new point weighs 2 / (points + 1), or by the time since the last one with the time constant `seconds`."""
        super().__init__(series, clock)
        self.weight = 2 / (points + 1)
        self.rest = 1 - self.weight
        self.constant_s = seconds

    def _clear(self) -> None:
        super()._clear()
        self.average: float | None = None
        self.taken_at: float | None = None

    def push(self, value: float, now: float) -> None:
        """Take the newest point."""
        if value - value != 0.0:
            if self.began is None:
                self.began = now
            return
        average = self.average
        if average is None or self.taken_at is None:
            if self.began is None:
                self.began = now
            self.average = value
        elif self.constant_s:
            weight = -math.expm1(-max(0.0, now - self.taken_at) / self.constant_s)
            self.average = average * (1 - weight) + value * weight
        else:
            self.average = average * self.rest + value * self.weight
        self.taken_at = now

    def value(self) -> float | None:
        """None before the first finite point."""
        newest = self.series.newest
        return newest if newest is not None and newest - newest != 0.0 else self.average


class Streak(Trail):
    """How many points in a row went on from the one before, and when the one before them came.

    `since` is when the streak was broken last: of points that are the same, when the value last changed.
    """

    __slots__ = ("goes_on", "length", "since")
    saved = ("length", "since")

    def __init__(self, series: Series, clock: Clock, goes_on: Callable[[float, float], bool]) -> None:
        """`goes_on`: whether a point, given first, goes on from the one before."""
        super().__init__(series, clock)
        self.goes_on = goes_on

    def _clear(self) -> None:
        super()._clear()
        self.length = 0.0
        self.since: float | None = None

    def push(self, value: float, now: float) -> None:
        """Take the newest point."""
        if self.began is None:
            # its first point: what came before is none of its own
            self.began = self.since = now
        elif self.goes_on(value, self.series.previous):  # type: ignore[arg-type]
            self.length += 1
        else:
            self.length = 0.0
            self.since = now

    def over_points(self, points: int) -> bool | None:
        """Whether it has gone on for so many; None before it can have."""
        return self.length >= points if self.series.total - self.unseen > points else None

    def over_seconds(self, seconds: float) -> bool | None:
        """The same for a duration, up to the newest point."""
        if not self.covers(seconds) or self.since is None or self.series.at is None:
            return None
        return self.length > 0 and self.series.at - self.since >= seconds

    def broken_over_points(self, points: int) -> bool | None:
        """Whether one of so many points did not go on."""
        return self.length < points if self.series.total - self.unseen > points else None

    def broken_over_seconds(self, seconds: float) -> bool | None:
        """Whether it was broken within so many seconds from now."""
        if not self.covers(seconds) or self.since is None:
            return None
        return self.seen > self.length + 1 and self.clock.now - self.since < seconds


def same(value: float, before: float) -> bool:
    """Whether two points are equal; NaN is as NaN."""
    return value == before or (value != value and before != before)  # noqa: PLR0124 - quicker than isnan


class Best(Trail):
    """The best finite point so far, and how many points came since."""

    __slots__ = ("best", "min_delta", "points", "sign")
    saved = ("best", "points")

    def __init__(self, series: Series, clock: Clock, goal: Goal, min_delta: float) -> None:
        """`min_delta`: by more than that a point has to be better."""
        super().__init__(series, clock)
        self.sign = 1.0 if goal == "min" else -1.0
        self.min_delta = min_delta

    def _clear(self) -> None:
        super()._clear()
        self.best: float | None = None
        self.points = 0.0

    def push(self, value: float, now: float) -> None:
        """Take the newest point."""
        best = self.best
        if best is None:
            if self.began is None:
                self.began = now
            if value - value == 0.0:
                self.best = value
        elif (best - value) * self.sign > self.min_delta and value - value == 0.0:
            self.best, self.points = value, 0.0
        else:
            self.points += 1

    def value(self) -> float | None:
        """None before the first finite point."""
        return self.best

    def since(self) -> float | None:
        """Points since then, those that are not finite too."""
        return None if self.best is None else self.points
