"""What a training saw: the points of all its attempts as one history in which each step is there once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.contract.history import AttemptView
from baton.contract.output import MetricPoint
from baton.contract.rules.metrics import BUILT_IN, Goal, canonical_name
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient


@dataclass(frozen=True)
class History:
    """Points of one job."""

    kept: list[MetricPoint]
    """What the training went on from: steps rise, each is there once."""
    void: list[MetricPoint]
    """What an attempt saw behind the checkpoint from which the next one resumed."""

    def names(self) -> list[str]:
        """All metrics, the loss first, then evaluations."""
        found = {name for point in (*self.kept, *self.void) for name in point.metrics}
        return sorted(found, key=lambda name: (_rank(name), name))


def _rank(name: str) -> int:
    known = canonical_name(name)
    return 0 if known == "loss" else 1 if known == "eval.loss" else 2 if known.startswith("eval") else 3


def history_of(client: BatonClient, job_id: str, attempts: Sequence[AttemptView] | None = None) -> History:
    """Everything that a job's training reported. `attempts`: all of the job's; without them they are asked for."""
    if attempts is None:
        listed = pages(lambda cursor: client.attempts(job_id, limit=1000, cursor=cursor))
        attempts = [attempt for page in listed for attempt in page.attempts]
    return stitched(client.metric_points(job_id), {one.epoch: one.resumed_step for one in attempts})


def stitched(points: Iterable[MetricPoint], resumed_steps: Mapping[int, int | None] | None = None) -> History:
    """One history of them. Pure; `points` come attempt after attempt, as they were reported.

    resumed_steps: where the attempts resumed, by epoch, None for those that began anew. One that is not there is taken
        to have resumed before the first step that it reports.

    What earlier attempts saw behind the resumed step is void. So is what an attempt saw itself behind a step to which
    it goes back. Points of one step become one; a step that comes late, with metrics that no later step has, is put
    where it belongs.
    """
    history = History([], [])
    epoch: int | None = None
    for point in points:
        if point.epoch != epoch:
            epoch = point.epoch
            _begin(history, point, resumed_steps)
        _add(history, point)
    return history


def _begin(history: History, first: MetricPoint, resumed_steps: Mapping[int, int | None] | None) -> None:
    """An attempt begins: drop what it will see anew."""
    if resumed_steps is not None and first.epoch in resumed_steps:
        _drop_behind(history, resumed_steps[first.epoch] or 0)
    else:
        # Without metrics it says where it begins, and not what came of the first step.
        _drop_behind(history, first.step - 1 if first.metrics else first.step)


def _drop_behind(history: History, step: int) -> None:
    kept = history.kept
    place = len(kept)
    while place and kept[place - 1].step > step:
        place -= 1
    history.void.extend(kept[place:])
    del kept[place:]


def _add(history: History, point: MetricPoint) -> None:
    kept = history.kept
    place = len(kept)
    while place and kept[place - 1].step > point.step:
        place -= 1
    again = any(one.epoch != point.epoch or one.metrics.keys() & point.metrics.keys() for one in kept[place:])
    there = kept[place - 1] if place and kept[place - 1].step == point.step else None
    if again or (place < len(kept) and not point.metrics):
        _drop_behind(history, point.step if there is None else point.step - 1)
        kept.append(point)
        return
    if there is None:
        kept.insert(place, point)
        return
    # The newest word on a metric counts; the step is of the attempt that had it first.
    merged = {**there.metrics, **point.metrics}
    kept[place - 1] = there.model_copy(update={"metrics": merged})


def goal_of(name: str) -> Goal | None:
    """Which values of a metric are better; None where its name does not tell."""
    known = canonical_name(name)
    if known in BUILT_IN:
        return BUILT_IN[known].goal
    last = known.rpartition(".")[2]
    if "loss" in last or "perplexity" in last:
        return "min"
    return "max" if last in ("accuracy", "acc", "f1", "precision", "recall") else None


class Outline(NamedTuple):
    """A metric in a few numbers. `best`, its step, `lowest`, `highest`: of the finite values, None without any."""

    name: str
    points: int
    not_finite: int
    first: float
    last: float
    lowest: float | None
    highest: float | None
    best: float | None
    best_step: int | None


def outlines_of(names: Iterable[str], points: Iterable[MetricPoint]) -> list[Outline]:
    """Of those metrics that some point has, in the order of `names`; each point is looked at once."""
    wanted: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for point in points:
        for name, value in point.metrics.items():
            if name in wanted:
                wanted[name].append((point.step, float(value)))
    return [_outline(name, found) for name, found in wanted.items() if found]


def _outline(name: str, found: Sequence[tuple[int, float]]) -> Outline:
    finite = [(value, step) for step, value in found if math.isfinite(value)]
    goal = goal_of(name)
    best = None
    if finite and goal is not None:
        # of equal ones the earliest
        best = min(finite) if goal == "min" else max(finite, key=lambda one: (one[0], -one[1]))
    return Outline(
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
