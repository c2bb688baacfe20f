"""Test the control plane's measures of a job, and the decisions of its rules, at chosen times."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.jobs.job import JobCounters, JobState, Progress
from baton.contract.worker.control import CommandKind, Directive
from functions.domain.jobs.transaction import CloseLease, DirectLease, SteerLease
from functions.domain.records import CommandRecord, Job, MemberRecord, RuleStateRecord
from functions.domain.rules.rule_evaluation import (
    EVALUATION_INTERVAL_S,
    MAX_ERRORS,
    EvaluationResult,
    JobSnapshot,
    control_plane_rules,
    describe_rules,
    evaluate_rules,
    has_nothing_to_evaluate,
    measure_job,
    record_failure,
)
from tests.kits.api.factories import NOW, make_attempt, make_job, make_lease

HERE = "rules: [{name: here, when: failures > 0, do: %s}]"


def waiting(**fields: Any) -> Job:
    return make_job(watched=True, rules_revision=1, waiting_since=NOW, **fields)


def running(price: float | None = None, progress: Progress | None = None, **fields: Any) -> JobSnapshot:
    """Return a snapshot of a running job whose attempt began at NOW and sent a heartbeat at NOW."""
    job = waiting(state=JobState.RUNNING, epoch=1, **fields)
    lease = make_lease(watched=True, progress=progress)
    return JobSnapshot(job=job, attempt=make_attempt(price_usd_per_hour=price), lease=lease)


def decided(
    seen: JobSnapshot, text: str, *, event: str = "timer", now: int = NOW, kept: Any = list
) -> EvaluationResult:
    return evaluate_rules(seen, control_plane_rules(text), event=event, now=now, read_commands=kept)


def test_what_is_known_of_a_job_that_waits() -> None:
    seen = JobSnapshot(job=waiting(counters=JobCounters(failures=2, interruptions=3, runtime_s=100)))
    assert measure_job(seen, NOW + 7) == {
        "wall": 100.0,
        "cost": None,
        "heartbeat.age": None,
        "queue.age": 7.0,
        "failures": 2.0,
        "interruptions": 3.0,
    }


@pytest.mark.parametrize("more", [{"not_before": NOW + 60}, {"state": JobState.PAUSED}])
def test_who_cannot_be_claimed_does_not_wait(more: dict[str, Any]) -> None:
    assert measure_job(JobSnapshot(job=waiting(**more)), NOW + 7)["queue.age"] == 0.0


def test_what_is_known_of_a_job_that_runs() -> None:
    seen = running(price=36.0, counters=JobCounters(runtime_s=50), cost_usd=1.5, priced_s=50)
    found = measure_job(seen, NOW + 100)
    assert (found["wall"], found["cost"], found["heartbeat.age"], found["queue.age"]) == (150.0, 2.5, 100.0, 0.0)


@pytest.mark.parametrize(
    ("price", "runtime_s", "priced_s", "cost"),
    [
        (36.0, 0, 0, 1.0),
        (0.0, 0, 0, 0.0),
        (None, 0, 0, None),
        (36.0, 50, 49, None),
    ],
)
def test_a_price_that_nobody_said_is_not_nothing(
    price: float | None, runtime_s: int, priced_s: int, cost: float | None
) -> None:
    seen = running(price=price, counters=JobCounters(runtime_s=runtime_s), priced_s=priced_s)
    assert measure_job(seen, NOW + 100)["cost"] == cost


def test_a_job_that_never_ran_has_cost_nothing() -> None:
    assert measure_job(JobSnapshot(job=waiting()), NOW)["cost"] == 0.0


def test_the_lease_of_another_attempt_says_nothing() -> None:
    seen = running()
    other = JobSnapshot(job=seen.job, attempt=seen.attempt, lease=make_lease(2))
    assert measure_job(other, NOW + 9)["heartbeat.age"] is None


def test_a_look_that_decides_nothing_leaves_the_job_alone() -> None:
    first = decided(JobSnapshot(job=waiting()), HERE % "stop")
    assert first.change is not None and [one.type for one in first.change.events] == ["rule.updated"]
    seen = JobSnapshot(job=first.change.job, rule_state=first.rule_state)
    second = decided(seen, HERE % "stop", now=NOW + 60)
    assert second.change is None
    assert (second.rule_state.version, second.rule_state.at) == (first.rule_state.version + 1, NOW + 60)


def test_the_next_look_is_moved_only_when_it_is_past() -> None:
    first = decided(JobSnapshot(job=waiting()), HERE % "stop").rule_state
    assert first.next_at == NOW + EVALUATION_INTERVAL_S
    between = decided(JobSnapshot(job=waiting(), rule_state=first), HERE % "stop", now=NOW + 30).rule_state
    assert between.next_at == NOW + EVALUATION_INTERVAL_S
    then = decided(JobSnapshot(job=waiting(), rule_state=between), HERE % "stop", now=NOW + 50).rule_state
    assert then.next_at == NOW + 100


def test_the_end_of_a_job_is_the_end_of_looking() -> None:
    looked = decided(JobSnapshot(job=waiting(counters=JobCounters(failures=1))), HERE % "{stop: failed}")
    assert looked.change is not None and looked.change.job.state is JobState.FAILED
    assert looked.rule_state.next_at is None and looked.change.records(RuleStateRecord) == (looked.rule_state,)
    assert has_nothing_to_evaluate(looked.change.job, looked.rule_state)


def test_a_stop_holds_only_while_the_worker_has_said_nothing_since() -> None:
    seen = running(counters=JobCounters(failures=1), progress=Progress(step=9, reported_at=NOW))
    looked = decided(seen, HERE % "{stop: failed}", now=NOW + 80)
    change = looked.change
    assert change is not None and change.attempt is not None
    assert change.lease == CloseLease(
        job_id=seen.job.id,
        tenant=seen.job.tenant,
        epoch=1,
        now=NOW + 80,
        closed="failed",
        expired_at=seen.lease.expires_at,
    )  # type: ignore[union-attr]
    assert change.job.counters.runtime_s == 0, "it was heard of at its beginning last"
    assert change.job.progress == seen.lease.progress  # type: ignore[union-attr]
    assert [one.seq for one in change.events] == list(range(2, 2 + len(change.events)))
    assert change.job.rev == seen.job.rev + 1


def test_alerts_do_not_move_a_job_that_waits() -> None:
    job = waiting(counters=JobCounters(failures=1))
    change = decided(JobSnapshot(job=job), HERE % "{alert: x}", now=NOW + 500).change
    assert change is not None
    assert (change.job.updated_at, change.job.rev, change.lease) == (job.updated_at, job.rev + 1, None)


def test_commands_come_with_word_in_the_lease() -> None:
    kept = [
        CommandRecord(seq=seq, kind=CommandKind.SAVE, issued_at=NOW, expires_at=NOW + 9, status="applied")
        for seq in range(1, 101)
    ]
    seen = running(counters=JobCounters(failures=1), commands_seq=100)
    result = decided(seen, HERE % "[save, {set: {knob: lr, value: 0.1, max: 1}}]", kept=lambda: kept)
    change = result.change
    assert change is not None
    assert [(one.seq, one.kind, one.rule, one.revision) for one in change.records(CommandRecord)] == [
        (101, "save", "here", 1),
        (102, "set", "here", 1),
    ]
    assert change.records(CommandRecord)[1].arguments == {"knob": "lr", "value": 0.1, "max": 1.0}
    assert [one.key for one in change.deletes] == [CommandRecord.key(change.job.id, seq) for seq in (1, 2)]
    assert isinstance(change.lease, SteerLease) and change.lease.commands_seq == 102 and change.lease.watched


@pytest.mark.parametrize(("silent_s", "asked"), [(0, True), (60, True), (61, False)])
def test_a_machine_is_asked_while_it_lives(silent_s: int, asked: bool) -> None:
    seen = running(counters=JobCounters(failures=1))
    change = decided(seen, HERE % "requeue", now=NOW + silent_s).change
    assert change is not None and change.job.ended_by is not None
    assert change.job.avoid == {"m-1": NOW + silent_s + 86_400}
    if asked:
        assert isinstance(change.lease, DirectLease) and change.lease.directive is Directive.PAUSE
        assert change.job.state is JobState.RUNNING and not change.job.pause_requested
    else:
        assert isinstance(change.lease, CloseLease) and change.lease.closed == "released"
        assert change.job.state is JobState.PENDING


def test_errors_are_counted_per_revision() -> None:
    seen = JobSnapshot(job=waiting())
    for number in range(1, MAX_ERRORS + 1):
        looked = record_failure(seen, "why", now=NOW)
        assert looked.change is not None and looked.rule_state.errors == number
        seen = JobSnapshot(job=looked.change.job, rule_state=looked.rule_state)
        assert has_nothing_to_evaluate(seen.job, seen.rule_state) == (number == MAX_ERRORS)
    newer = seen.job.model_copy(update={"rules_revision": 2})
    assert not has_nothing_to_evaluate(newer, seen.rule_state)
    assert record_failure(JobSnapshot(job=newer, rule_state=seen.rule_state), "why", now=NOW).rule_state.errors == 1


def test_a_newer_look_s_report_is_not_replaced_by_an_older_one() -> None:
    rules = "rules: [{name: here, when: loss > 5, on: heartbeat, do: {alert: x}}]"
    newest = running(progress=Progress(step=9, metrics={"loss": 1.0}, reported_at=NOW + 9))
    after = decided(newest, rules, event="heartbeat", now=NOW + 9).rule_state
    late = running(progress=Progress(step=8, metrics={"loss": 9.0}, reported_at=NOW + 8))
    again = JobSnapshot(job=late.job, attempt=late.attempt, lease=late.lease, rule_state=after)
    looked = decided(again, rules, event="heartbeat", now=NOW + 9)
    assert looked.change is None
    assert (looked.rule_state.step, looked.rule_state.seen_at) == (9, NOW + 9)
    (status,) = describe_rules(control_plane_rules(rules), looked.rule_state, again.job.id, None)
    assert status.said == "armed, last value 1"


def test_a_group_that_a_job_is_not_in_is_not_known() -> None:
    text = "rules: [{name: here, when: group_count(loss) >= 0, do: stop}]"
    seen = running(progress=Progress(step=1, metrics={"loss": 1.0}, reported_at=NOW))
    alone = evaluate_rules(
        seen, control_plane_rules(text), event="heartbeat", now=NOW, read_commands=list, members=None
    )
    (status,) = describe_rules(control_plane_rules(text), alone.rule_state, seen.job.id, None)
    assert status.state == "unknown" and alone.rule_state.member == MemberRecord()


def test_rules_that_cannot_be_read_here_say_why() -> None:
    with pytest.raises(ValueError, match="mena"):
        control_plane_rules("rules: [{name: a, when: 'mena(cost) > 1', do: stop}]")
    assert control_plane_rules(" \n").rules == ()
    assert has_nothing_to_evaluate(make_job(), None) and has_nothing_to_evaluate(
        waiting(state=JobState.COMPLETE), RuleStateRecord(version=1)
    )
