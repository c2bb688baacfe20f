"""Proving the right to write, and writing what was decided."""

from __future__ import annotations

from collections.abc import Callable

from baton.contract.errors import ErrorCode
from baton.contract.jobs import Progress
from functions.api.http.context import Call, Context, job_of
from functions.domain.errors import FenceBroken, Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.leases import Fence
from functions.domain.jobs.transaction import Transaction
from functions.domain.jobs.transitions import readopt
from functions.domain.records import Attempt, Job, Lease

WRITE_TRIES = 8
"""How often a decision is made anew because somebody else wrote in between."""


def require_lease(context: Context, fence: Fence) -> Lease:
    """The live lease that the fence proves; refuses with the reason otherwise."""
    lease = context.leases.get(fence.job_id)
    if lease is None or not fence.admits(lease):
        raise fence.refusal(lease)
    return lease


def current_attempt(context: Context, job: Job) -> Attempt:
    """The attempt that holds the job."""
    attempt = context.jobs.read(Attempt, job.id, job.epoch)
    if attempt is None:
        raise Refusal(ErrorCode.JOB_NOT_RUNNING, f"Job {job.id} has no attempt {job.epoch}.")
    return attempt


def apply_decision(context: Context, decide: Callable[[], Transaction]) -> Job:
    """Decide and write, anew whenever somebody else wrote in between."""
    for _ in range(WRITE_TRIES):
        change = decide()
        try:
            context.jobs.apply(change)
        except WriteConflict:
            continue
        return change.job
    raise Refusal(ErrorCode.CONFLICT, "The job is being changed by others all the time.")


def apply_as_bearer(
    context: Context,
    call: Call,
    fence: Fence,
    decide: Callable[[Job, Attempt], Transaction],
    *,
    seen: Job | None = None,
) -> Job:
    """The same for a worker's write: its lease must hold at the very moment of writing.

    `seen`: the job as this call has read it, from which to decide at first. If it has changed since, nothing is written
    and the job is read anew.
    """

    def decision() -> Transaction:
        nonlocal seen
        job, seen = seen or job_of(context, call, fence.job_id), None
        rules.require_running(job)
        return decide(job, current_attempt(context, job))

    try:
        return apply_decision(context, decision)
    except FenceBroken as broken:
        raise fence.refusal(broken.lease) from broken


def renew_lease(context: Context, fence: Fence, progress: Progress | None, phase: str | None) -> Lease:
    """Prolong the lease of the bearer of `fence`, recovering a revoked attempt first.

    Raises FenceBroken, and StorageUnavailable if other writers change the job all the time.
    """
    try:
        return context.leases.heartbeat(fence, progress, phase)
    except FenceBroken as broken:
        if broken.lease is None or not fence.recovers(broken.lease):
            raise
        _recover_attempt(context, fence, broken.lease)
    # Decides also after a refused recovery: a repeated heartbeat may have recovered the attempt first.
    return context.leases.heartbeat(fence, progress, phase)


def _recover_attempt(context: Context, fence: Fence, lease: Lease) -> None:
    """Let the attempt of the revoked `lease` run again, unless the job no longer waits because of the revocation."""
    for _ in range(WRITE_TRIES):
        job = context.jobs.get(fence.job_id)
        attempt = None if job is None else context.jobs.read(Attempt, job.id, lease.epoch)
        if job is None or attempt is None:
            return
        try:
            context.jobs.apply(readopt(job, attempt, lease, fence, now=fence.now))
        except WriteConflict:
            continue
        except (Refusal, FenceBroken):
            # Another worker has claimed the job, a command has moved the job, or a repeated heartbeat was faster.
            return
        return
    # Not a refusal: an agent ends its training after a refused heartbeat, and repeats a failed one.
    raise StorageUnavailable(f"job {fence.job_id} is being changed by others all the time")
