"""Load the metric history of a job, merge the histories of nodes, and summarize metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.contract.jobs.history import AttemptView
from baton.contract.rules.metrics import BUILT_IN, Goal, Metric, canonical_name, name_in_rules
from baton.contract.worker.metric_history import MetricHistory, join_attempts
from baton.contract.worker.output import MetricPoint
from gpu_client.cli.core.session import list_attempts
from gpu_client.transport.api.client import BatonClient


def load_history(
    client: BatonClient, job_id: str, attempts: Sequence[AttemptView] | None = None, *, node: int | None = None
) -> MetricHistory:
    """Load the metric history of a job. `attempts`: all attempts; None requests them.

    `node`: node of an elastic job; None for the whole training.
    """
    if attempts is None:
        attempts = list_attempts(client, job_id)
    by_seat: dict[int | None, list[MetricPoint]] = {}
    for point in client.metric_points(job_id, seat=node):
        by_seat.setdefault(point.seat, []).append(point)
    histories = [
        join_attempts(points, {one.epoch: one.resumed_step for one in attempts if one.seat == seat})
        for seat, points in sorted(by_seat.items(), key=lambda one: one[0] or 0)
    ]
    if not histories:
        return MetricHistory([], [])
    return histories[0] if node is not None or None in by_seat else merge_nodes(histories)


def merge_nodes(histories: Iterable[MetricHistory]) -> MetricHistory:
    """Merge the histories of all nodes of an elastic job into the history of the whole training. Pure.

    The loss is the loss of the world; any other metric is reduced as over ranks. Points of a round that a later
    membership has repeated, from the same checkpoint, are void.
    """
    void: list[MetricPoint] = []
    by_step: dict[int, list[MetricPoint]] = {}
    for one in histories:
        void += one.void
        for point in one.kept:
            by_step.setdefault(point.step, []).append(point)
    kept = []
    for _, points in sorted(by_step.items()):
        newest = max(points, key=lambda point: ("world.loss" in point.metrics, point.at))
        same = [point for point in points if _loss_of_world(point) in (None, _loss_of_world(newest))]
        void += [point for point in points if point not in same]
        metrics = {
            # A point has NaN and infinities as texts.
            name: value if math.isfinite(value) else str(value)
            for name, value in _reduce_nodes(same).items()
        }
        kept.append(newest.model_copy(update={"epoch": 1, "seat": None, "metrics": metrics}))
    return MetricHistory(kept, sorted(void, key=lambda point: (point.seat or 0, point.epoch, point.step)))


def _loss_of_world(point: MetricPoint) -> str | None:
    loss = point.metrics.get("world.loss")
    return None if loss is None else str(loss)


def _reduce_nodes(points: Sequence[MetricPoint]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for point in points:
        for name, value in point.numbers().items():
            found.setdefault(name, []).append(value)
    metrics = {name: _reduce(name_in_rules(name), values) for name, values in found.items()}
    if "world.loss" in metrics:
        metrics["loss"] = metrics["world.loss"]
    return metrics


def _reduce(name: str, values: Sequence[float]) -> float:
    how = BUILT_IN.get(name, Metric(name)).reduced_by
    if any(map(math.isnan, values)):
        return math.nan
    return sum(values) / len(values) if how == "mean" else min(values) if how == "min" else max(values)


def goal_of(name: str) -> Goal | None:
    """Return the direction of improvement of a metric; None if its name does not determine one."""
    known = canonical_name(name)
    if known in BUILT_IN:
        return BUILT_IN[known].goal
    last = known.rpartition(".")[2]
    if "loss" in last or "perplexity" in last:
        return "min"
    return "max" if last in ("accuracy", "acc", "f1", "precision", "recall") else None


class MetricOverview(NamedTuple):
    """Overview of a metric. `best`, `best_step`, `lowest`, `highest` cover finite values; None without such values."""

    name: str
    points: int
    not_finite: int
    first: float
    last: float
    lowest: float | None
    highest: float | None
    best: float | None
    best_step: int | None


def summarize_metrics(names: Iterable[str], points: Iterable[MetricPoint]) -> list[MetricOverview]:
    """Summarize the metrics that occur in the points, in the order of `names`."""
    wanted: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for point in points:
        for name, value in point.metrics.items():
            if name in wanted:
                wanted[name].append((point.step, float(value)))
    return [_summarize_metric(name, found) for name, found in wanted.items() if found]


def _summarize_metric(name: str, found: Sequence[tuple[int, float]]) -> MetricOverview:
    finite = [(value, step) for step, value in found if math.isfinite(value)]
    goal = goal_of(name)
    best = None
    if finite and goal is not None:
        # Among equal values, the earliest is best.
        best = min(finite) if goal == "min" else max(finite, key=lambda one: (one[0], -one[1]))
    return MetricOverview(
        name=name,
        points=len(found),
        not_finite=len(found) - len(finite),
        first=found[0][1],
        last=found[-1][1],
        lowest=min(finite)[0] if finite else None,
        highest=max(finite)[0] if finite else None,
        best=best[0] if best else None,
        best_step=best[1] if best else None,
    )
