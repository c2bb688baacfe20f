"""The transaction that a decision returns: a store applies all of its writes or none.

A write names a key, what to store there, and the condition under which it may be stored. The class of a record gives
all three (`TableRecord`), the class of a lease write gives values and guard: stores need no edit for a new class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from baton.contract.jobs.history import EventType
from functions.domain.jobs.lease_fence import Fence
from functions.domain.record_base import Attribute, TableRecord
from functions.domain.records import Attempt, CheckpointRecord, Event, Job, Lease, RuleStateRecord
from functions.domain.table_keys import Key

R = TypeVar("R", bound=TableRecord)


@dataclass(frozen=True, kw_only=True)
class Put:
    """Store a record in place of the version before; a record without VERSION in place of any."""

    owner: str
    """What the record's partition is named after: the job's id for nearly all kinds."""
    record: TableRecord
    beside: Mapping[str, Attribute] = field(default_factory=dict)
    """Attributes that the record does not know itself."""

    @property
    def key(self) -> Key:
        """Where the record is stored."""
        name = self.record.NUMBER
        return self.record.key(self.owner, getattr(self.record, name) if name else 0)

    @property
    def attributes(self) -> dict[str, Attribute]:
        """Everything that is stored beside the document."""
        name = self.record.VERSION
        version = {name: getattr(self.record, name)} if name else {}
        return {**self.record.attributes(), **version, **self.beside}

    @property
    def seen(self) -> Mapping[str, Attribute] | None:
        """Attributes that the stored record must have; empty if there must be none; None for no condition."""
        name = self.record.VERSION
        if name is None:
            return None
        before = getattr(self.record, name) - 1
        return {name: before} if before else {}


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Delete a record. With `seen` only if it still has these attributes and `protected_until` is not after `now`.

    A record that is gone already is no conflict.
    """

    key: Key
    seen: Mapping[str, Attribute] | None = None
    now: int = 0


def delete_checkpoint(job_id: str, record: CheckpointRecord, now: int) -> Delete:
    """Return the deletion of a checkpoint's record: of this very one, and only if nobody reads it at `now`."""
    return Delete(key=record.key(job_id, record.step), seen=record.identity(), now=now)


@dataclass(frozen=True, kw_only=True)
class LeaseGuard:
    """Condition on a lease for a write. The stores express `admits` as a DynamoDB condition."""

    fence: Fence | None = None
    recovers: bool = False
    """The bearer of the fence takes a revoked lease back, instead of proving a live one."""
    epoch: int | None = None
    live: bool = False
    expired_at: int | None = None
    """The lease must have run out by then."""
    or_absent: bool = False

    def admits(self, lease: Lease | None) -> bool:
        """Return True if the write may be done to `lease`."""
        if lease is None:
            return self.or_absent
        fence = self.fence
        return (
            (self.epoch is None or lease.epoch == self.epoch)
            and (fence is None or (fence.recovers(lease) if self.recovers else fence.admits(lease)))
            and not (self.live and lease.closed)
            and (self.expired_at is None or lease.expires_at <= self.expired_at)
        )


@dataclass(frozen=True, kw_only=True)
class OpenLease:
    """Put a new lease row in place of an earlier attempt's."""

    lease: Lease


@dataclass(frozen=True, kw_only=True)
class UpdateLease(ABC):
    """Base of the writes that set some values of a lease, if its guard admits that."""

    job_id: str
    epoch: int

    @property
    def guard(self) -> LeaseGuard:
        """The lease of attempt `epoch`, which must be live."""
        return LeaseGuard(epoch=self.epoch, live=True)

    @property
    @abstractmethod
    def values(self) -> Mapping[str, Attribute]:
        """Return the new values of lease fields, by field."""


@dataclass(frozen=True, kw_only=True)
class DirectLease(UpdateLease):
    """Leave a directive for attempt `epoch`: its next heartbeat reads it."""

    directive: str
    reason: str
    commands_seq: int | None = None
    """Seq of the newest command, if there is a new one too."""

    @property
    def values(self) -> Mapping[str, Attribute]:
        newer = {} if self.commands_seq is None else {"commands_seq": self.commands_seq}
        return {"directive": str(self.directive), "directive_reason": self.reason, **newer}


@dataclass(frozen=True, kw_only=True)
class SteerLease(UpdateLease):
    """Name the newest rules and commands to attempt `epoch`: its next heartbeat asks for those that it lacks."""

    rules_revision: int
    commands_seq: int
    watched: bool = False

    @property
    def values(self) -> Mapping[str, Attribute]:
        return {"rules_revision": self.rules_revision, "commands_seq": self.commands_seq, "watched": self.watched}


@dataclass(frozen=True, kw_only=True)
class CloseLease(UpdateLease):
    """End the lease of attempt `epoch` at `now`.

    With `fence` the worker ends the lease and must prove it. With `expired_at` the sweeper does, and the lease must
    have run out by then. With neither a user's command does, whatever the worker is doing and even if the row is lost.
    """

    tenant: str
    now: int
    closed: str
    fence: Fence | None = None
    expired_at: int | None = None

    @property
    def guard(self) -> LeaseGuard:
        return LeaseGuard(
            fence=self.fence,
            epoch=self.epoch,
            live=self.expired_at is not None,
            expired_at=self.expired_at,
            or_absent=self.fence is None and self.expired_at is None,
        )

    @property
    def values(self) -> Mapping[str, Attribute]:
        return {"closed": self.closed}


@dataclass(frozen=True, kw_only=True)
class FencedUpdate(ABC):
    """Base of the writes that set some values of the lease that `fence` proves."""

    fence: Fence

    @property
    def job_id(self) -> str:
        """The job whose lease is written."""
        return self.fence.job_id

    @property
    def guard(self) -> LeaseGuard:
        """The fence must admit its bearer."""
        return LeaseGuard(fence=self.fence)

    @property
    @abstractmethod
    def values(self) -> Mapping[str, Attribute]:
        """Return the new values of lease fields, by field."""


@dataclass(frozen=True, kw_only=True)
class CheckLease(FencedUpdate):
    """Refuse the whole transaction unless the lease satisfies the fence; write nothing but `progress_by`."""

    progress_by: int | None = None
    """When an original client must show progress next; None leaves the lease as it is."""

    @property
    def values(self) -> Mapping[str, Attribute]:
        return {} if self.progress_by is None else {"progress_by": self.progress_by}


@dataclass(frozen=True, kw_only=True)
class NoteLease(FencedUpdate):
    """Note which revisions of the rules the worker has reported in force, and rejected."""

    rules_in_force: int
    rules_rejected: int

    @property
    def values(self) -> Mapping[str, Attribute]:
        return {"rules_in_force": self.rules_in_force, "rules_rejected": self.rules_rejected}


@dataclass(frozen=True, kw_only=True)
class ReopenLease(FencedUpdate):
    """Give a revoked lease back to the bearer of `fence`, for `duration_s` from `fence.now` on.

    Refused unless the sweeper has revoked this very lease, not longer than the reproof window after its end, and no
    later attempt holds the row. The lease names the newest rules and commands: a user may have changed both meanwhile.
    """

    duration_s: int
    rules_revision: int
    commands_seq: int
    watched: bool

    @property
    def guard(self) -> LeaseGuard:
        return LeaseGuard(fence=self.fence, recovers=True)

    @property
    def values(self) -> Mapping[str, Attribute]:
        return {
            "closed": "",
            "expires_at": self.fence.now + self.duration_s,
            "rules_revision": self.rules_revision,
            "commands_seq": self.commands_seq,
            "watched": self.watched,
        }


LeaseWrite = OpenLease | UpdateLease | FencedUpdate
Write = Put | Delete | LeaseWrite


@dataclass(frozen=True)
class Transaction:
    """The writes of one decision. The first one is the job's, which must not have changed since the job was read.

    What a worker reports of its rules is written without the job.
    """

    writes: tuple[Write, ...]

    @property
    def job(self) -> Job:
        """The job as the transaction leaves it."""
        return self.records(Job)[0]

    @property
    def events(self) -> tuple[Event, ...]:
        """The new lines of history, in order."""
        return tuple(sorted(self.records(Event), key=lambda event: event.seq))

    @property
    def deletes(self) -> tuple[Delete, ...]:
        """The records that are deleted."""
        return tuple(one for one in self.writes if isinstance(one, Delete))

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that is written, if one is."""
        return next(iter(self.records(Attempt)), None)

    @property
    def lease(self) -> LeaseWrite | None:
        """The write of the lease, if there is one."""
        return next((one for one in self.writes if not isinstance(one, Put | Delete)), None)

    def records(self, kind: type[R]) -> tuple[R, ...]:
        """Return the records of one kind that are stored."""
        return tuple(one.record for one in self.writes if isinstance(one, Put) and isinstance(one.record, kind))

    def also(self, *writes: Write) -> Transaction:
        """Return the transaction with more writes."""
        return Transaction((*self.writes, *writes))

    def put(self, *records: TableRecord) -> Transaction:
        """Return the transaction with more records of the job."""
        job = self.job
        # Readers of the table's stream find tenant and webhook in each event.
        webhook = {"webhook": job.spec.webhook} if job.spec.webhook else {}
        return self.also(
            *(
                Put(
                    owner=job.id, record=one, beside={"tenant": job.tenant, **webhook} if isinstance(one, Event) else {}
                )
                for one in records
            )
        )

    def with_job(self, **updates: Any) -> Transaction:
        """Return the transaction with `updates` of the job."""
        job = self.job.model_copy(update=updates)
        return Transaction((Put(owner=job.id, record=job), *self.writes[1:]))

    def with_event(self, type_: EventType, now: int, **data: Any) -> Transaction:
        """Return the transaction with one more line of history, numbered after the job's last one."""
        event = Event(seq=self.job.event_seq + 1, type=type_, at=now, epoch=self.job.epoch, data=data)
        return self.with_job(event_seq=event.seq).put(event)

    def with_event_data(self, **data: Any) -> Transaction:
        """Return the transaction with more data in its one event."""
        (put,) = (one for one in self.writes if isinstance(one, Put) and isinstance(one.record, Event))
        (event,) = self.events
        return self.replacing(put, replace(put, record=event.model_copy(update={"data": {**event.data, **data}})))

    def replacing(self, old: Write, new: Write) -> Transaction:
        """Return the transaction with one write in place of another."""
        return replace(self, writes=tuple(new if one is old else one for one in self.writes))


def evaluate_soon(rule_state: RuleStateRecord | None, now: int) -> RuleStateRecord:
    """Return the rule state that makes the sweeper evaluate the rules in its next turn. `rule_state`: None for none."""
    if rule_state is None:
        return RuleStateRecord(version=1, next_at=now)
    return rule_state.model_copy(update={"version": rule_state.version + 1, "next_at": now})


def write_job(job: Job) -> Transaction:
    """Return the write of a job whose `rev` is one more than that of the job that was read."""
    return Transaction((Put(owner=job.id, record=job),))


def update_job(job: Job, now: int, **updates: Any) -> Transaction:
    """Return the write of `job` with `updates` and the next `rev`."""
    after = job.model_copy(update={**updates, "rev": job.rev + 1, "updated_at": now})
    if after.watched and after.claimable and not job.claimable:
        after = after.model_copy(update={"waiting_since": now})
    return write_job(after)
