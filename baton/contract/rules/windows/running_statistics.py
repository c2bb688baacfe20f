"""Running statistics: averages, streaks and best values, computed without a window of points."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from baton.contract.rules.metrics import Goal
from baton.contract.rules.numbers import decode, encode
from baton.contract.rules.windows.series import ObservationClock, Series


class RunningStatistic:
    """Number of points that a statistic has received, and the time of the first."""

    __slots__ = ("began", "clock", "series", "unseen")
    saved: ClassVar[tuple[str, ...]] = ()
    """Names of further attributes to save: numbers or None."""

    def __init__(self, series: Series, clock: ObservationClock) -> None:
        self.series = series
        self.clock = clock
        self.began: float | None = None
        self._clear()

    @property
    def wants_points(self) -> bool:
        """Return True if `push` must be called for each point."""
        return True

    @property
    def seen(self) -> int:
        """Number of points received."""
        return self.series.total - self.unseen

    def push(self, value: float, now: float) -> None:
        """Take the newest point."""
        if self.began is None:
            self.began = now

    def covers(self, seconds: float) -> bool:
        """Check whether the first point is at least `seconds` old."""
        return self.began is not None and self.clock.now - self.began >= seconds

    def first_needed(self) -> int:
        """Return the first point number that is needed: none of the present ones."""
        return self.series.total

    def _clear(self) -> None:
        """Reset to the state without points."""
        self.unseen = self.series.total
        """Points of the series before this statistic started."""
        self.began = None

    def state(self) -> Any:
        """Return the state as plain values."""
        own = {name: encode(getattr(self, name)) for name in self.saved}
        return {"seen": self.seen, "began": encode(self.began), **own}

    def restore(self, state: Any) -> None:
        """Restore a state, or restart if it is None."""
        self._clear()
        if state is None:
            return
        seen, began = state["seen"], decode(state["began"])
        if type(seen) is not int or not 0 <= seen <= self.series.total or (began is not None and not seen):
            raise ValueError("a count is damaged")
        self.unseen, self.began = self.series.total - seen, began
        for name in self.saved:
            value = decode(state[name])
            if value is None and getattr(self, name) is not None:
                raise ValueError("a number is missing")
            setattr(self, name, value)


class Lagged(RunningStatistic):
    """An earlier point, and the change from it to the newest."""

    __slots__ = ("points",)

    def __init__(self, series: Series, clock: ObservationClock, points: int) -> None:
        """Follow the point that came `points` before the newest."""
        super().__init__(series, clock)
        self.points = points
        series.keeps = True

    @property
    def wants_points(self) -> bool:
        """False: the statistic reads the series on demand."""
        return False

    def first_needed(self) -> int:
        """Return the number of the earlier point."""
        return self.series.total - min(self.points + 1, self.seen)

    def earlier(self) -> float | None:
        """Return the earlier point; None until it exists."""
        series = self.series
        return series.values[-1 - self.points] if series.total - self.unseen > self.points else None

    def change(self) -> float | None:
        """Return the newest point minus the earlier one; None until it exists."""
        series = self.series
        if series.total - self.unseen <= self.points:
            return None
        return series.values[-1] - series.values[-1 - self.points]

    def restore(self, state: Any) -> None:
        """Restore a state, or restart if it is None."""
        super().restore(state)
        if min(self.seen, self.points + 1) > len(self.series.values):
            raise ValueError("points are missing")


class SampledMetric(RunningStatistic):
    """Value of another metric at the newest point of this one."""

    __slots__ = ("due", "sampled", "value")
    saved = ("value",)

    def __init__(self, series: Series, clock: ObservationClock, sampled: Series) -> None:
        """Sample the metric `sampled`."""
        super().__init__(series, clock)
        self.sampled = sampled

    def _clear(self) -> None:
        super()._clear()
        self.due = False
        self.value: float | None = None

    def push(self, value: float, now: float) -> None:
        """Mark a sample as due; the other metric may come later in the same observation."""
        super().push(value, now)
        self.due = True

    def take(self) -> None:
        """Take a due sample once the observation is complete."""
        if self.due:
            self.due = False
            self.value = self.sampled.current


class Average(RunningStatistic):
    """Exponential moving average of the finite points. A point that is not finite is returned once and not averaged."""

    __slots__ = ("average", "constant_s", "rest", "taken_at", "weight")
    saved = ("average", "taken_at")

    def __init__(self, series: Series, clock: ObservationClock, points: int, seconds: float) -> None:
        """Weigh a new point by 2 / (points + 1), or by elapsed time with the time constant `seconds`."""
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
        """Return the average; None before the first finite point."""
        newest = self.series.newest
        return newest if newest is not None and newest - newest != 0.0 else self.average


class Streak(RunningStatistic):
    """Length of the run of points that continue from their predecessors, and the time of its start.

    `since` is the time when the run last broke; for a run of equal points, the time of the last change.
    """

    __slots__ = ("continues", "length", "since")
    saved = ("length", "since")

    def __init__(self, series: Series, clock: ObservationClock, continues: Callable[[float, float], bool]) -> None:
        """`continues(newest, previous)` decides whether a point continues the run."""
        super().__init__(series, clock)
        self.continues = continues

    def _clear(self) -> None:
        super()._clear()
        self.length = 0.0
        self.since: float | None = None

    def push(self, value: float, now: float) -> None:
        """Take the newest point."""
        if self.began is None:
            # The predecessor of the first point is outside this statistic, therefore do not compare them.
            self.began = self.since = now
        elif self.continues(value, self.series.previous):  # type: ignore[arg-type]
            self.length += 1
        else:
            self.length = 0.0
            self.since = now

    def over_points(self, points: int) -> bool | None:
        """Check whether the run has `points` points; None before enough points have come."""
        return self.length >= points if self.series.total - self.unseen > points else None

    def over_seconds(self, seconds: float) -> bool | None:
        """Check whether the run spans `seconds` up to the newest point; None before enough time has passed."""
        if not self.covers(seconds) or self.since is None or self.series.at is None:
            return None
        return self.length > 0 and self.series.at - self.since >= seconds

    def broken_over_points(self, points: int) -> bool | None:
        """Check whether the run broke within the last `points` points."""
        return self.length < points if self.series.total - self.unseen > points else None

    def broken_over_seconds(self, seconds: float) -> bool | None:
        """Check whether the run broke within the last `seconds` seconds."""
        if not self.covers(seconds) or self.since is None:
            return None
        return self.seen > self.length + 1 and self.clock.now - self.since < seconds


def are_equal(value: float, before: float) -> bool:
    """Check whether two points are equal; NaN equals NaN."""
    return value == before or (value != value and before != before)  # noqa: PLR0124 - quicker than isnan


class BestPoint(RunningStatistic):
    """Best finite point, and the number of points since."""

    __slots__ = ("best", "min_delta", "points", "sign")
    saved = ("best", "points")

    def __init__(self, series: Series, clock: ObservationClock, goal: Goal, min_delta: float) -> None:
        """A point must be better by more than `min_delta`."""
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
        """Return the best point; None before the first finite one."""
        return self.best

    def since(self) -> float | None:
        """Return the number of points since the best, finite or not."""
        return None if self.best is None else self.points
