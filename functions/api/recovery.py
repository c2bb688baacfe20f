"""Renewing a lease, also one that the sweeper has revoked while no other worker has claimed the job."""

from __future__ import annotations

from baton.contract.jobs import Progress
from functions.api.context import Context
from functions.api.leasing import WRITE_TRIES
from functions.domain.errors import FenceBroken, Refusal, StorageUnavailable, WriteConflict
from functions.domain.leases import Fence
from functions.domain.readoption import readopt
from functions.domain.records import Attempt, Lease


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
