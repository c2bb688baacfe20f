"""JobStore: what every implementation does alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import JobState, Reason
from baton.contract.jobs.policy import Policy
from functions.domain.checkpoints import commit as checkpoint_rules
from functions.domain.checkpoints import packs
from functions.domain.checkpoints.retention import schedule_retention
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.jobs.transaction import (
    CloseLease,
    DirectLease,
    Transaction,
    delete_checkpoint,
    update_job,
    write_job,
)
from functions.domain.records import Attempt, Branch, CheckpointRecord, Event, Job, Spec
from tests.conformance.store_kit import NOW, TENANT, claim, commit, failed, record, submission, submit
from tests.kits.clouds.store_sets import Cloud

LATER = NOW + 1000


def indexes(cloud: Cloud, job_id: str) -> set[str]:
    names = ("ready", "by_tenant", "by_state", "timers", "due")
    return {name for name in names if job_id in cloud.members(name)}


def test_a_submitted_job_is_read_back_exactly(cloud: Cloud) -> None:
    spec = Spec(
        command=["train", "--gr\u00fc\u00df=\U0001f600", ""],
        parameters={"lr": 0.1 + 0.2, "tiny": 5e-324, "big": 2**80, "deep": [{"a": [None, True, 1.0]}], "": {}},
        environment={"A": ""},
    )
    job = submit(cloud, spec=spec, idempotency_digest="d")
    assert cloud.jobs.get(job.id) == job
    assert cloud.jobs.get_many([job.id, "unknown", job.id]) == [job]
    events = cloud.jobs.history(Event, job.id, limit=10)
    assert [(event.seq, event.type) for event in events.items] == [(1, EventType.SUBMITTED)]
    assert events.cursor is None


def test_what_does_not_exist_is_not_found(cloud: Cloud) -> None:
    jobs = cloud.jobs
    assert jobs.get("unknown") is None
    assert jobs.get_many([]) == []
    assert jobs.read(Attempt, "unknown", 1) is None
    assert jobs.read(CheckpointRecord, "unknown", 1) is None
    assert jobs.protect_checkpoint("unknown", 1, NOW) is None
    assert jobs.read(CheckpointRecord, "unknown", 1) is None
    for page in (
        jobs.history(Event, "unknown", limit=5),
        jobs.history(Attempt, "unknown", limit=5),
        jobs.history(CheckpointRecord, "unknown", limit=5),
        jobs.ready(TENANT, "default", 0, limit=5),
        jobs.list_jobs(TENANT, state=None, limit=5),
    ):
        assert (list(page.items), page.cursor) == ([], None)


def test_a_job_is_created_once(cloud: Cloud) -> None:
    change = submission()
    cloud.jobs.apply(change)
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(change)
    assert cloud.jobs.get(change.job.id) == change.job


def test_a_decision_on_an_old_revision_is_refused_whole(cloud: Cloud) -> None:
    job = submit(cloud)
    first = rules.pause(job, message="", now=NOW)
    second = rules.cancel(job, None, message="", now=NOW)
    cloud.jobs.apply(first)
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(second)
    assert cloud.jobs.get(job.id) == first.job
    assert [event.type for event in cloud.jobs.history(Event, job.id, limit=9).items] == [
        EventType.SUBMITTED,
        EventType.PAUSED,
    ]


def test_a_change_of_a_job_that_does_not_exist_is_refused(cloud: Cloud) -> None:
    change = rules.pause(submission().job, message="", now=NOW)
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(change)
    assert cloud.jobs.get(change.job.id) is None


def test_two_claims_of_one_revision_have_one_winner(cloud: Cloud) -> None:
    job = submit(cloud)
    held = claim(cloud, job, token="first")
    with pytest.raises(WriteConflict):
        claim(cloud, job, token="second")
    assert cloud.jobs.get(job.id) == held.job
    assert cloud.leases.get(job.id) == held.lease
    assert cloud.jobs.read(Attempt, job.id, 1) == held.attempt


def test_a_job_too_large_for_an_item_is_refused(cloud: Cloud) -> None:
    change = submission()
    huge = change.job.model_copy(update={"reason": Reason(code="c", message="\u00e9" * 200_000)})
    with pytest.raises(Refusal) as refused:
        cloud.jobs.apply(write_job(huge))
    assert refused.value.code is ErrorCode.PAYLOAD_TOO_LARGE
    assert list(cloud.jobs.list_jobs(TENANT, state=None, limit=5).items) == []


def test_lists_of_large_jobs_are_whole(cloud: Cloud) -> None:
    # More than DynamoDB puts into one answer of 1 MB.
    ids = [submit(cloud, spec=Spec(command=["train", "x" * 95_000]), now=NOW + n).id for n in range(15)]
    assert [job.id for job in cloud.jobs.ready(TENANT, "default", 0, limit=15).items] == ids
    assert [job.id for job in cloud.jobs.list_jobs(TENANT, state=None, limit=15).items] == ids


def test_the_longest_wait_is_that_of_the_job_that_could_be_claimed_first(cloud: Cloud) -> None:
    assert cloud.jobs.longest_waiting(limit=9) is None
    first = submit(cloud, now=NOW)
    submit(cloud, queue="other", tenant="rival", priority=90, now=NOW + 5)
    submit(cloud, queue="other", shard=1, priority=10, now=NOW + 3)
    assert cloud.jobs.longest_waiting(limit=9) == NOW
    held = claim(cloud, first, now=NOW + 10)
    assert cloud.jobs.longest_waiting(limit=9) == NOW + 3
    # A job that comes back waits from then on, however old it is.
    cloud.jobs.apply(rules.interrupt(held.job, held.attempt, held.lease, now=held.lease.expires_at + 1))
    assert cloud.jobs.longest_waiting(limit=9) == NOW + 3
    assert cloud.jobs.longest_waiting(limit=1) in (NOW + 3, NOW + 5, held.lease.expires_at + 1)


def test_index_membership_follows_every_transition(cloud: Cloud) -> None:
    listed = {"by_tenant", "by_state"}
    job = submit(cloud)
    assert indexes(cloud, job.id) == listed | {"ready"}
    held = claim(cloud, job)
    assert indexes(cloud, job.id) == listed | {"due"}
    held = commit(cloud, held, 5)
    assert indexes(cloud, job.id) == listed | {"due"}
    change = failed(held, held.fence(), NOW)
    cloud.jobs.apply(change)
    assert change.job.not_before is not None
    assert indexes(cloud, job.id) == listed | {"timers"}
    woken = rules.timer(change.job, None, now=change.job.not_before)
    assert woken is not None
    cloud.jobs.apply(woken)
    assert indexes(cloud, job.id) == listed | {"ready"}
    paused = rules.pause(woken.job, message="", now=NOW)
    cloud.jobs.apply(paused)
    assert indexes(cloud, job.id) == listed
    resumed = rules.resume(paused.job, now=NOW)
    cloud.jobs.apply(resumed)
    assert indexes(cloud, job.id) == listed | {"ready"}
    canceled = rules.cancel(resumed.job, None, message="", now=NOW)
    cloud.jobs.apply(canceled)
    assert indexes(cloud, job.id) == listed | {"timers"}, "for the sweeper's retention"
    retried = rules.retry(canceled.job, chosen=None, keep_checkpoint=True, reset_counters=True, now=NOW)
    cloud.jobs.apply(retried)
    assert indexes(cloud, job.id) == listed | {"ready"}
    held = claim(cloud, retried.job)
    assert held.lease.epoch == 2
    cloud.jobs.apply(rules.complete(held.job, held.attempt, held.fence(), artifacts=[], progress=None, now=NOW))
    assert indexes(cloud, job.id) == listed


def test_a_job_with_a_deadline_has_a_timer_while_it_lives(cloud: Cloud) -> None:
    job = submit(cloud, policy=Policy(deadline_at=LATER))
    other = submit(cloud, policy=Policy(deadline_at=LATER + 1))
    assert cloud.members("timers") == {job.id, other.id}
    assert cloud.jobs.due_timers(LATER - 1, limit=9) == []
    assert cloud.jobs.due_timers(LATER, limit=9) == [job.id]
    assert cloud.jobs.due_timers(LATER + 1, limit=9) == [job.id, other.id]
    assert cloud.jobs.due_timers(LATER + 1, limit=1) == [job.id]
    held = claim(cloud, job)
    assert "timers" in indexes(cloud, job.id)
    ended = rules.timer(held.job, held.attempt, now=LATER)
    assert ended is not None
    cloud.jobs.apply(ended)
    stored = cloud.jobs.get(job.id)
    assert stored is not None
    assert stored.state is JobState.FAILED
    assert cloud.jobs.due_timers(LATER + 1, limit=9) == [other.id]
    assert cloud.jobs.due_retentions(LATER + LATE_AFTER_S, limit=9) == [job.id]


def test_retentions_are_due_apart_from_timers_and_until_they_are_done(cloud: Cloud) -> None:
    jobs = [submit(cloud), submit(cloud), submit(cloud)]
    never_ran = submit(cloud)
    for later_s, job in enumerate(jobs):
        held = claim(cloud, job)
        cloud.jobs.apply(rules.cancel(held.job, held.attempt, message="", now=NOW + later_s))
    cloud.jobs.apply(rules.cancel(never_ran, None, message="", now=NOW))
    ids = [job.id for job in jobs]
    due_at = NOW + LATE_AFTER_S
    assert cloud.members("timers") == set(ids)
    assert cloud.jobs.due_timers(due_at + 9, limit=9) == []
    assert cloud.jobs.due_retentions(due_at - 1, limit=9) == []
    assert cloud.jobs.due_retentions(due_at, limit=9) == ids[:1]
    assert cloud.jobs.due_retentions(due_at + 9, limit=9) == ids
    assert cloud.jobs.due_retentions(due_at + 9, limit=2) == ids[:2]
    first, second, third = cloud.jobs.get_many(ids)
    cloud.jobs.apply(schedule_retention(first, None))
    cloud.jobs.apply(schedule_retention(second, due_at + 20))
    retried = rules.retry(third, chosen=None, keep_checkpoint=True, reset_counters=True, now=NOW)
    cloud.jobs.apply(retried)
    assert cloud.jobs.due_retentions(due_at + 19, limit=9) == []
    assert cloud.jobs.due_retentions(due_at + 20, limit=9) == [second.id]
    assert cloud.jobs.get_many(ids) == [
        first.model_copy(update={"rev": first.rev + 1, "retention_at": None}),
        second.model_copy(update={"rev": second.rev + 1, "retention_at": due_at + 20}),
        retried.job,
    ]
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(schedule_retention(third, None))


def test_ready_is_in_rank_order_and_apart_by_tenant_queue_and_shard(cloud: Cloud) -> None:
    old = submit(cloud, now=NOW - 5)
    new = submit(cloud, now=NOW)
    urgent = submit(cloud, priority=100)
    idle = submit(cloud, priority=0)
    started = claim(cloud, submit(cloud, priority=1))
    change = rules.release(
        started.job, started.attempt, started.fence(), reason=Reason(code="sigterm"), progress=None, now=NOW
    )
    cloud.jobs.apply(change)
    elsewhere = [
        submit(cloud, tenant="other"),
        submit(cloud, queue="other"),
        submit(cloud, shard=1),
        submit(cloud, tenant="acme2"),
    ]
    page = cloud.jobs.ready(TENANT, "default", 0, limit=10)
    assert [job.id for job in page.items] == [started.job.id, urgent.id, old.id, new.id, idle.id]
    assert page.items[0] == change.job
    assert page.cursor is None
    for job in elsewhere:
        assert list(cloud.jobs.ready(job.tenant, job.queue, job.shard, limit=9).items) == [job]


def test_a_jobs_lists_are_oldest_first_and_by_state(cloud: Cloud) -> None:
    jobs = [submit(cloud, now=NOW - n) for n in range(4)]
    submit(cloud, tenant="other")
    running = claim(cloud, jobs[1]).job
    assert list(cloud.jobs.list_jobs(TENANT, state=None, limit=9).items) == [jobs[3], jobs[2], running, jobs[0]]
    assert list(cloud.jobs.list_jobs(TENANT, state=JobState.RUNNING, limit=9).items) == [running]
    assert list(cloud.jobs.list_jobs(TENANT, state=JobState.PENDING, limit=9).items) == [jobs[3], jobs[2], jobs[0]]
    assert list(cloud.jobs.list_jobs(TENANT, state=JobState.PAUSED, limit=9).items) == []


def test_jobs_are_counted_by_state_up_to_a_bound(cloud: Cloud) -> None:
    jobs = [submit(cloud, now=NOW - n) for n in range(5)]
    submit(cloud, tenant="other")
    claim(cloud, jobs[1])

    def counts(up_to: int) -> list[int]:
        return [cloud.jobs.count_jobs(TENANT, state, up_to=up_to) for state in JobState]

    assert dict(zip(JobState, counts(9), strict=True)) == {
        **dict.fromkeys(JobState, 0),
        JobState.PENDING: 4,
        JobState.RUNNING: 1,
    }
    assert sum(counts(3)) == 3 + 1


def test_protection_only_grows(cloud: Cloud) -> None:
    held = commit(cloud, claim(cloud, submit(cloud)), 7)
    stored = cloud.jobs.read(CheckpointRecord, held.job.id, 7)
    assert stored == record(7, first_step=7)
    protected = cloud.jobs.protect_checkpoint(held.job.id, 7, LATER)
    assert protected == record(7, first_step=7, protected_until=LATER)
    assert cloud.jobs.protect_checkpoint(held.job.id, 7, LATER - 5) == protected
    assert cloud.jobs.read(CheckpointRecord, held.job.id, 7) == protected
    assert list(cloud.jobs.history(CheckpointRecord, held.job.id, limit=5).items) == [protected]
    assert cloud.jobs.protect_checkpoint(held.job.id, 8, LATER) is None


def forgetting(job: Job, record: CheckpointRecord, now: int) -> Transaction:
    """Retention's change."""
    return packs.delete_records(job, [delete_checkpoint(job.id, record, now)])


def test_a_checkpoint_is_forgotten_unless_protected_or_changed(cloud: Cloud) -> None:
    held = commit(cloud, claim(cloud, submit(cloud)), 7)
    job_id = held.job.id
    seen = cloud.jobs.read(CheckpointRecord, job_id, 7)
    assert seen is not None
    cloud.jobs.protect_checkpoint(job_id, 7, LATER)
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(forgetting(held.job, seen, LATER - 1))
    assert cloud.jobs.read(CheckpointRecord, job_id, 7) is not None
    for other in (
        seen.model_copy(update={"epoch": 2}),
        seen.model_copy(update={"committed_at": 1}),
        seen.model_copy(update={"pinned": True}),
        seen.model_copy(update={"damaged": True}),
    ):
        with pytest.raises(WriteConflict):
            cloud.jobs.apply(forgetting(held.job, other, LATER))
    assert cloud.jobs.get(job_id) == held.job
    change = forgetting(held.job, seen, LATER)
    cloud.jobs.apply(change)
    assert cloud.jobs.get(job_id) == change.job
    assert cloud.jobs.read(CheckpointRecord, job_id, 7) is None
    assert list(cloud.jobs.history(CheckpointRecord, job_id, limit=5).items) == []
    # Repeating it is no refusal: the bytes may still be there.
    cloud.jobs.apply(forgetting(change.job, seen, LATER))


def test_a_damaged_checkpoint_is_replaced_by_a_later_attempts(cloud: Cloud) -> None:
    held = commit(cloud, commit(cloud, claim(cloud, submit(cloud)), 5), 7)
    job_id = held.job.id
    seen, fallback = cloud.jobs.read(CheckpointRecord, job_id, 7), cloud.jobs.read(CheckpointRecord, job_id, 5)
    assert seen is not None
    change = checkpoint_rules.mark_damaged(held.job, held.attempt, held.fence(), seen, fallback, message="", now=NOW)
    cloud.jobs.apply(change)
    assert cloud.jobs.read(CheckpointRecord, job_id, 7) == seen.model_copy(update={"damaged": True})
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(forgetting(change.job, seen, LATER))
    left = rules.release(change.job, held.attempt, held.fence(), reason=Reason(code="sigterm"), progress=None, now=NOW)
    cloud.jobs.apply(left)
    commit(cloud, claim(cloud, left.job), 7)
    assert cloud.jobs.read(CheckpointRecord, job_id, 7) == record(7, epoch=2, first_step=5)


def test_a_checkpoint_keeps_the_branches_that_it_came_by(cloud: Cloud) -> None:
    """A retry decides by the branches of a checkpoint's record, therefore each later write keeps the branches."""
    first = commit(cloud, commit(cloud, claim(cloud, submit(cloud)), 5), 7)
    stopped = rules.cancel(first.job, first.attempt, message="", now=NOW)
    cloud.jobs.apply(stopped)
    retried = rules.retry(
        stopped.job,
        chosen=cloud.jobs.read(CheckpointRecord, first.job.id, 5),
        keep_checkpoint=False,
        reset_counters=True,
        now=NOW,
    )
    cloud.jobs.apply(retried)
    held = commit(cloud, claim(cloud, retried.job), 9)
    came_by = [Branch(step=5, epoch=1, before=2)]
    assert [job.branches for job in cloud.jobs.get_many([held.job.id])] == [came_by]
    seen = cloud.jobs.protect_checkpoint(held.job.id, 9, LATER)
    assert seen == record(9, epoch=2, branches=came_by, first_step=5, protected_until=LATER)
    assert [one.branches for one in cloud.jobs.history(CheckpointRecord, held.job.id, limit=5).items] == [
        came_by,
        [],
        [],
    ]
    assert seen is not None
    cloud.jobs.apply(
        checkpoint_rules.mark_damaged(held.job, held.attempt, held.fence(), seen, None, message="", now=NOW)
    )
    assert cloud.jobs.read(CheckpointRecord, held.job.id, 9) == seen.model_copy(update={"damaged": True})


def test_a_broken_fence_changes_nothing_and_shows_the_lease(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    fence = held.fence(token_sha256="0" * 64)
    change = checkpoint_rules.commit(held.job, fence, record(3), now=NOW)
    with pytest.raises(FenceBroken) as broken:
        cloud.jobs.apply(change)
    assert broken.value.lease == held.lease
    assert cloud.jobs.get(held.job.id) == held.job
    assert cloud.jobs.read(CheckpointRecord, held.job.id, 3) is None
    assert cloud.jobs.read(Attempt, held.job.id, 1) == held.attempt
    assert len(cloud.jobs.history(Event, held.job.id, limit=9).items) == 2


def test_a_conflict_counts_before_a_broken_fence(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    cloud.jobs.apply(rules.pause(held.job, message="", now=NOW))
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(failed(held, held.fence(token_sha256=None), NOW))


def test_a_directive_is_left_for_the_live_attempt_only(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    change = rules.pause(held.job, message="", now=NOW)
    cloud.jobs.apply(change)
    lease = cloud.leases.get(held.job.id)
    assert lease == held.lease.model_copy(update={"directive": "pause", "directive_reason": "paused_by_user"})
    stale = DirectLease(job_id=held.job.id, epoch=2, directive="cancel", reason="")
    with pytest.raises(FenceBroken):
        cloud.jobs.apply(update_job(change.job, NOW).also(stale))
    cloud.jobs.apply(rules.cancel(change.job, held.attempt, message="", now=NOW))
    canceled = cloud.jobs.get(held.job.id)
    assert canceled is not None
    with pytest.raises(FenceBroken) as broken:
        cloud.jobs.apply(update_job(canceled, NOW).also(replace(stale, epoch=1)))
    assert broken.value.lease == cloud.leases.get(held.job.id)
    assert cloud.jobs.get(held.job.id) == canceled


def test_the_sweeper_ends_only_leases_that_ran_out(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    ends_at = held.lease.expires_at

    def interruption(expired_at: int) -> Transaction:
        change = rules.interrupt(held.job, held.attempt, held.lease, now=ends_at)
        close = change.lease
        assert isinstance(close, CloseLease)
        return change.replacing(close, replace(close, expired_at=expired_at))

    with pytest.raises(FenceBroken) as broken:
        cloud.jobs.apply(interruption(ends_at - 1))
    assert broken.value.lease == held.lease
    assert "due" in indexes(cloud, held.job.id)
    cloud.jobs.apply(interruption(ends_at))
    lease = cloud.leases.get(held.job.id)
    assert lease is not None
    assert lease.closed == "interrupted"
    assert indexes(cloud, held.job.id) == {"by_tenant", "by_state", "ready"}


def test_a_cancel_goes_through_where_the_lease_row_is_lost(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    if cloud.memory is not None:
        del cloud.memory.state.leases[held.job.id]
    else:
        cloud.dynamodb.delete_item(TableName=f"{cloud.prefix}heartbeats", Key={"pk": {"S": held.job.id}})
    cloud.jobs.apply(rules.cancel(held.job, held.attempt, message="", now=NOW + 5))
    job, lease = cloud.jobs.get(held.job.id), cloud.leases.get(held.job.id)
    assert job is not None
    assert job.state is JobState.CANCELED
    assert lease is not None
    assert (lease.tenant, lease.epoch, lease.expires_at, lease.closed) == (TENANT, 1, NOW + 5, "canceled")
