"""Create the seats of an elastic job, and reconcile the job with its seats.

`reconcile` takes the elastic job and its seats as they were read, and returns the writes that bring both together. The
job follows its seats: state, counters, cost, progress, history; the first complete seat completes the job, a failed
seat fails the job. The seats follow the job: the job's state and generation cancel, pause, resume and retry the seats.
Each write is one transaction, and no write is left once both agree. Therefore a caller may die between any two writes,
and the next caller finishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import AttemptEnd, JobCounters, JobState, Reason, ReasonCode
from functions.domain.errors import Refusal
from functions.domain.jobs import transitions
from functions.domain.jobs.attempt_end import cause_data, late_retention_at, newest_progress
from functions.domain.jobs.retry import cap_reached
from functions.domain.jobs.transaction import Put, Transaction, update_job
from functions.domain.records import Attempt, Event, Job
from functions.domain.seat_records import Seat, SeatMark
from functions.domain.worlds.seat_ids import seat_id

MAX_EVENTS = 40
"""Events of one write, about: DynamoDB allows 100 items in a transaction. A later write records the other events."""
MAX_EVENTS_OF_SEAT = 10
"""Attempts of one seat that one write records; the history omits older attempts."""
MAX_RETRIED = 30
"""Seats that one write retries."""
MAX_SEATS_BYTES = 3_500_000
"""Size of the seats of one job, which one transaction creates; DynamoDB allows 4 MB."""

Seats = Mapping[int, Job]
"""Existing seats of an elastic job, by seat."""
Attempts = Mapping[tuple[int, int], Attempt]
"""Attempts by seat and epoch."""

_ENDS = {
    AttemptEnd.FAILED: EventType.ATTEMPT_FAILED,
    AttemptEnd.INTERRUPTED: EventType.ATTEMPT_INTERRUPTED,
    AttemptEnd.RELEASED: EventType.ATTEMPT_RELEASED,
}


class _NewEvent(NamedTuple):
    type: EventType
    epoch: int
    data: dict[str, Any]


def list_needed_attempts(job: Job, seats: Seats) -> list[tuple[int, int]]:
    """Return seat and epoch of the attempts that `reconcile` needs: attempts to record, and attempts to cancel."""
    needed = []
    for place, seat in seats.items():
        mark = job.seats[place]
        if not _is_recorded(mark, seat):
            first = max(mark.epoch, seat.epoch - MAX_EVENTS_OF_SEAT, 1)
            needed += [(place, epoch) for epoch in range(first, seat.epoch + 1)]
        elif seat.state is JobState.RUNNING and _must_end(job, seat):
            needed.append((place, seat.epoch))
    return needed


def with_seats(change: Transaction) -> Transaction:
    """Return the transaction that submits an elastic job with the writes of its seats."""
    job = change.job
    nodes = job.spec.nodes
    assert nodes is not None
    size_bytes = nodes.max * len(job.spec.model_dump_json().encode())
    if size_bytes > MAX_SEATS_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The seats of {nodes.max} nodes take {size_bytes} bytes to store; at most {MAX_SEATS_BYTES} are allowed.",
            field="nodes",
        )
    seats = [
        Put(
            owner=seat_id(job.id, place),
            record=Job(
                id=seat_id(job.id, place),
                tenant=job.tenant,
                queue=job.queue,
                shard=job.shard,
                priority=job.priority,
                spec=job.spec.model_copy(
                    update={"nodes": None, "seat": Seat(job=job.id, seat=place, min=nodes.min, max=nodes.max)}
                ),
                created_at=job.created_at,
                updated_at=job.updated_at,
                rev=1,
            ),
        )
        for place in range(nodes.max)
    ]
    return change.with_job(seats=[SeatMark()] * nodes.max).also(*seats)


def reconcile(job: Job, seats: Seats, attempts: Attempts, *, now: int) -> list[Transaction]:
    """Return the next writes of an elastic job and its seats; empty if nothing is left to do."""
    own = _follow_seats(job, seats, attempts, now)
    after = job if own is None else own.job
    found = [_follow_job(after, place, seat, attempts, now) for place, seat in sorted(seats.items())]
    writes = [one for one in (own, *found) if one is not None]
    return writes or _retry_seats(job, seats, now)


def _retry_seats(job: Job, seats: Seats, now: int) -> list[Transaction]:
    """Return the write that retries ended seats after a retry of the job.

    The write contains the job, whose `rev` is the condition: a decision from a stale read would make a seat of an ended
    and settled job claimable.
    """
    if job.state.terminal:
        return []
    behind = [seat for _, seat in sorted(seats.items()) if seat.generation < job.generation][:MAX_RETRIED]
    if not behind:
        return []
    change = update_job(job, now)
    for seat in behind:
        again = transitions.retry(
            seat, chosen=None, keep_checkpoint=True, reset_counters=not job.keeps_counters, now=now
        )
        change = change.also(*again.with_job(generation=job.generation).writes)
    return [change]


def _is_recorded(mark: SeatMark, seat: Job) -> bool:
    return (mark.epoch, mark.running) == (seat.epoch, seat.state is JobState.RUNNING)


def tell_of_node(job: Job, place: int, events: Sequence[Event], *, now: int) -> Transaction:
    """Return the write that adds events of the present attempt at a seat to the history of the elastic job."""
    epoch = job.seats[place].world_epoch
    return _add_events(
        update_job(job, now), [_NewEvent(one.type, epoch, {**one.data, "seat": place}) for one in events], now
    )


def _add_events(change: Transaction, events: Sequence[_NewEvent], now: int) -> Transaction:
    for type_, epoch, data in events:
        seq = change.job.event_seq + 1
        change = change.with_job(event_seq=seq).put(Event(seq=seq, type=type_, at=now, epoch=epoch, data=data))
    return change


def _must_end(job: Job, seat: Job) -> bool:
    """Return True if the seat must not go on: the job has ended, or a retry of the job begins with new attempts."""
    return not seat.state.terminal and (job.state.terminal or seat.generation < job.generation)


def _follow_job(job: Job, place: int, seat: Job, attempts: Attempts, now: int) -> Transaction | None:
    """Return the write that ends, pauses or resumes a seat as its job requires; None for no change."""
    if _must_end(job, seat):
        attempt = attempts.get((place, seat.epoch))
        if seat.state is JobState.RUNNING and attempt is None:
            return None  # The caller reads the attempt next, because the job's state has just changed.
        message = f"job {job.id} {'has ended' if job.state.terminal else 'was retried'}"
        return transitions.cancel(seat, attempt, message=message, now=now, code=ReasonCode.WORLD_ENDED)
    pauses = job.pause_requested or job.state is JobState.PAUSED
    paused = seat.pause_requested or seat.state is JobState.PAUSED
    if seat.state.terminal or pauses == paused:
        return None
    return transitions.pause(seat, message="", now=now) if pauses else transitions.resume(seat, now=now)


def _follow_seats(job: Job, seats: Seats, attempts: Attempts, now: int) -> Transaction | None:
    """Return the write that updates the job from its seats; None for no change."""
    updates, events = _record_attempts(job, seats, attempts)
    updates |= _sum_up(job, seats)
    if job.state.terminal:
        events = []
        updates["settled"] = all(seat.state.terminal for seat in seats.values())
    else:
        change, event = _next_state(job.model_copy(update=updates), seats, now)
        updates |= change
        events += [] if event is None else [event]
    if all(getattr(job, name) == value for name, value in updates.items()):
        return None
    return _add_events(update_job(job, now, **updates), events, now)


def _record_attempts(job: Job, seats: Seats, attempts: Attempts) -> tuple[dict[str, Any], list[_NewEvent]]:
    """Return the updates and events of attempts that began, ended or were recovered since the last write of the job."""
    marks = [*job.seats]
    epoch, fruitless = job.epoch, job.fruitless_interruptions
    failures, faults = job.fruitless_failures, job.fruitless_node_faults
    events: list[_NewEvent] = []
    for place, seat in sorted(seats.items()):
        mark, runs = marks[place], seat.state is JobState.RUNNING
        if _is_recorded(mark, seat) or len(events) >= MAX_EVENTS:
            continue
        if seat.epoch == mark.epoch and runs:
            fruitless = max(fruitless - 1, 0)
            events.append(_NewEvent(EventType.ATTEMPT_RECOVERED, mark.world_epoch, {"seat": place}))
        for number in range(mark.epoch if mark.running else mark.epoch + 1, seat.epoch + 1):
            attempt = attempts.get((place, number))
            if attempt is None:
                continue
            world_epoch = mark.world_epoch if number == mark.epoch else epoch + number - mark.epoch
            place_data: dict[str, Any] = {"seat": place, "attempt": number, "machine_id": attempt.machine_id}
            if number > mark.epoch:
                data = {**place_data, "resumed_step": job.checkpoint_step}
                events.append(_NewEvent(EventType.STARTED, world_epoch, data))
            if attempt.end in _ENDS and (number < seat.epoch or not runs):
                fruitless += attempt.end is AttemptEnd.INTERRUPTED
                if attempt.end is AttemptEnd.FAILED:
                    is_fault = attempt.failure_class is not None and attempt.failure_class.node_fault
                    failures, faults = failures + (not is_fault), faults + is_fault
                data = {**place_data, "reason": attempt.reason.model_dump() if attempt.reason else None}
                events.append(_NewEvent(_ENDS[attempt.end], world_epoch, data))
        epoch += seat.epoch - mark.epoch
        newest = mark.world_epoch if seat.epoch == mark.epoch else epoch
        marks[place] = SeatMark(epoch=seat.epoch, running=runs, world_epoch=newest)
    counts = {
        "fruitless_interruptions": fruitless,
        "fruitless_failures": failures,
        "fruitless_node_faults": faults,
    }
    return {"seats": marks, "epoch": epoch, **counts}, events


def _sum_up(job: Job, seats: Seats) -> dict[str, Any]:
    """Return counters, cost, progress and start of the job. A seat that has not followed a retry counts as reset."""
    counting = [seat for seat in seats.values() if seat.generation == job.generation or job.keeps_counters]
    counters = {name: sum(getattr(seat.counters, name) for seat in counting) for name in JobCounters.model_fields}
    counters["attempts"] = sum(seat.counters.attempts for seat in seats.values())
    started = [seat.started_at for seat in seats.values() if seat.started_at is not None]
    progress = job.progress
    for seat in seats.values():
        progress = newest_progress(progress, seat.progress)
    return {
        "counters": JobCounters(**counters),
        "cost_usd": sum((seat.cost_usd for seat in counting), 0.0),
        "priced_s": sum(seat.priced_s for seat in counting),
        "progress": progress,
        "started_at": job.started_at if job.started_at is not None else min(started, default=None),
    }


def _next_state(job: Job, seats: Seats, now: int) -> tuple[dict[str, Any], _NewEvent | None]:
    """Return the updates of the state of a job that has not ended, and the event of a transition."""
    present = [(place, seat) for place, seat in sorted(seats.items()) if seat.generation == job.generation]
    complete = [(seat.completed_at or 0, place) for place, seat in present if seat.state is JobState.COMPLETE]
    if complete:
        place = min(complete)[1]
        seat = seats[place]
        updates: dict[str, Any] = {
            "state": JobState.COMPLETE,
            "completed_at": now,
            "artifacts": seat.artifacts,
            "ended_by": seat.ended_by,
            "reason": None,
        }
        data: dict[str, Any] = {
            "artifacts": [one.path for one in seat.artifacts],
            "seat": place,
            **cause_data(seat.ended_by),
        }
        return _ended(job, updates, now), _NewEvent(EventType.COMPLETED, job.epoch, data)
    reason, failed_seat = _find_failure(job, present, now)
    if reason is not None:
        ended_by = None if failed_seat is None else seats[failed_seat].ended_by
        updates = {"state": JobState.FAILED, "failed_at": now, "reason": reason, "ended_by": ended_by}
        place_data = {"seat": failed_seat} if failed_seat is not None else {}
        data = {**reason.model_dump(), **place_data, **cause_data(ended_by)}
        return _ended(job, updates, now), _NewEvent(EventType.FAILED, job.epoch, data)
    runs = any(seat.state is JobState.RUNNING for _, seat in present)
    if job.pause_requested and not runs:
        paused = {"state": JobState.PAUSED, "pause_requested": False}
        return paused, _NewEvent(EventType.PAUSED, job.epoch, {})
    if job.state is JobState.PAUSED and runs:
        # A worker claimed the seat before the pause reached the seat.
        return {"state": JobState.RUNNING, "pause_requested": True}, None
    if job.state is JobState.PAUSED or job.pause_requested:
        return {}, None
    if runs:
        return {"state": JobState.RUNNING, "reason": None}, None
    last = max(present, key=lambda one: one[1].updated_at, default=None)
    return {"state": JobState.PENDING, "reason": None if last is None else last[1].reason}, None


def _ended(job: Job, updates: dict[str, Any], now: int) -> dict[str, Any]:
    return {**updates, "pause_requested": False, "retention_at": late_retention_at(job, now)}


def _find_failure(job: Job, present: list[tuple[int, Job]], now: int) -> tuple[Reason | None, int | None]:
    """Return the reason to fail the job, and the seat that failed; None to go on."""
    policy = job.spec.policy
    for place, seat in present:
        if seat.state is JobState.FAILED:
            found = seat.reason or Reason(code=ReasonCode.FAILURE_CAP)
            return Reason(code=found.code, message=f"node {place}: {found.message}"), place
    exhausted = cap_reached(job)
    if exhausted is not None:
        return exhausted, None
    if policy.deadline_at is not None and policy.deadline_at <= now:
        return Reason(code=ReasonCode.DEADLINE, message=f"the deadline {policy.deadline_at} has passed"), None
    return None, None
