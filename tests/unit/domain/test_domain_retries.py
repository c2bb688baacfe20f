"""Counters apart, caps, backoff, machines to avoid, budgets of time."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import AttemptEnd, FailureClass, JobCounters, JobState, Progress, Reason
from baton.contract.jobs.policy import Policy
from baton.contract.worker.calls import FailRequest
from functions.domain.checkpoints.commit import commit
from functions.domain.errors import Refusal
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.attempt_end import MAX_LOG_TAIL_BYTES
from functions.domain.jobs.retry import MAX_AVOIDED_MACHINES, avoided, backoff_s
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import Job
from tests.kits.api.factories import (
    JOB_ID,
    NOW,
    Held,
    closed_by,
    make_ended,
    make_held,
    make_job,
    make_record,
)


def fail(held: Held, *, now: int = NOW, **report: Any) -> Transaction:
    return rules.fail(held.job, held.attempt, held.fence, FailRequest(job_id=JOB_ID, **report), progress=None, now=now)


def interrupt(held: Held, *, now: int | None = None) -> Transaction:
    return rules.interrupt(held.job, held.attempt, held.lease, now=held.lease.expires_at if now is None else now)


def release(held: Held, *, now: int = NOW) -> Transaction:
    return rules.release(held.job, held.attempt, held.fence, reason=Reason(code="sigterm"), progress=None, now=now)


def ready(job: Job) -> Job:
    """The job once its backoff is over."""
    return job.model_copy(update={"not_before": None})


MISHAPS = [kind for kind in FailureClass if kind is not FailureClass.STOPPED_BY_RULE]


@pytest.mark.parametrize("failure_class", MISHAPS)
def test_a_failure_is_charged_to_one_budget(failure_class: FailureClass) -> None:
    counters = fail(make_held(), failure_class=failure_class).job.counters
    one, other = ("node_faults", "failures") if failure_class.node_fault else ("failures", "node_faults")
    assert (getattr(counters, one), getattr(counters, other)) == (1, 0)
    assert (counters.attempts, counters.interruptions, counters.releases) == (1, 0, 0)


def test_what_a_rule_has_ended_is_charged_to_no_budget_and_not_tried_again() -> None:
    job = fail(make_held(), failure_class="stopped_by_rule").job
    assert (job.state, job.failed_at, job.not_before) == (JobState.FAILED, job.updated_at, None)
    assert job.counters.model_copy(update={"runtime_s": 0}) == JobCounters(attempts=1)
    assert job.avoid == {}


def test_interruptions_and_releases_are_not_failures() -> None:
    job = interrupt(make_held()).job
    assert job.stale
    job = release(make_held(ready(job), now=NOW + 200), now=NOW + 210).job
    assert job.counters == JobCounters(attempts=2, interruptions=1, releases=1, runtime_s=10)
    assert job.claimable
    assert job.stale


def test_failure_keeps_what_the_worker_said() -> None:
    change = fail(
        make_held(),
        failure_class="out_of_memory",
        exit_code=-9,
        signal=9,
        message="killed",
        log_tail=["step 1", "step 2"],
    )
    assert change.attempt is not None
    assert change.attempt.end is AttemptEnd.FAILED
    assert (change.attempt.exit_code, change.attempt.signal) == (-9, 9)
    assert change.attempt.log_tail == ["step 1", "step 2"]
    assert change.attempt.failure_class is FailureClass.OUT_OF_MEMORY
    assert change.job.reason == Reason(code="out_of_memory", message="killed")


def test_a_log_tail_that_no_item_could_hold_loses_its_oldest_lines_not_the_failure() -> None:
    lines = [f"{n:03d}" + "█" * 1997 for n in range(100)]
    change = fail(make_held(), log_tail=lines)
    assert change.attempt is not None
    kept = change.attempt.log_tail
    assert kept
    assert kept == lines[-len(kept) :]
    assert len(change.attempt.model_dump_json().encode()) < MAX_LOG_TAIL_BYTES + 2000


@pytest.mark.parametrize(
    ("times", "waits"),
    [(1, 15), (2, 30), (3, 60), (8, 1920), (9, 3600), (1000, 3600)],
)
def test_backoff_doubles_up_to_an_hour(times: int, waits: int) -> None:
    assert backoff_s(Policy(), times) == waits


@pytest.mark.parametrize("times", [1, 2, 50])
def test_a_longer_first_pause_is_kept(times: int) -> None:
    assert backoff_s(Policy(backoff_s=86_400), times) == 86_400


def test_no_backoff_at_all() -> None:
    assert backoff_s(Policy(backoff_s=0), 7) == 0
    assert fail(make_held(make_job(policy={"backoff_s": 0}))).job.not_before is None


def test_failures_wait_longer_each_time_until_the_cap() -> None:
    job, now, waits = make_job(policy={"max_failures": 4, "backoff_s": 10}), NOW, []
    for machine in ("m-1", "m-2", "m-3"):
        change = fail(make_held(job, now=now, machine_id=machine), now=now)
        assert change.job.state is JobState.PENDING
        assert change.job.not_before is not None
        waits.append(change.job.not_before - now)
        now = change.job.not_before
        timer = rules.timer(change.job, None, now=now)
        assert timer is not None
        assert [event.type for event in timer.events] == [EventType.BACKOFF_ENDED]
        job = timer.job
        assert job.claimable
    assert waits == [10, 20, 40]
    change = fail(make_held(job, now=now, machine_id="m-4"), now=now)
    assert change.job.state is JobState.FAILED
    assert change.job.not_before is None
    assert change.job.failed_at == now
    assert change.job.reason is not None
    assert change.job.reason.code == "failure_cap"
    assert [event.type for event in change.events] == [EventType.ATTEMPT_FAILED, EventType.FAILED]


def test_a_backoff_does_not_end_early() -> None:
    job = make_job(not_before=NOW + 1)
    assert rules.timer(job, None, now=NOW) is None
    assert rules.timer(job, None, now=NOW + 1) is not None


@pytest.mark.parametrize(
    ("policy", "end", "code"),
    [
        ({"max_failures": 1}, fail, "failure_cap"),
        ({"max_interruptions": 1}, interrupt, "interruption_cap"),
        ({"max_fruitless_interruptions": 1}, interrupt, "fruitless_interruption_cap"),
    ],
)
def test_each_cap_parks_the_job_with_its_reason(policy: dict[str, int], end: Any, code: str) -> None:
    change = end(make_held(make_job(policy=policy)))
    assert change.job.state is JobState.FAILED
    assert change.job.reason.code == code
    assert change.attempt.reason.code != code
    assert change.events[-1].data["code"] == code


def test_node_faults_have_a_cap_of_their_own() -> None:
    job = make_job(policy={"max_node_faults": 2, "max_failures": 1})
    change = fail(make_held(job), failure_class="disk_full")
    assert change.job.state is JobState.PENDING
    change = fail(make_held(ready(change.job), machine_id="m-2"), failure_class="disk_full")
    said = "met a faulty machine 2 times; the policy allows 2"
    assert change.job.reason == Reason(code="node_fault_cap", message=said)


def test_releases_have_no_cap() -> None:
    job = make_job(policy={"max_failures": 1, "max_interruptions": 1, "max_node_faults": 1})
    for _ in range(20):
        job = release(make_held(job)).job
    assert job.claimable
    assert job.counters.releases == 20


def test_an_agent_that_crashed_was_interrupted() -> None:
    # Regression: a job that kills every agent was handed back as released for ever, and no budget paid for it.
    job, attempts = make_job(policy={"max_fruitless_interruptions": 4, "backoff_s": 10}), 0
    while not job.state.terminal:
        held = make_held(job.model_copy(update={"not_before": None}))
        reason = Reason(code="agent_crashed")
        change = rules.release(held.job, held.attempt, held.fence, reason=reason, progress=None, now=NOW)
        assert change.attempt and change.attempt.end is AttemptEnd.INTERRUPTED
        job, attempts = change.job, attempts + 1
    assert attempts == 4
    assert (job.counters.interruptions, job.counters.releases) == (4, 0)
    assert job.reason and job.reason.code == "fruitless_interruption_cap"


def test_another_machine_may_try_at_once_after_a_node_fault() -> None:
    job = fail(make_held(), failure_class="node_fault", machine_id="m-1").job
    assert job.claimable
    assert job.avoid == {"m-1": NOW + 86_400}


@pytest.mark.parametrize(
    ("worker", "report", "policy"),
    [
        ({"machine_id": None}, {"machine_id": "m-1"}, {}),
        ({"machine_id": None}, {}, {}),
        ({"machine_id": "m-1"}, {"machine_id": "m-1"}, {"avoid_machine_s": 0}),
    ],
)
def test_a_faulty_machine_that_cannot_be_avoided_waits(
    worker: dict[str, Any], report: dict[str, Any], policy: dict[str, Any]
) -> None:
    """A job of a faulty machine that cannot be avoided waits; the machine would claim the job again at once."""
    job = fail(make_held(make_job(policy=policy), **worker), failure_class="node_fault", **report).job
    assert job.not_before == NOW + 15
    assert job.avoid == {}


def test_the_machine_is_the_claims_not_the_reports() -> None:
    job = fail(make_held(machine_id="m-1"), failure_class="node_fault", machine_id="m-2").job
    assert job.avoid == {"m-1": NOW + 86_400}
    assert job.claimable


def test_avoidance_expires_and_stays_small() -> None:
    policy = Policy(avoid_machine_s=100)
    assert avoided({"old": NOW, "new": NOW + 1}, "m-1", policy, NOW) == {"m-1": NOW + 100, "new": NOW + 1}
    assert avoided({}, None, policy, NOW) == {}
    assert avoided({}, "", policy, NOW) == {}
    assert avoided({"m-1": NOW + 5}, "m-1", policy, NOW) == {"m-1": NOW + 100}
    crowd = {f"m-{n}": NOW + 1 + n for n in range(200)}
    kept = avoided(crowd, "newest", Policy(avoid_machine_s=10_000), NOW)
    assert len(kept) == MAX_AVOIDED_MACHINES
    assert "newest" in kept
    assert "m-199" in kept
    assert "m-0" not in kept


def test_fruitless_interruptions_in_a_row() -> None:
    """Losing machines is normal: two cost nothing. More without a checkpoint wait longer and longer."""
    job, now, waits = make_job(policy={"max_fruitless_interruptions": 6, "backoff_s": 10}), NOW, []
    for _ in range(5):
        held = make_held(ready(job), now=now)
        now = held.lease.expires_at
        job = interrupt(held).job
        waits.append((job.not_before or now) - now)
    assert waits == [0, 0, 10, 20, 40]
    assert (job.fruitless_interruptions, job.state) == (5, JobState.PENDING)
    change = interrupt(make_held(ready(job), now=now))
    assert change.job.reason is not None
    assert change.job.reason.code == "fruitless_interruption_cap"


def test_a_commit_ends_the_row() -> None:
    held = make_held(make_job(fruitless_interruptions=9, counters=JobCounters(interruptions=9)))
    change = commit(held.job, held.fence, make_record(), now=NOW + 1)
    assert change.job.fruitless_interruptions == 0
    after = rules.interrupt(change.job, held.attempt, held.lease, now=held.lease.expires_at).job
    assert (after.fruitless_interruptions, after.counters.interruptions) == (0, 10)
    assert after.claimable


def test_releases_and_failures_do_not_touch_the_row() -> None:
    for end in (release, fail):
        assert end(make_held(make_job(fruitless_interruptions=3))).job.fruitless_interruptions == 3


def test_runtime_is_counted_until_the_machine_was_last_seen() -> None:
    held = make_held()
    seen = held.lease.model_copy(update={"expires_at": NOW + 60 + 90})
    change = rules.interrupt(held.job, held.attempt, seen, now=NOW + 100_000)
    assert change.job.counters.runtime_s == 60
    assert change.job.reason == Reason(code="lease_expired", message="no heartbeat for 99940 s")


def test_runtime_is_never_negative() -> None:
    held = make_held()
    assert release(held, now=NOW - 50).job.counters.runtime_s == 0


def test_the_lease_knows_when_the_time_is_used_up() -> None:
    job = make_job(policy={"max_runtime_s": 1000}, counters=JobCounters(runtime_s=400))
    assert make_held(job).lease.stop_at == NOW + 600
    job = make_job(policy={"max_runtime_s": 1000, "deadline_at": NOW + 100}, counters=JobCounters(runtime_s=400))
    assert make_held(job).lease.stop_at == NOW + 100
    assert make_held().lease.stop_at is None


def test_max_runtime_ends_the_attempt_and_the_job() -> None:
    held = make_held(make_job(policy={"max_runtime_s": 1000}, counters=JobCounters(runtime_s=400)))
    with pytest.raises(Refusal) as caught:
        rules.out_of_time(held.job, held.attempt, now=NOW + 599)
    assert caught.value.code is ErrorCode.ILLEGAL_TRANSITION
    change = rules.out_of_time(held.job, held.attempt, now=NOW + 600)
    assert change.job.state is JobState.FAILED
    assert change.job.reason is not None
    assert change.job.reason.code == "max_runtime"
    assert change.job.counters.runtime_s == 1000
    close = closed_by(change)
    assert (close.closed, close.fence, close.expired_at) == ("failed", None, None)


@pytest.mark.parametrize("end", [fail, release])
def test_a_job_without_time_left_is_not_handed_out_again(end: Any) -> None:
    held = make_held(make_job(policy={"max_runtime_s": 100}))
    assert end(held, now=NOW + 99).job.state is JobState.PENDING
    change = end(held, now=NOW + 100)
    assert change.job.state is JobState.FAILED
    assert change.job.reason.code == "max_runtime"


def test_a_lost_machine_uses_up_the_time_it_was_seen() -> None:
    held = make_held(make_job(policy={"max_runtime_s": 100}))
    seen = held.lease.model_copy(update={"expires_at": NOW + 100 + 90})
    assert rules.interrupt(held.job, held.attempt, seen, now=NOW + 500).job.state is JobState.FAILED


@pytest.mark.parametrize("state", ["pending", "waiting", "paused", "running"])
def test_the_deadline_ends_a_job_wherever_it_stands(state: str) -> None:
    policy = {"deadline_at": NOW + 100}
    held = make_held(make_job(policy=policy))
    job = {
        "pending": make_job(policy=policy),
        "waiting": make_job(policy=policy, not_before=NOW + 50),
        "paused": make_job(policy=policy, state=JobState.PAUSED),
        "running": held.job,
    }[state]
    attempt = held.attempt if state == "running" else None
    assert job.timer_at == (NOW + 50 if state == "waiting" else NOW + 100)
    change = rules.timer(job, attempt, now=NOW + 100)
    assert change is not None
    assert change.job.state is JobState.FAILED
    assert change.job.failed_at == NOW + 100
    assert change.job.not_before is None
    assert change.job.reason is not None
    assert change.job.reason.code == "deadline"
    assert (change.lease is not None) == (state == "running")


def test_the_deadline_comes_before_the_end_of_a_backoff() -> None:
    job = make_job(policy={"deadline_at": NOW + 10}, not_before=NOW + 5)
    change = rules.timer(job, None, now=NOW + 10)
    assert change is not None
    assert change.job.state is JobState.FAILED


def test_a_deadline_in_the_past_is_refused_at_submit() -> None:
    with pytest.raises(Refusal) as caught:
        rules.submit(
            job_id=JOB_ID,
            tenant="t",
            spec=make_job(policy={"deadline_at": NOW}).spec,
            queue="default",
            shard=0,
            priority=50,
            now=NOW,
        )
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_VALUE, "policy.deadline_at")


def test_a_job_too_large_to_be_finished_is_refused_at_submit() -> None:
    spec = make_job().spec.model_copy(update={"environment": {f"A{n}": "x" * 4096 for n in range(30)}})
    with pytest.raises(Refusal) as caught:
        rules.submit(job_id=JOB_ID, tenant="t", spec=spec, queue="default", shard=0, priority=50, now=NOW)
    assert caught.value.code is ErrorCode.PAYLOAD_TOO_LARGE


def test_the_newest_report_is_kept_whichever_way_it_came() -> None:
    """A commit at step 100 is newer than the heartbeat that named step 90 before it."""
    held = make_held()
    heartbeat = Progress(step=90, total_steps=500, reported_at=NOW + 10)
    change = commit(held.job, held.fence, make_record(100), now=NOW + 20)
    lease = held.lease.model_copy(update={"progress": heartbeat})
    after = rules.interrupt(change.job, held.attempt, lease, now=lease.expires_at).job
    assert after.progress is not None
    assert after.progress.step == 100
    later = lease.model_copy(update={"progress": heartbeat.model_copy(update={"step": 130, "reported_at": NOW + 30})})
    after = rules.interrupt(change.job, held.attempt, later, now=lease.expires_at).job
    assert after.progress is not None
    assert after.progress.step == 130


def test_progress_of_a_run_from_nothing_replaces_that_of_the_run_before() -> None:
    done = make_ended(JobState.COMPLETE, progress=Progress(step=500, total_steps=500, reported_at=NOW))
    job = rules.retry(done, chosen=None, keep_checkpoint=False, reset_counters=True, now=NOW).job
    held = make_held(job, now=NOW + 1)
    after = commit(held.job, held.fence, make_record(100, epoch=2), now=NOW + 5).job
    assert after.progress is not None
    assert (after.progress.step, after.progress.total_steps) == (100, 500)
