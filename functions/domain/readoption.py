"""Giving a revoked attempt back to its worker, while no other worker has claimed the job."""

from __future__ import annotations

from baton.contract.errors import ErrorCode
from baton.contract.history import EventType
from baton.contract.jobs import JobState, ReasonCode
from functions.domain.ending import committed_step, cost_usd, counted
from functions.domain.errors import Refusal
from functions.domain.leases import Fence
from functions.domain.records import Attempt, Job, Lease
from functions.domain.transaction import ReopenLease, Transaction, changed


def readopt(job: Job, attempt: Attempt, lease: Lease, fence: Fence, *, now: int) -> Transaction:
    """Undo the revocation of `lease`: the attempt goes on under its epoch, and no interruption is counted.

    Refuses unless the job still waits, for no other reason than the revocation: a user may have retried or resumed the
    job since, and a retry chooses the checkpoint to go on from.
    """
    revoked = attempt.reason is not None and attempt.reason.code == ReasonCode.LEASE_EXPIRED
    untouched = job.state is JobState.PENDING and job.epoch == lease.epoch and job.reason == attempt.reason
    if not untouched or not revoked or not fence.recovers(lease):
        raise Refusal(ErrorCode.LEASE_LOST, f"Attempt {lease.epoch} of job {job.id} has ended.")
    # The revocation counted the time until the last accepted heartbeat.
    ran_s = max(lease.expires_at - lease.duration_s - attempt.started_at, 0)
    fruitless = job.fruitless_interruptions - (committed_step(job, attempt) is None)
    priced = attempt.price_usd_per_hour
    spent = {}
    if priced is not None:
        spent = {"cost_usd": job.cost_usd - cost_usd(ran_s, priced), "priced_s": job.priced_s - ran_s}
    change = changed(
        job,
        now,
        state=JobState.RUNNING,
        reason=None,
        not_before=None,
        stale=False,
        counters=counted(job.counters, interruptions=-1, runtime_s=-ran_s),
        fruitless_interruptions=max(fruitless, 0),
        **spent,
    )
    continued = attempt.model_copy(update={"ended_at": None, "end": None, "reason": None})
    reopen = ReopenLease(
        fence=fence,
        duration_s=lease.duration_s,
        rules_revision=job.rules_revision,
        commands_seq=job.commands_seq,
        watched=job.watched,
    )
    return (
        change.put(continued).also(reopen).with_event(EventType.ATTEMPT_RECOVERED, now, machine_id=attempt.machine_id)
    )
