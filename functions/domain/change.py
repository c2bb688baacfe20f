"""What one decision writes: applied all or nothing, only if nobody wrote in between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton.contract.history import EventType
from functions.domain.leases import Fence
from functions.domain.records import (
    Attempt,
    CheckpointRecord,
    CommandRecord,
    ControlRecord,
    Event,
    Job,
    Lease,
    RulesRecord,
    StandingRecord,
)
from functions.domain.scale_records import ScalingRecord


@dataclass(frozen=True, kw_only=True)
class OpenLease:
    """Put a new lease row in place of the last attempt's."""

    lease: Lease


@dataclass(frozen=True, kw_only=True)
class CloseLease:
    """End the lease of attempt `epoch`.

    With `fence` the worker does it and must prove its lease. With `expired_at` the sweeper does it, and the lease
    must have run out by then. With neither a user's command does it, whatever the worker is doing.
    """

    job_id: str
    epoch: int
    closed: str
    fence: Fence | None = None
    expired_at: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReopenLease:
    """Give a revoked lease back to the bearer of `fence`, for `duration_s` from `fence.now` on.

    Refused unless the sweeper has revoked this very lease, not longer than the reproof window after its end, and no
    later attempt holds the row. The lease names the newest rules and commands: a user may have changed both meanwhile.
    """

    fence: Fence
    duration_s: int
    rules_revision: int
    commands_seq: int
    watched: bool


@dataclass(frozen=True, kw_only=True)
class CheckLease:
    """Refuse the whole change unless the lease satisfies the fence; change nothing in it but `progress_by`."""

    fence: Fence
    progress_by: int | None = None
    """Of an original client that has shown progress; None to leave the lease as it is."""


@dataclass(frozen=True, kw_only=True)
class DirectLease:
    """Leave a directive for attempt `epoch`, to be read by its next heartbeat."""

    job_id: str
    epoch: int
    directive: str
    reason: str
    commands_seq: int | None = None
    """Of the newest command, where there is a new one too."""


@dataclass(frozen=True, kw_only=True)
class SteerLease:
    """Say to attempt `epoch` what the newest rules and commands are: its next heartbeat asks for what it lacks."""

    job_id: str
    epoch: int
    rules_revision: int
    commands_seq: int
    watched: bool = False


@dataclass(frozen=True, kw_only=True)
class NoteLease:
    """Note which revisions of the rules the worker has said to be in force, and rejected; under the fence."""

    fence: Fence
    rules_in_force: int
    rules_rejected: int


LeaseWrite = OpenLease | CloseLease | ReopenLease | CheckLease | DirectLease | SteerLease | NoteLease


@dataclass(frozen=True, kw_only=True)
class Forget:
    """Delete a checkpoint's record. Refused if it is another one by now, or is being read at `now`."""

    record: CheckpointRecord
    now: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """The outcome of a decision. `seen_rev` is the `rev` the decision was based on; None creates the job."""

    seen_rev: int | None
    job: Job
    events: tuple[Event, ...] = ()
    attempt: Attempt | None = None
    checkpoint: CheckpointRecord | None = None
    forgotten: tuple[Forget, ...] = ()
    rules: RulesRecord | None = None
    """A new revision; none is ever written twice."""
    commands: tuple[CommandRecord, ...] = ()
    dropped_commands: tuple[int, ...] = ()
    """By seq."""
    control: ControlRecord | None = None
    standing: StandingRecord | None = None
    """Only if the stored one has the version before."""
    scalings: tuple[ScalingRecord, ...] = ()
    """Of different groups; the same of each."""
    lease: LeaseWrite | None = None

    def with_event(self, type_: EventType, now: int, **data: Any) -> Change:
        """The same change with one more line of history, numbered after the job's last one."""
        seq = self.job.event_seq + 1
        event = Event(seq=seq, type=type_, at=now, epoch=self.job.epoch, data=data)
        job = self.job.model_copy(update={"event_seq": seq})
        return replace(self, job=job, events=(*self.events, event))


def looked_at_soon(standing: StandingRecord | None, now: int) -> StandingRecord:
    """What is to be written, so that the sweeper looks at the rules in its next turn. None: it never has."""
    if standing is None:
        return StandingRecord(version=1, next_at=now)
    return standing.model_copy(update={"version": standing.version + 1, "next_at": now})


def changed(job: Job, now: int, **updates: Any) -> Change:
    """A change of `job` by `updates`, with the next `rev`."""
    after = job.model_copy(update={**updates, "rev": job.rev + 1, "updated_at": now})
    if after.watched and after.claimable and not job.claimable:
        after = after.model_copy(update={"waiting_since": now})
    return Change(seen_rev=job.rev, job=after)
