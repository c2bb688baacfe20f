"""Conditional writes: prove or renew a lease, and apply decisions, again after a conflicting write."""

from __future__ import annotations

from collections.abc import Callable

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import Progress
from functions.api.http.context import ApiCall, Context, require_job
from functions.domain.errors import FenceBroken, Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import Transaction
from functions.domain.jobs.transitions import readopt
from functions.domain.records import Attempt, Job, Lease

WRITE_TRIES = 8
"""Tries of a decision whose write conflicts with another write."""


def require_lease(context: Context, fence: Fence) -> Lease:
    """Return the live lease that the fence proves; refuse with the reason otherwise."""
    lease = context.leases.get(fence.job_id)
    if lease is None or not fence.admits(lease):
        raise fence.refusal(lease)
    return lease


def require_attempt(context: Context, job: Job) -> Attempt:
    """Return the attempt that runs the job."""
    attempt = context.jobs.read(Attempt, job.id, job.epoch)
    if attempt is None:
        raise Refusal(ErrorCode.JOB_NOT_RUNNING, f"Job {job.id} has no attempt {job.epoch}.")
    return attempt


def apply_decision(context: Context, decide: Callable[[], Transaction]) -> Job:
    """Decide and write; decide again after a conflicting write. Returns the written job."""
    for _ in range(WRITE_TRIES):
        change = decide()
        try:
            context.jobs.apply(change)
        except WriteConflict:
            continue
        return change.job
    raise Refusal(ErrorCode.CONFLICT, f"Other calls changed the job during all {WRITE_TRIES} tries.")


def apply_as_bearer(
    context: Context,
    call: ApiCall,
    fence: Fence,
    decide: Callable[[Job, Attempt], Transaction],
    *,
    seen: Job | None = None,
) -> Job:
    """Decide and write for a worker, whose lease must be live at the moment of the write.

    `seen`: the job as this call has read the job, for the first decision. After a change of the job the write fails,
    and the next decision reads the job again.
    """

    def decision() -> Transaction:
        nonlocal seen
        job, seen = seen or require_job(context, call, fence.job_id), None
        rules.require_running(job)
        return decide(job, require_attempt(context, job))

    try:
        return apply_decision(context, decision)
    except FenceBroken as broken:
        raise fence.refusal(broken.lease) from broken


def renew_lease(context: Context, fence: Fence, progress: Progress | None, phase: str | None) -> Lease:
    """Renew the lease of the bearer of `fence`; recover a revoked attempt if no other worker has claimed the job.

    Raises FenceBroken, and StorageUnavailable if other calls change the job during all tries.
    """
    try:
        return context.leases.heartbeat(fence, progress, phase)
    except FenceBroken as broken:
        if broken.lease is None or not fence.recovers(broken.lease):
            raise
        _recover_attempt(context, fence, broken.lease)
    # The second heartbeat decides also after a refused recovery: a repeated heartbeat may have recovered the attempt.
    return context.leases.heartbeat(fence, progress, phase)


def _recover_attempt(context: Context, fence: Fence, lease: Lease) -> None:
    """Resume the attempt of the revoked `lease`, unless the job no longer waits because of the revocation."""
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
    # Not a refusal: an agent ends its training after a refused heartbeat, and repeats a failed heartbeat.
    raise StorageUnavailable(f"other calls changed job {fence.job_id} during all {WRITE_TRIES} tries")
