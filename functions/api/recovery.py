"""Renewing a lease, also one that the sweeper has revoked while no other worker has claimed the job."""

from __future__ import annotations

from contract.jobs import Progress
from functions.api.context import Context
from functions.api.leasing import WRITE_TRIES
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.leases import Fence
from functions.domain.readoption import readopt
from functions.domain.records import Lease


def renew_lease(context: Context, fence: Fence, progress: Progress | None, phase: str | None) -> Lease:
    """Prolong the lease of the bearer of `fence`, recovering a revoked attempt first. Raises FenceBroken."""
    try:
        return context.leases.heartbeat(fence, progress, phase)
    except FenceBroken as broken:
        if broken.lease is None or not _recover_attempt(context, fence, broken.lease):
            raise
    return context.leases.heartbeat(fence, progress, phase)


def _recover_attempt(context: Context, fence: Fence, lease: Lease) -> bool:
    """Return True if the attempt of the revoked `lease` runs again."""
    if not fence.recovers(lease):
        return False
    for _ in range(WRITE_TRIES):
        job = context.jobs.get(fence.job_id)
        attempt = None if job is None else context.jobs.attempt(job.id, lease.epoch)
        if job is None or attempt is None:
            return False
        try:
            context.jobs.apply(readopt(job, attempt, lease, fence, now=fence.now))
        except WriteConflict:
            continue
        except (Refusal, FenceBroken):
            # Another worker has claimed the job, a command has moved it, or a repeated heartbeat was faster.
            return False
        return True
    return False
