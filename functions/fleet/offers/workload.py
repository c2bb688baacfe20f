"""Estimate the work of waiting jobs, from their policies, their progress and the history of their recipes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, quantiles

from functions.domain.records import Job
from functions.fleet.offers.offer_ranking import Workload

ASSUMED = Workload()
"""Work of a job of which nothing is known."""
ASSUMED_SPREAD = (0.5, 2.0)
"""Least and most hours of such a job, as factors."""
LEAST_HISTORY = 3
"""Ended jobs of a recipe from which quantiles can be taken."""
LEAST_PROGRESS = 0.02
"""Part of a job's steps that must be done before the rest is computed from them."""


def hours_of_recipes(ended: Sequence[Job]) -> Mapping[str, Workload]:
    """Return the work of each recipe from its completed jobs: mean, 10 % and 90 % quantile of their running times.

    The running time of an elastic job is the sum over its nodes, therefore such jobs do not count.
    """
    found: dict[str, list[float]] = {}
    for job in ended:
        if job.spec.recipe and job.spec.nodes is None and job.counters.runtime_s > 0:
            found.setdefault(job.spec.recipe, []).append(job.counters.runtime_s / 3600)
    works: dict[str, Workload] = {}
    for recipe, hours in found.items():
        if len(hours) >= LEAST_HISTORY:
            tenths = quantiles(hours, n=10, method="inclusive")
            works[recipe] = Workload(hours=fmean(hours), least_hours=tenths[0], most_hours=tenths[-1])
    return works


def estimate(job: Job, history: Mapping[str, Workload], *, hours: float | None = None) -> tuple[Workload, str]:
    """Return the work that is left of a job, and where its hours are from: `given`, `progress`, `history`, `assumed`.

    hours: as given by the user for a job from its first step. history: of `hours_of_recipes`.
    """
    every = job.spec.policy.checkpoint_every
    checkpoint_s = float(every) if isinstance(every, int) else ASSUMED.checkpoint_every_s
    done = _share_done(job)
    if hours is not None:
        left = hours * (1 - done)
        work, source = Workload(hours=left, least_hours=left, most_hours=left), "given"
    elif done >= LEAST_PROGRESS and job.counters.runtime_s > 0:
        work, source = Workload(hours=job.counters.runtime_s / 3600 * (1 - done) / done), "progress"
    elif job.spec.recipe and job.spec.recipe in history:
        work, source = history[job.spec.recipe], "history"
    else:
        least, most = (factor * ASSUMED.hours for factor in ASSUMED_SPREAD)
        work, source = Workload(least_hours=least, most_hours=most), "assumed"
    return replace(work, checkpoint_every_s=checkpoint_s), source


def typical(works: Sequence[Workload]) -> Workload:
    """Return the mean of several works, by which offers are compared; ASSUMED for none."""
    if not works:
        return ASSUMED
    return Workload(
        hours=fmean(one.hours for one in works),
        checkpoint_every_s=fmean(one.checkpoint_every_s for one in works),
        traffic_gb=fmean(one.traffic_gb for one in works),
    )


def _share_done(job: Job) -> float:
    """Return the part of the job's steps that its newest checkpoint keeps; 0 if unknown."""
    progress = job.progress
    if progress is None or not progress.total_steps or job.checkpoint_step is None:
        return 0.0
    return min(1.0, max(0.0, job.checkpoint_step / progress.total_steps))
