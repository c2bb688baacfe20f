"""Transaction of a decision: a store applies all of its writes or none.

A write consists of a key, the new values, and a condition on the stored values. The class of a record defines all three
(`TableRecord`), the class of a lease write defines values and guard. Therefore stores need no edit for a new class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from baton.contract.jobs.history import EventType
from functions.domain import table_keys
from functions.domain.jobs.lease_fence import Fence
from functions.domain.record_base import Attribute, Record, TableRecord
from functions.domain.records import Attempt, CheckpointRecord, Event, Job, Lease, RuleStateRecord
from functions.domain.table_keys import Key

R = TypeVar("R", bound=TableRecord)


@dataclass(frozen=True, kw_only=True)
class Put:
    """Write of a record that replaces the version before; a record without VERSION replaces any version."""

    owner: str
    """Name of the record's partition: the job's id for nearly all kinds."""
    record: TableRecord
    beside: Mapping[str, Attribute] = field(default_factory=dict)
    """Attributes in addition to the record's own."""

    @property
    def key(self) -> Key:
        """Key of the record."""
        name = self.record.NUMBER
        return self.record.key(self.owner, getattr(self.record, name) if name else 0)

    @property
    def attributes(self) -> dict[str, Attribute]:
        """All attributes beside the document."""
        name = self.record.VERSION
        version = {name: getattr(self.record, name)} if name else {}
        return {**self.record.attributes(), **version, **self.beside}

    @property
    def seen(self) -> Mapping[str, Attribute] | None:
        """Attributes that the stored record must have; empty: no record may be stored; None: no condition."""
        name = self.record.VERSION
        if name is None:
            return None
        before = getattr(self.record, name) - 1
        return {name: before} if before else {}


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Deletion of a record; the deletion of a missing record is no conflict.

    `seen`: attributes that the stored record must have. With `seen`, its `protected_until` must not be after `now`.
    """

    key: Key
    seen: Mapping[str, Attribute] | None = None
    now: int = 0


@dataclass(frozen=True, kw_only=True)
class PutFleet:
    """Write of the fleet that rents the machines of a job, in place of its version before.

    A later version may also replace no version, because a fleet leaves its place when its job has ended.
    """

    tenant: str
    name: str
    version: int
    record: Record

    @property
    def key(self) -> Key:
        """Key of the fleet."""
        return Key(table_keys.FLEETS, table_keys.fleet_sk(self.tenant, self.name))


def delete_checkpoint(job_id: str, record: CheckpointRecord, now: int) -> Delete:
    """Return the deletion of a checkpoint, refused if a newer commit replaced the record or URLs may still read it."""
    return Delete(key=record.key(job_id, record.step), seen=record.identity(), now=now)


@dataclass(frozen=True, kw_only=True)
class LeaseGuard:
    """Condition of a write on the stored lease. The stores express `admits` as a DynamoDB condition."""

    fence: Fence | None = None
    recovers: bool = False
    """True: the bearer of the fence takes back a revoked lease. False: the bearer proves a live lease."""
    epoch: int | None = None
    live: bool = False
    expired_at: int | None = None
    """Instant by which the lease must have expired."""
    or_absent: bool = False

    def admits(self, lease: Lease | None) -> bool:
        """Return True if `lease` satisfies the condition."""
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
    """Write of a new lease, which replaces the lease of an earlier attempt."""

    lease: Lease


@dataclass(frozen=True, kw_only=True)
class UpdateLease(ABC):
    """Base of the writes that set fields of a lease if `guard` admits the lease."""

    job_id: str
    epoch: int

    @property
    def guard(self) -> LeaseGuard:
        """Condition: the lease is live and belongs to attempt `epoch`."""
        return LeaseGuard(epoch=self.epoch, live=True)

    @property
    @abstractmethod
    def values(self) -> Mapping[str, Attribute]:
        """Return the new values of lease fields, by field."""


@dataclass(frozen=True, kw_only=True)
class DirectLease(UpdateLease):
    """Write of a directive for attempt `epoch`, which its next heartbeat returns."""

    directive: str
    reason: str
    commands_seq: int | None = None
    """Seq of a new command; None for a directive without a command."""

    @property
    def values(self) -> Mapping[str, Attribute]:
        newer = {} if self.commands_seq is None else {"commands_seq": self.commands_seq}
        return {"directive": str(self.directive), "directive_reason": self.reason, **newer}


@dataclass(frozen=True, kw_only=True)
class SteerLease(UpdateLease):
    """Write of the newest rules revision and command seq, so that attempt `epoch` requests rules and commands."""

    rules_revision: int
    commands_seq: int
    watched: bool = False

    @property
    def values(self) -> Mapping[str, Attribute]:
        return {"rules_revision": self.rules_revision, "commands_seq": self.commands_seq, "watched": self.watched}


@dataclass(frozen=True, kw_only=True)
class CloseLease(UpdateLease):
    """End of the lease of attempt `epoch` at `now`.

    With `fence` a worker ends the lease, which the fence must admit. With `expired_at` the sweeper revokes a lease that
    has expired by this instant. Without both the control plane ends the lease, live or not, even if its row is missing.
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
    """Base of the writes that set fields of a lease if `fence` admits the lease."""

    fence: Fence

    @property
    def job_id(self) -> str:
        """Job of the lease."""
        return self.fence.job_id

    @property
    def guard(self) -> LeaseGuard:
        """Condition: the fence admits the lease."""
        return LeaseGuard(fence=self.fence)

    @property
    @abstractmethod
    def values(self) -> Mapping[str, Attribute]:
        """Return the new values of lease fields, by field."""


@dataclass(frozen=True, kw_only=True)
class CheckLease(FencedUpdate):
    """Condition on a transaction: the fence admits the lease. Sets no field but `progress_by`."""

    progress_by: int | None = None
    """Instant by which an original client must show progress; None leaves the stored instant."""

    @property
    def values(self) -> Mapping[str, Attribute]:
        return {} if self.progress_by is None else {"progress_by": self.progress_by}


@dataclass(frozen=True, kw_only=True)
class NoteLease(FencedUpdate):
    """Write of the rules revisions that the worker has reported in force and rejected."""

    rules_in_force: int
    rules_rejected: int

    @property
    def values(self) -> Mapping[str, Attribute]:
        return {"rules_in_force": self.rules_in_force, "rules_rejected": self.rules_rejected}


@dataclass(frozen=True, kw_only=True)
class ReopenLease(FencedUpdate):
    """Return of a revoked lease to the bearer of `fence`, for `duration_s` from `fence.now`.

    The guard requires that the sweeper revoked the lease of this attempt, that no later attempt replaced the lease, and
    that the lease ended within the reproof window. The write repeats the newest rules revision and command seq, because
    a user may have changed both since the revocation.
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
Write = Put | Delete | PutFleet | LeaseWrite


@dataclass(frozen=True)
class Transaction:
    """Writes of one decision. The first write is the job's; its condition is the `rev` that the decision read.

    A transaction that only stores a worker's report about its rules contains no job.
    """

    writes: tuple[Write, ...]

    @property
    def job(self) -> Job:
        """Job after the transaction."""
        return self.records(Job)[0]

    @property
    def events(self) -> tuple[Event, ...]:
        """New events of the job, by seq."""
        return tuple(sorted(self.records(Event), key=lambda event: event.seq))

    @property
    def deletes(self) -> tuple[Delete, ...]:
        """Deletions of records."""
        return tuple(one for one in self.writes if isinstance(one, Delete))

    @property
    def attempt(self) -> Attempt | None:
        """Attempt after the transaction; None if the transaction writes no attempt."""
        return next(iter(self.records(Attempt)), None)

    @property
    def lease(self) -> LeaseWrite | None:
        """Write of the lease; None for a transaction without a lease."""
        return next((one for one in self.writes if not isinstance(one, Put | Delete | PutFleet)), None)

    def records(self, kind: type[R]) -> tuple[R, ...]:
        """Return the records of one kind that the transaction stores."""
        return tuple(one.record for one in self.writes if isinstance(one, Put) and isinstance(one.record, kind))

    def also(self, *writes: Write) -> Transaction:
        """Return the transaction with more writes."""
        return Transaction((*self.writes, *writes))

    def put(self, *records: TableRecord) -> Transaction:
        """Return the transaction with more records of the job."""
        job = self.job
        # The DynamoDB stream consumer sees events without their job, therefore each event names tenant and webhook.
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
        """Return the transaction with one more event, numbered after the job's last event.

        A seat has no history: the history of its elastic job shows its attempts (`worlds.seats`).
        """
        if self.job.spec.seat is not None:
            return self
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
    """Return the write of a job, whose `rev` must be the `rev` that was read plus 1."""
    return Transaction((Put(owner=job.id, record=job),))


def update_job(job: Job, now: int, **updates: Any) -> Transaction:
    """Return the write of `job` with `updates` and the next `rev`."""
    after = job.model_copy(update={**updates, "rev": job.rev + 1, "updated_at": now})
    if after.watched and after.claimable and not job.claimable:
        after = after.model_copy(update={"waiting_since": now})
    return write_job(after)
