"""Test the commands of users (cancel, pause, resume, retry), and the ends of attempts by workers."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import Artifact, AttemptEnd, JobCounters, JobState, Reason
from baton.contract.worker.calls import FailRequest
from baton.contract.worker.control import Directive
from functions.domain.checkpoints import commit
from functions.domain.errors import Refusal
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.transaction import DirectLease, Transaction
from functions.domain.records import CheckpointRecord, Job
from tests.kits.api.factories import (
    JOB_ID,
    NOW,
    Held,
    closed_by,
    make_ended,
    make_held,
    make_job,
    make_lease,
    make_record,
)

USERS = Reason(code="paused_by_user", message="until Monday")


def pausing() -> Held:
    held = make_held()
    return Held(rules.pause(held.job, message=USERS.message, now=NOW).job, held.attempt, held.lease, held.fence)


def ended_by(held: Held, how: str, now: int = NOW + 100) -> Transaction:
    if how == "release":
        return rules.release(held.job, held.attempt, held.fence, reason=Reason(code="pause"), progress=None, now=now)
    if how == "fail":
        report = FailRequest(job_id=JOB_ID)
        return rules.fail(held.job, held.attempt, held.fence, report, progress=None, now=now)
    return rules.interrupt(held.job, held.attempt, held.lease, now=now)


def retry(job: Job, **fields: Any) -> Job:
    given = {"chosen": None, "keep_checkpoint": True, "reset_counters": True, "now": NOW}
    return rules.retry(job, **{**given, **fields}).job


def test_cancel_ends_a_running_attempt_at_once_whatever_its_worker_does() -> None:
    held = make_held()
    change = rules.cancel(held.job, held.attempt, message="wrong prompt", now=NOW + 40)
    close = closed_by(change)
    assert (close.epoch, close.closed, close.fence, close.expired_at) == (1, "canceled", None, None)
    assert change.attempt is not None
    assert change.attempt.end is AttemptEnd.CANCELED
    assert change.job.reason == Reason(code="canceled_by_user", message="wrong prompt")
    assert change.job.counters.runtime_s == 40
    assert [event.type for event in change.events] == [EventType.CANCELED]


@pytest.mark.parametrize("job", [make_job(), make_job(not_before=NOW + 5), make_job(state=JobState.PAUSED)])
def test_cancel_before_start_needs_no_lease(job: Job) -> None:
    change = rules.cancel(job, None, message="", now=NOW)
    assert (change.lease, change.attempt) == (None, None)
    assert change.job.not_before is None


@pytest.mark.parametrize("command", ["cancel", "deadline"])
def test_the_lease_ends_even_where_the_attempts_item_is_lost(command: str) -> None:
    """The lease ends even if the attempt's item is lost, because heartbeats read only the lease."""
    job = make_held(make_job(policy={"deadline_at": NOW + 10})).job
    if command == "cancel":
        change = rules.cancel(job, None, message="", now=NOW)
    else:
        change = rules.out_of_time(job, None, now=NOW + 10)
    close = closed_by(change)
    assert (close.epoch, close.fence) == (1, None)
    assert close.closed == ("canceled" if command == "cancel" else "failed")


def test_pausing_a_running_job_asks_its_worker() -> None:
    held = make_held()
    change = rules.pause(held.job, message="until Monday", now=NOW)
    assert change.lease == DirectLease(job_id=JOB_ID, epoch=1, directive=Directive.PAUSE, reason="paused_by_user")
    assert (change.job.state, change.job.pause_requested, change.job.reason) == (JobState.RUNNING, True, USERS)
    assert [event.type for event in change.events] == [EventType.PAUSE_REQUESTED]


def test_pausing_a_waiting_job_ends_its_wait() -> None:
    change = rules.pause(make_job(not_before=NOW + 60), message="", now=NOW)
    assert (change.job.state, change.job.not_before, change.lease) == (JobState.PAUSED, None, None)


@pytest.mark.parametrize(
    ("how", "closed", "counter"),
    [("release", "paused", "releases"), ("fail", "failed", "failures"), ("interrupt", "interrupted", "interruptions")],
)
def test_however_a_pausing_attempt_ends_the_job_is_paused(how: str, closed: str, counter: str) -> None:
    change = ended_by(pausing(), how)
    job = change.job
    assert (job.state, job.pause_requested, job.not_before) == (JobState.PAUSED, False, None)
    # The user's own words, not the machine's.
    assert job.reason == USERS
    assert getattr(job.counters, counter) == 1
    assert closed_by(change).closed == closed
    assert change.events[-1].type is EventType.PAUSED


def test_a_pausing_attempt_that_completes_is_complete() -> None:
    held = pausing()
    change = rules.complete(held.job, held.attempt, held.fence, artifacts=[], progress=None, now=NOW)
    assert (change.job.state, change.job.pause_requested) == (JobState.COMPLETE, False)


def test_a_pausing_job_whose_budget_is_used_up_has_failed() -> None:
    held = make_held(make_job(policy={"max_interruptions": 1}))
    job = rules.pause(held.job, message="", now=NOW).job
    change = rules.interrupt(job, held.attempt, held.lease, now=NOW + 90)
    assert (change.job.state, change.job.pause_requested) == (JobState.FAILED, False)


def test_resume_withdraws_a_pause_under_way() -> None:
    change = rules.resume(pausing().job, now=NOW + 1)
    assert change.lease == DirectLease(job_id=JOB_ID, epoch=1, directive=Directive.CONTINUE, reason="")
    assert (change.job.state, change.job.pause_requested, change.job.reason) == (JobState.RUNNING, False, None)
    assert rules.pause(change.job, message="", now=NOW + 2).job.pause_requested


@pytest.mark.parametrize(("epoch", "stale"), [(0, False), (3, True)])
def test_a_resumed_job_that_has_run_goes_first(epoch: int, stale: bool) -> None:
    job = rules.resume(make_job(state=JobState.PAUSED, epoch=epoch), now=NOW).job
    assert job.claimable
    assert job.stale is stale


def test_a_lease_that_lives_is_not_taken_away() -> None:
    held = make_held()
    for lease in (
        held.lease,
        make_lease(closed="released", expires_at=NOW),
        make_lease(epoch=2, expires_at=NOW),
    ):
        with pytest.raises(Refusal) as caught:
            rules.interrupt(held.job, held.attempt, lease, now=NOW + 89)
        assert caught.value.code is ErrorCode.ILLEGAL_TRANSITION


def test_an_interruption_is_conditional_on_the_lease_having_run_out() -> None:
    close = closed_by(ended_by(make_held(), "interrupt", now=NOW + 95))
    assert (close.fence, close.expired_at) == (None, NOW + 95)


@pytest.mark.parametrize("how", ["release", "fail"])
def test_a_worker_ends_its_attempt_behind_its_fence(how: str) -> None:
    held = make_held()
    close = closed_by(ended_by(held, how))
    assert (close.fence, close.expired_at, close.epoch) == (held.fence, None, 1)


def test_complete_keeps_the_artifacts() -> None:
    held = make_held()
    artifacts = [Artifact(path="model", bucket="training-checkpoints", key="k")]
    change = rules.complete(held.job, held.attempt, held.fence, artifacts=artifacts, progress=None, now=NOW + 7)
    assert (change.job.artifacts, change.job.completed_at, change.job.reason) == (artifacts, NOW + 7, None)
    assert change.events[-1].data == {"artifacts": ["model"]}
    assert closed_by(change).fence is held.fence


@pytest.mark.parametrize("state", [JobState.COMPLETE, JobState.FAILED, JobState.CANCELED])
def test_retry_keeps_the_id_and_what_was_learned(state: JobState) -> None:
    ended = make_ended(
        state,
        checkpoint_step=400,
        checkpoint_epoch=1,
        counters=JobCounters(attempts=1, failures=3, interruptions=2, runtime_s=99),
        fruitless_interruptions=2,
        avoid={"m-1": NOW + 60},
        artifacts=[Artifact(path="m", bucket="b", key="k")],
        reason=Reason(code="x"),
    )
    job = retry(ended)
    assert (job.id, job.epoch, job.claimable) == (ended.id, ended.epoch, True)
    assert (job.checkpoint_step, job.checkpoint_epoch) == (400, 1)
    assert job.counters == JobCounters(attempts=1)
    assert (job.fruitless_interruptions, job.avoid, job.artifacts, job.reason) == (0, {}, [], None)
    assert (job.completed_at, job.failed_at, job.canceled_at) == (None, None, None)
    assert make_held(job).job.epoch == 2


def test_retry_from_a_chosen_checkpoint_and_from_nothing() -> None:
    ended = make_ended(JobState.FAILED, checkpoint_step=400, checkpoint_epoch=1)
    job = retry(ended, keep_checkpoint=False, chosen=make_record(100, 1))
    assert (job.checkpoint_step, job.checkpoint_epoch) == (100, 1)
    job = retry(ended, keep_checkpoint=False)
    assert (job.checkpoint_step, job.checkpoint_epoch) == (None, None)


def test_retry_may_keep_the_counters_but_not_a_spent_budget() -> None:
    counters = JobCounters(attempts=2, failures=2)
    job = retry(make_ended(JobState.CANCELED, counters=counters, avoid={"m-1": NOW + 9}), reset_counters=False)
    assert (job.counters, job.avoid) == (counters, {"m-1": NOW + 9})
    for spent, policy in ((JobCounters(failures=3), {}), (JobCounters(runtime_s=60), {"max_runtime_s": 60})):
        ended = make_job(state=JobState.FAILED, epoch=1, policy=policy, counters=spent)
        with pytest.raises(Refusal, match="reset the counters") as caught:
            retry(ended, reset_counters=False)
        assert caught.value.code is ErrorCode.ILLEGAL_TRANSITION
        assert retry(ended).claimable


def test_retry_after_the_deadline_is_refused() -> None:
    ended = make_job(state=JobState.FAILED, policy={"deadline_at": NOW})
    with pytest.raises(Refusal, match="deadline"):
        retry(ended)


def history(job: Job, *records: tuple[int, int]) -> list[tuple[int, int]]:
    return [(step, epoch) for step, epoch in records if job.in_history(make_record(step, epoch))]


def moved(job: Job, **fields: Any) -> Job:
    return job.model_copy(update=fields)


class TestHistory:
    """A retry from an older checkpoint leaves the later ones behind: they lead somewhere else."""

    job = make_ended(JobState.FAILED, epoch=2, checkpoint_step=300, checkpoint_epoch=2)
    first = ((100, 1), (200, 1), (300, 2))

    def test_without_a_retry_everything_up_to_the_current_one(self) -> None:
        assert history(self.job, *self.first, (400, 1)) == list(self.first)
        assert history(make_job(), *self.first) == []

    def test_the_newest_and_the_same_chosen_by_name_leave_nothing_behind(self) -> None:
        assert retry(self.job).branches == []
        assert retry(self.job, keep_checkpoint=False, chosen=make_record(300, 2)).branches == []

    def test_later_ones_are_left_behind_even_when_the_new_run_passes_them(self) -> None:
        job = retry(self.job, keep_checkpoint=False, chosen=make_record(100, 1))
        assert history(job, *self.first) == [(100, 1)]
        job = moved(job, epoch=3, checkpoint_step=350, checkpoint_epoch=3)
        assert history(job, *self.first, (150, 3), (350, 3)) == [(100, 1), (150, 3), (350, 3)]

    def test_from_nothing(self) -> None:
        job = moved(retry(self.job, keep_checkpoint=False), epoch=3, checkpoint_step=500, checkpoint_epoch=3)
        assert history(job, *self.first, (500, 3)) == [(500, 3)]

    def test_twice(self) -> None:
        job = retry(self.job, keep_checkpoint=False, chosen=make_record(100, 1))
        job = moved(job, state=JobState.FAILED, epoch=3, checkpoint_step=350, checkpoint_epoch=3)
        job = retry(job, keep_checkpoint=False, chosen=make_record(150, 3))
        job = moved(job, epoch=4, checkpoint_step=900, checkpoint_epoch=4)
        records = (*self.first, (150, 3), (350, 3), (900, 4))
        assert history(job, *records) == [(100, 1), (150, 3), (900, 4)]

    def test_back_to_a_checkpoint_that_was_left_behind(self) -> None:
        job = retry(self.job, keep_checkpoint=False, chosen=make_record(100, 1))
        job = moved(job, state=JobState.FAILED, epoch=3, checkpoint_step=150, checkpoint_epoch=3)
        job = retry(job, keep_checkpoint=False, chosen=make_record(300, 2))
        job = moved(job, epoch=4, checkpoint_step=310, checkpoint_epoch=4)
        assert history(job, *self.first, (150, 3), (310, 4)) == [*self.first, (310, 4)]

    def test_the_same_choice_again_and_again_does_not_grow_the_job(self) -> None:
        job = self.job
        for epoch in range(3, 50):
            job = retry(job, keep_checkpoint=False, chosen=make_record(100, 1))
            job = moved(job, state=JobState.FAILED, epoch=epoch, checkpoint_step=110, checkpoint_epoch=epoch)
        assert len(job.branches) == 1


class Run:
    """A job that is taken up again and again, and every checkpoint of it that there is, by step."""

    def __init__(self) -> None:
        self.job = make_job()
        self.records: dict[int, CheckpointRecord] = {}

    def attempt(self, *steps: int) -> None:
        """An attempt that commits these steps and is stopped."""
        held = make_held(self.job)
        job = held.job
        for step in steps:
            change = commit.commit(job, held.fence, make_record(step, job.epoch), now=NOW)
            assert change.records(CheckpointRecord)
            job, self.records[step] = change.job, change.records(CheckpointRecord)[0]
        self.job = rules.cancel(job, held.attempt, message="", now=NOW).job

    def retry(self, from_step: int | None) -> list[int]:
        """Retry from a chosen step or from nothing, and stop; return the steps that an attempt could resume from."""
        chosen = None if from_step is None else self.records[from_step]
        job = retry(self.job, keep_checkpoint=False, chosen=chosen)
        self.job = rules.cancel(job, None, message="", now=NOW).job
        return [record.step for record in commit.resumable(job, self.records.values())]

    def go_on(self, from_step: int | None, *steps: int) -> None:
        """A retry from there, and an attempt that commits these steps."""
        chosen = None if from_step is None else self.records[from_step]
        self.job = retry(self.job, keep_checkpoint=False, chosen=chosen)
        self.attempt(*steps)


class TestBetweenBranches:
    """A checkpoint keeps the history of its commit, whichever checkpoints later retries choose."""

    def test_there_and_back(self) -> None:
        run = Run()
        run.attempt(100, 150)
        run.go_on(100, 200)
        assert run.retry(150) == [150, 100]
        assert run.retry(200) == [200, 100], "150 is none of its history"
        assert run.retry(150) == [150, 100]

    def test_there_and_back_to_a_run_from_nothing(self) -> None:
        run = Run()
        run.attempt(100)
        run.go_on(None, 200)
        assert run.retry(100) == [100]
        assert run.retry(200) == [200]
        assert run.retry(None) == []
        assert run.retry(200) == [200]

    def test_a_branch_of_a_branch(self) -> None:
        run = Run()
        run.attempt(100, 190)
        run.go_on(100, 120, 180)
        run.go_on(120, 130, 170)
        run.go_on(190, 200)
        assert run.retry(170) == [170, 130, 120, 100]
        assert run.retry(200) == [200, 190, 100]
        assert run.retry(180) == [180, 120, 100]
        run.go_on(130, 140)
        assert run.retry(140) == [140, 130, 120, 100]
        run.job = retry(run.job)
        run.attempt(300)
        assert run.retry(300) == [300, 140, 130, 120, 100]
        assert run.retry(190) == [190, 100]

    def test_a_step_that_another_branch_has_committed_anew(self) -> None:
        run = Run()
        run.attempt(100, 150, 200)
        run.go_on(100, 150, 160)
        assert run.retry(200) == [200, 100], "its 150 is another one by now"
        assert run.retry(150) == [150, 100]

    def test_going_to_and_fro_does_not_grow_the_job(self) -> None:
        run = Run()
        run.attempt(100, 150)
        run.go_on(100, 200)
        for _ in range(9):
            run.retry(150)
            assert len(run.job.branches) == 1
            run.retry(200)
            assert len(run.job.branches) == 2

    def test_a_checkpoint_of_an_earlier_version_goes_by_the_branches_of_the_job(self) -> None:
        run = Run()
        run.attempt(100, 150)
        run.go_on(100, 200, 300)
        run.records = {step: record.model_copy(update={"branches": []}) for step, record in run.records.items()}
        assert run.retry(200) == [200, 100]
