"""Join the metric points of all attempts into one history with each step once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.contract.rules.metrics import canonical_name
from baton.contract.worker.output import MetricPoint


@dataclass(frozen=True)
class MetricHistory:
    """Metric points of one job."""

    kept: list[MetricPoint]
    """Valid points, with strictly increasing steps."""
    void: list[MetricPoint]
    """Points after the checkpoint from which the next attempt resumed."""

    def names(self) -> list[str]:
        """Return all metric names: the loss first, then evaluations, then the others."""
        found = {name for point in (*self.kept, *self.void) for name in point.metrics}
        return sorted(found, key=lambda name: (_rank(name), name))


def _rank(name: str) -> int:
    known = canonical_name(name)
    return 0 if known == "loss" else 1 if known == "eval.loss" else 2 if known.startswith("eval") else 3


def join_attempts(
    points: Iterable[MetricPoint], resumed_steps: Mapping[int, int | None] | None = None
) -> MetricHistory:
    """Join points into one history. Pure; `points`: in reported order, attempt by attempt.

    resumed_steps: resumed step of each attempt by epoch, None for an attempt from the beginning. An attempt without an
        entry is assumed to have resumed before its first reported step.

    Points of earlier attempts after the resumed step are void, and so are points of an attempt after the target step of
    its rollback. The function merges points of one step, and inserts a late point, whose metrics no later point has, at
    its step.
    """
    history = MetricHistory([], [])
    epoch: int | None = None
    for point in points:
        if point.epoch != epoch:
            epoch = point.epoch
            _begin_attempt(history, point, resumed_steps)
        _add_point(history, point)
    return history


def _begin_attempt(history: MetricHistory, first: MetricPoint, resumed_steps: Mapping[int, int | None] | None) -> None:
    """Void the points that a new attempt repeats."""
    if resumed_steps is not None and first.epoch in resumed_steps:
        _void_after(history, resumed_steps[first.epoch] or 0)
    else:
        # A point without metrics marks the start of the attempt, a point with metrics the result of a step.
        _void_after(history, first.step - 1 if first.metrics else first.step)


def _void_after(history: MetricHistory, step: int) -> None:
    kept = history.kept
    place = len(kept)
    while place and kept[place - 1].step > step:
        place -= 1
    history.void.extend(kept[place:])
    del kept[place:]


def _add_point(history: MetricHistory, point: MetricPoint) -> None:
    kept = history.kept
    place = len(kept)
    while place and kept[place - 1].step > point.step:
        place -= 1
    again = any(one.epoch != point.epoch or one.metrics.keys() & point.metrics.keys() for one in kept[place:])
    there = kept[place - 1] if place and kept[place - 1].step == point.step else None
    if again or (place < len(kept) and not point.metrics):
        _void_after(history, point.step if there is None else point.step - 1)
        kept.append(point)
        return
    if there is None:
        kept.insert(place, point)
        return
    # The newest value of a metric wins; the point keeps the epoch of the first attempt.
    merged = {**there.metrics, **point.metrics}
    kept[place - 1] = there.model_copy(update={"metrics": merged})
