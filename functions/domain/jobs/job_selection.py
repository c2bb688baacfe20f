"""Select the job of a claim: match requirements, and widen the candidate window after claim conflicts.

The choice is random among the leading jobs of equal rank. With a window of W jobs and n concurrent claims, about n / W
of the claims conflict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from functions.domain.jobs.transaction import OpenLease, Transaction
from functions.domain.records import Claimant, Job

if TYPE_CHECKING:
    # Only the functions with calls of workers load the models of the calls.
    from baton.contract.worker.calls import WorkQuery

SMALLEST_WINDOW = 10
LARGEST_WINDOW = 160
GROWTH = 4
DECAY = 32
"""Inverse of the fraction by which a claim without conflict shrinks the window."""


@dataclass
class ClaimWindow:
    """Number of jobs to choose from, which one process keeps over its claims.

    Threads may share a window: a lost update only makes the window a little larger or smaller.
    """

    size: int = SMALLEST_WINDOW

    def widen(self) -> None:
        """Enlarge the window after a conflict."""
        self.size = min(self.size * GROWTH, LARGEST_WINDOW)

    def narrow(self) -> None:
        """Shrink the window slowly after a claim without conflict."""
        self.size = max(self.size - max(self.size // DECAY, 1), SMALLEST_WINDOW)

    def choose(self, candidates: Sequence[Job], draw_below: Callable[[int], int]) -> Job:
        """Return one of the first `size` candidates that rank alike; there must be at least one candidate."""
        leading = leading_equals(candidates[: self.size])
        return leading[draw_below(len(leading))] if len(leading) > 1 else leading[0]


def with_rings(change: Transaction, ring_token_sha256: str | None) -> Transaction:
    """Return the claim with a lease that opens the job's rings; unchanged for a job without rings."""
    rings, lease = change.job.spec.rings, change.lease
    if not rings or ring_token_sha256 is None or not isinstance(lease, OpenLease):
        return change
    opened = lease.lease.model_copy(update={"rings": rings, "ring_token_sha256": ring_token_sha256})
    return change.replacing(lease, OpenLease(lease=opened))


def with_claimant(change: Transaction, claimant: Claimant | None) -> Transaction:
    """Return the claim with the original client that its lease belongs to; unchanged for a lease with a token."""
    opening = change.lease
    if claimant is None or not isinstance(opening, OpenLease):
        return change
    # Every machine whose variable is unset sends the same empty id, which therefore identifies no machine.
    updates = {"claimant": claimant, "machine_id": opening.lease.machine_id or None}
    return change.replacing(opening, OpenLease(lease=opening.lease.model_copy(update=updates)))


def select_suitable(candidates: Sequence[Job], worker: WorkQuery, now: int) -> list[Job]:
    """Return the jobs that a worker may claim, in order, without jobs whose deadline has passed."""
    return [
        job for job in candidates if mismatch(job, worker, now) is None and (job.timer_at is None or job.timer_at > now)
    ]


def mismatch(job: Job, worker: WorkQuery, now: int) -> str | None:
    """Return why a worker may not claim a job; None if the worker may."""
    if worker.machine_id and job.avoid.get(worker.machine_id, 0) > now:
        return "this machine failed the job recently"
    needs = job.spec.requirements
    for name, needed, has in (
        ("VRAM (GiB)", needs.min_vram_gib, worker.vram_gib),
        ("disk (GiB)", needs.min_disk_gib, worker.disk_gib),
        ("GPUs", needs.min_gpus, worker.gpus),
    ):
        if needed and (has is None or has < needed):
            return f"needs {needed:.15g} {name}, the worker declares {'none' if has is None else f'{has:.15g}'}"
    if needs.gpu_models and not any(names_model(wanted, worker.gpu_model or "") for wanted in needs.gpu_models):
        return f"needs one of {', '.join(needs.gpu_models)}, the worker declares {worker.gpu_model or 'no GPU model'}"
    if needs.image and not same_image(needs.image, worker.image or ""):
        return f"needs the image {needs.image}, the worker declares {worker.image or 'none'}"
    if job.spec.plan is not None and job.spec.plan.needs_plan and not worker.runs_plans:
        return "needs a worker that runs the steps of a recipe"
    if job.spec.seat is not None and not worker.runs_nodes:
        return "needs a worker that runs nodes of elastic jobs"
    return None


def same_image(wanted: str, image: str) -> bool:
    """Return True if `image` satisfies `wanted`, where a name without tag or digest matches every version."""
    if wanted == image:
        return True
    name = re.split(r"@|:(?!.*/)", image, maxsplit=1)[0]
    return name == wanted


def names_model(wanted: str, model: str) -> bool:
    """Return True if the model contains the wanted name as whole words: an "A10" is not an "A100"."""
    return re.search(rf"(?<!\w){re.escape(wanted.strip())}(?!\w)", model, re.IGNORECASE) is not None


def leading_equals(candidates: Sequence[Job]) -> list[Job]:
    """Return the leading candidates of equal rank (stale, priority)."""
    if not candidates:
        return []
    first = candidates[0]
    return [job for job in candidates if job.stale == first.stale and job.priority == first.priority]
