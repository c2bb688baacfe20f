"""Test the writes that bring an elastic job and its seats together; every write fits a transaction."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.elastic.nodes import NodesSpec
from baton.contract.jobs.job import AttemptEnd, JobCounters, JobState, Progress, Reason
from functions.domain.jobs import transitions
from functions.domain.jobs.transaction import Put, Transaction, write_job
from functions.domain.records import Attempt, Job
from functions.domain.seat_records import SeatMark
from functions.domain.worlds.seat_ids import seat_ids
from functions.domain.worlds.seats import MAX_EVENTS, list_needed_attempts, reconcile, with_seats
from tests.kits.api.factories import JOB_ID, NOW, make_attempt, make_job, make_spec

ITEMS = 100
"""Limit of DynamoDB for the items of a transaction."""


def elastic(most: int, **more: Any) -> tuple[Job, dict[int, Job]]:
    """An elastic job and its new seats."""
    job, *seats = with_seats(submission(most, **more)).records(Job)
    return job, dict(enumerate(seats))


def submission(most: int, **more: Any) -> Transaction:
    return write_job(make_job(spec=make_spec(nodes=NodesSpec(min=1, max=most)), **more))


def run(seat: Job, **more: Any) -> Job:
    return seat.model_copy(update={"state": JobState.RUNNING, "epoch": seat.epoch + 1, "started_at": NOW, **more})


def settle(
    job: Job, seats: dict[int, Job], attempts: dict[tuple[int, int], Attempt] | None = None
) -> tuple[Job, dict[int, Job], list[Transaction]]:
    """Apply the writes of `reconcile` until none is left; return job, seats and all writes."""
    written: list[Transaction] = []
    while True:
        known = {key: (attempts or {}).get(key, make_attempt(key[1])) for key in list_needed_attempts(job, seats)}
        changes = reconcile(job, seats, known, now=NOW)
        if not changes:
            return job, seats, written
        written += changes
        jobs = {one.id: one for change in changes for one in change.records(Job)}
        job = jobs.get(job.id, job)
        seats = {place: jobs.get(seat.id, seat) for place, seat in seats.items()}
        assert len(written) < 500


def test_seats_are_created_with_the_job_and_have_ids_of_their_own() -> None:
    job, seats = elastic(64, priority=70, created_at=NOW - 9)
    writes = with_seats(submission(64)).writes
    assert [write.owner for write in writes if isinstance(write, Put) and write.seen == {}] == [
        JOB_ID,
        *seat_ids(JOB_ID, 64),
    ]
    assert len(set(seat_ids(JOB_ID, 64))) == 64 and len(writes) < ITEMS
    seat = seats[3]
    assert (seat.spec.nodes, seat.priority, seat.created_at, seat.claimable) == (None, 70, NOW - 9, True)
    assert seat.spec.seat is not None and (seat.spec.seat.job, seat.spec.seat.seat) == (JOB_ID, 3)
    assert not job.claimable and "state_pk" not in seat.attributes() and reconcile(job, seats, {}, now=NOW) == []


def test_claims_of_all_seats_at_once_fit_the_transactions() -> None:
    job, seats = elastic(64)
    job, _, writes = settle(job, {place: run(seat) for place, seat in seats.items()})
    assert max(len(change.writes) for change in writes) < ITEMS and len(writes) == 2
    assert (job.state, job.epoch) == (JobState.RUNNING, 64)
    assert sorted(mark.world_epoch for mark in job.seats) == list(range(1, 65))
    assert MAX_EVENTS < 64 == sum(len(change.events) for change in writes)


def test_a_retry_of_all_seats_at_once_fits_the_transactions() -> None:
    job, seats = elastic(64)
    job, seats, _ = settle(transitions.cancel(job, None, message="", now=NOW).job, seats)
    assert job.settled
    again = transitions.retry(job, chosen=None, keep_checkpoint=True, reset_counters=True, now=NOW).job
    job, seats, writes = settle(again, seats)
    assert {(seat.state, seat.generation) for seat in seats.values()} == {(JobState.PENDING, 1)}
    assert max(len(change.writes) for change in writes) < ITEMS
    assert all(change.job.id == JOB_ID for change in writes), "a stale decision must not revive a seat"


def test_attempts_between_two_writes_are_numbered_and_told() -> None:
    """The function that should have recorded two attempts died."""
    job, seats = elastic(2)
    lost = {"ended_at": NOW, "end": AttemptEnd.INTERRUPTED, "reason": Reason(code="lease_expired", message="m")}
    seats[1] = run(seats[1]).model_copy(update={"epoch": 3})
    attempts = {(1, 1): make_attempt(1, **lost), (1, 2): make_attempt(2, **lost), (1, 3): make_attempt(3)}
    job, _, writes = settle(job, seats, attempts)
    events = [event for change in writes for event in change.events]
    assert [(event.type.value, event.epoch, event.data["attempt"]) for event in events] == [
        ("job.started", 1, 1),
        ("attempt.interrupted", 1, 1),
        ("job.started", 2, 2),
        ("attempt.interrupted", 2, 2),
        ("job.started", 3, 3),
    ]
    assert job.seats == [SeatMark(), SeatMark(epoch=3, running=True, world_epoch=3)]
    assert job.fruitless_interruptions == 2


def test_an_attempt_that_ends_after_the_read_of_its_seat_ends_once_in_the_history() -> None:
    job, seats = elastic(1)
    ended = make_attempt(1, ended_at=NOW, end=AttemptEnd.RELEASED)
    first = reconcile(job, {0: run(seats[0])}, {(0, 1): ended}, now=NOW)
    assert [event.type.value for event in first[0].events] == ["job.started"]
    then = reconcile(first[0].job, {0: seats[0].model_copy(update={"epoch": 1})}, {(0, 1): ended}, now=NOW)
    assert [event.type.value for event in then[0].events] == ["attempt.released"]


def test_sums_and_the_newest_progress() -> None:
    job, seats = elastic(2)
    seats[0] = run(seats[0], counters=JobCounters(attempts=1, failures=1, runtime_s=9), cost_usd=0.5, priced_s=9)
    seats[1] = run(seats[1], counters=JobCounters(attempts=2, runtime_s=1), cost_usd=0.25, started_at=NOW - 5)
    seats[1] = seats[1].model_copy(update={"progress": Progress(step=7, reported_at=NOW)})
    job, _, _ = settle(job, seats)
    assert job.counters == JobCounters(attempts=3, failures=1, runtime_s=10)
    assert (job.cost_usd, job.priced_s, job.started_at) == (0.75, 9, NOW - 5)
    assert job.progress is not None and job.progress.step == 7


def test_an_attempt_from_before_a_retry_ends_before_the_seat_is_retried() -> None:
    """The function that should have ended the seats of the stopped job died, and a user retried the job."""
    job, seats = elastic(2)
    seats[0] = run(seats[0])
    job, seats, _ = settle(job, seats)
    stopped = transitions.cancel(job, None, message="", now=NOW).job
    again = transitions.retry(stopped, chosen=None, keep_checkpoint=True, reset_counters=True, now=NOW).job
    job, seats, writes = settle(again, seats)
    ended = [change.attempt for change in writes if change.attempt is not None]
    assert [(one.end, one.reason.code if one.reason else "") for one in ended] == [(AttemptEnd.CANCELED, "world_ended")]
    assert {(seat.state, seat.generation) for seat in seats.values()} == {(JobState.PENDING, 1)}


@pytest.mark.parametrize("keeps", [False, True])
def test_a_retry_resets_the_counters_of_seats_or_keeps_them(keeps: bool) -> None:
    job, seats = elastic(1)
    seats[0] = seats[0].model_copy(update={"counters": JobCounters(attempts=1, failures=1), "epoch": 1})
    job, seats, _ = settle(job, seats)
    job, seats, _ = settle(transitions.cancel(job, None, message="", now=NOW).job, seats)
    again = transitions.retry(job, chosen=None, keep_checkpoint=True, reset_counters=not keeps, now=NOW).job
    job, seats, _ = settle(again, seats)
    assert (job.counters.attempts, job.counters.failures, seats[0].counters.failures) == (1, int(keeps), int(keeps))
