"""The stores of jobs, leases and tokens in memory, for tests: the behaviour of the real ones, under one lock.

Jobs and their history are kept as the same JSON documents, so that they are not shared with the caller and sizes are
limited alike.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from contract.jobs import JobState, Progress
from contract.work import Directive
from functions.domain.change import Change, CheckLease, CloseLease, DirectLease, LeaseWrite, OpenLease
from functions.domain.errors import FenceBroken, WriteConflict
from functions.domain.leases import REPROOF_WINDOW_S, Fence
from functions.domain.ports import Page
from functions.domain.reclaiming import Watch
from functions.domain.records import ApiKey, Attempt, CheckpointRecord, Event, Job, Lease, Record, TransferGrant
from functions.storage import keys
from functions.storage.documents import dump, load
from functions.storage.memory_objects import MemoryObjectStore
from functions.storage.paging import (
    attempts_list,
    checkpoints_list,
    events_list,
    jobs_list,
    keys_list,
    page,
    ready_list,
)
from functions.storage.sorted_index import SortedIndex

R = TypeVar("R", bound=Record)


class _StoredJob(NamedTuple):
    rev: int
    document: str


class _Numbered:
    """Documents of one kind and job, by number."""

    def __init__(self) -> None:
        self.documents: dict[int, str] = {}
        self.numbers: list[int] = []

    def put(self, number: int, document: str) -> None:
        if number not in self.documents:
            insort(self.numbers, number)
        self.documents[number] = document

    def remove(self, number: int) -> None:
        del self.documents[number]
        del self.numbers[bisect_left(self.numbers, number)]


class MemoryState:
    """What the twins share: one lock, all items, all indexes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.jobs: dict[str, _StoredJob] = {}
        self.history: dict[tuple[str, str], _Numbered] = {}
        self.leases: dict[str, Lease] = {}
        self.watch: Watch | None = None
        self.ready: SortedIndex[str] = SortedIndex()
        self.by_tenant: SortedIndex[str] = SortedIndex()
        self.by_state: SortedIndex[str] = SortedIndex()
        self.timers: SortedIndex[int] = SortedIndex()
        self.due: SortedIndex[int] = SortedIndex()
        self.keys: dict[str, ApiKey] = {}
        self.keys_by_tenant: SortedIndex[str] = SortedIndex()
        self.grants: dict[str, TransferGrant] = {}

    def numbered(self, job_id: str, kind: str) -> _Numbered:
        """The job's items of one kind."""
        return self.history.setdefault((job_id, kind), _Numbered())


class MemoryJobStore:
    """Twin of DynamoJobStore."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def get(self, job_id: str) -> Job | None:
        with self._state.lock:
            stored = self._state.jobs.get(job_id)
        return load(Job, stored.document) if stored else None

    def get_many(self, job_ids: Sequence[str]) -> list[Job]:
        with self._state.lock:
            found = [self._state.jobs.get(job_id) for job_id in dict.fromkeys(job_ids)]
        return [load(Job, stored.document) for stored in found if stored]

    def apply(self, change: Change) -> None:
        state, job = self._state, change.job
        document = dump(job)
        attempt = dump(change.attempt) if change.attempt else ""
        checkpoint = dump(change.checkpoint) if change.checkpoint else ""
        events = [(event.seq, dump(event)) for event in change.events]
        with state.lock:
            stored = state.jobs.get(job.id)
            if (stored.rev if stored else None) != change.seen_rev:
                raise WriteConflict
            lease = None
            if change.lease is not None:
                lease = _after(change.lease, state.leases.get(_leased_job(change.lease)), change)
            state.jobs[job.id] = _StoredJob(job.rev, document)
            self._index(job)
            for seq, text in events:
                state.numbered(job.id, keys.EVENT).put(seq, text)
            if change.attempt:
                state.numbered(job.id, keys.ATTEMPT).put(change.attempt.epoch, attempt)
            if change.checkpoint:
                state.numbered(job.id, keys.CHECKPOINT).put(change.checkpoint.step, checkpoint)
            if lease is not None:
                state.leases[lease.job_id] = lease
                if isinstance(change.lease, OpenLease):
                    opened_at = lease.expires_at - lease.duration_s
                    due_at = keys.due_bucket(lease.job_id, opened_at) + lease.duration_s
                    state.due.put(lease.job_id, keys.DUE, due_at)
                elif lease.closed:
                    state.due.discard(lease.job_id)

    def _index(self, job: Job) -> None:
        state = self._state
        created = keys.created_sk(job)
        state.by_tenant.put(job.id, job.tenant, created)
        state.by_state.put(job.id, keys.state_pk(job.tenant, job.state), created)
        if job.claimable:
            state.ready.put(job.id, keys.ready_pk(job.tenant, job.queue, job.shard), job.ready_rank)
        else:
            state.ready.discard(job.id)
        if job.timer_at is None:
            state.timers.discard(job.id)
        else:
            state.timers.put(job.id, keys.TIMER, job.timer_at)

    def ready(self, tenant: str, queue: str, shard: int, *, limit: int, cursor: str | None = None) -> Page[Job]:
        ready = ready_list(tenant, queue, shard)
        position = ready.position(cursor)
        with self._state.lock:
            entries = self._state.ready.after(keys.ready_pk(tenant, queue, shard), _pair(position), limit + 1)
            jobs = self.get_many([job_id for _, job_id in entries])
        return page(jobs, limit, ready, lambda job: (job.ready_rank, job.id))

    def list_jobs(self, tenant: str, *, state: JobState | None, limit: int, cursor: str | None = None) -> Page[Job]:
        listed = jobs_list(tenant, state)
        position = listed.position(cursor)
        after = None if position is None else (f"{int(position[0]):011d}#{position[1]}", str(position[1]))
        index, partition = (
            (self._state.by_tenant, tenant) if state is None else (self._state.by_state, keys.state_pk(tenant, state))
        )
        with self._state.lock:
            jobs = self.get_many([job_id for _, job_id in index.after(partition, after, limit + 1)])
        return page(jobs, limit, listed, lambda job: (job.created_at, job.id))

    def due_timers(self, now: int, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.timers.up_to(keys.TIMER, now, limit)]

    def attempt(self, job_id: str, epoch: int) -> Attempt | None:
        return self._one(Attempt, job_id, keys.ATTEMPT, epoch)

    def attempts(self, job_id: str, *, limit: int, cursor: str | None = None) -> Page[Attempt]:
        listed = attempts_list(job_id)
        position = listed.position(cursor)
        found = self._some(Attempt, job_id, keys.ATTEMPT, limit + 1, after=_number(position))
        return page(found, limit, listed, lambda attempt: (attempt.epoch,))

    def events(self, job_id: str, *, limit: int, cursor: str | None = None) -> Page[Event]:
        listed = events_list(job_id)
        position = listed.position(cursor)
        found = self._some(Event, job_id, keys.EVENT, limit + 1, after=_number(position))
        return page(found, limit, listed, lambda event: (event.seq,))

    def checkpoint(self, job_id: str, step: int) -> CheckpointRecord | None:
        return self._one(CheckpointRecord, job_id, keys.CHECKPOINT, step)

    def checkpoints(
        self, job_id: str, *, limit: int, cursor: str | None = None, up_to_step: int | None = None
    ) -> Page[CheckpointRecord]:
        listed = checkpoints_list(job_id, up_to_step)
        position = _number(listed.position(cursor))
        end = keys.MAX_STEP + 1 if up_to_step is None else up_to_step + 1
        with self._state.lock:
            kept = self._state.numbered(job_id, keys.CHECKPOINT)
            last = bisect_left(kept.numbers, end if position is None else position)
            numbers = reversed(kept.numbers[max(last - limit - 1, 0) : last])
            found = [load(CheckpointRecord, kept.documents[number]) for number in numbers]
        return page(found, limit, listed, lambda record: (record.step,))

    def protect_checkpoint(self, job_id: str, step: int, until: int) -> CheckpointRecord | None:
        with self._state.lock:
            record = self.checkpoint(job_id, step)
            if record is None or record.protected_until >= until:
                return record
            record = record.model_copy(update={"protected_until": until})
            self._state.numbered(job_id, keys.CHECKPOINT).put(step, dump(record))
            return record

    def delete_checkpoint(self, job_id: str, record: CheckpointRecord, now: int) -> bool:
        with self._state.lock:
            stored = self.checkpoint(job_id, record.step)
            if stored is None:
                return True
            if stored.protected_until > now or _version(stored) != _version(record):
                return False
            self._state.numbered(job_id, keys.CHECKPOINT).remove(record.step)
            return True

    def _one(self, kind: type[R], job_id: str, prefix: str, number: int) -> R | None:
        with self._state.lock:
            text = self._state.numbered(job_id, prefix).documents.get(number)
        return load(kind, text) if text else None

    def _some(self, kind: type[R], job_id: str, prefix: str, limit: int, *, after: int | None) -> list[R]:
        with self._state.lock:
            kept = self._state.numbered(job_id, prefix)
            first = 0 if after is None else bisect_left(kept.numbers, after + 1)
            texts = [kept.documents[number] for number in kept.numbers[first : first + limit]]
        return [load(kind, text) for text in texts]


class MemoryLeaseStore:
    """Twin of DynamoLeaseStore."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def heartbeat(self, fence: Fence, progress: Progress | None, phase: str | None) -> Lease:
        with self._state.lock:
            lease = self._state.leases.get(fence.job_id)
            if lease is None or not fence.admits(lease, reproof_window_s=REPROOF_WINDOW_S):
                raise FenceBroken(lease)
            updates = {"expires_at": fence.now + lease.duration_s, "progress": progress, "phase": phase}
            lease = lease.model_copy(update={name: value for name, value in updates.items() if value is not None})
            self._state.leases[fence.job_id] = lease
            due_at = keys.due_bucket(fence.job_id, fence.now) + lease.duration_s
            self._state.due.put(fence.job_id, keys.DUE, due_at)
            return lease

    def get(self, job_id: str) -> Lease | None:
        with self._state.lock:
            return self._state.leases.get(job_id)

    def get_many(self, job_ids: Sequence[str]) -> dict[str, Lease]:
        with self._state.lock:
            return {job_id: self._state.leases[job_id] for job_id in job_ids if job_id in self._state.leases}

    def due(self, now: int, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.due.up_to(keys.DUE, now, limit)]

    def watch(self) -> Watch | None:
        with self._state.lock:
            return self._state.watch

    def keep_watch(self, watch: Watch, *, seen: Watch | None) -> bool:
        with self._state.lock:
            if self._state.watch != seen:
                return False
            self._state.watch = watch
            return True


class MemoryTokenStore:
    """Twin of DynamoTokenStore."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def put_key(self, key: ApiKey) -> None:
        with self._state.lock:
            if key.id in self._state.keys:
                raise WriteConflict
            self._put(key)

    def get_key(self, key_id: str) -> ApiKey | None:
        with self._state.lock:
            return self._state.keys.get(key_id)

    def list_keys(self, tenant: str, *, limit: int, cursor: str | None = None) -> Page[ApiKey]:
        listed = keys_list(tenant)
        position = listed.position(cursor)
        after = None if position is None else (f"{int(position[0]):011d}#{position[1]}", str(position[1]))
        with self._state.lock:
            entries = self._state.keys_by_tenant.after(tenant, after, limit + 1)
            found = [self._state.keys[key_id] for _, key_id in entries]
        return page(found, limit, listed, lambda key: (key.created_at, key.id))

    def replace_key(self, key: ApiKey) -> None:
        with self._state.lock:
            stored = self._state.keys.get(key.id)
            if stored is None or (stored.revoked_at is not None and key.revoked_at is None):
                raise WriteConflict
            self._put(key)

    def put_grant(self, grant: TransferGrant) -> None:
        with self._state.lock:
            self._state.grants[grant.token_sha256] = grant

    def get_grant(self, token_sha256: str) -> TransferGrant | None:
        with self._state.lock:
            return self._state.grants.get(token_sha256)

    def redeem(self, token_sha256: str, now: int) -> TransferGrant | None:
        with self._state.lock:
            grant = self._state.grants.get(token_sha256)
            if grant is None or grant.purpose != "download" or grant.expires_at <= now:
                return None
            return self._state.grants.pop(token_sha256)

    def _put(self, key: ApiKey) -> None:
        self._state.keys[key.id] = key
        self._state.keys_by_tenant.put(key.id, key.tenant, keys.created_sk(key))


class MemoryCloud:
    """All four stores over one state. `objects` has test hooks of its own."""

    def __init__(self) -> None:
        self.state = MemoryState()
        self.jobs = MemoryJobStore(self.state)
        self.leases = MemoryLeaseStore(self.state)
        self.tokens = MemoryTokenStore(self.state)
        self.objects = MemoryObjectStore()


def _leased_job(write: LeaseWrite) -> str:
    match write:
        case OpenLease(lease=lease):
            return lease.job_id
        case CheckLease(fence=fence):
            return fence.job_id
        case CloseLease() | DirectLease():
            return write.job_id


def _after(write: LeaseWrite, lease: Lease | None, change: Change) -> Lease | None:
    """The lease once `write` is done. Raises FenceBroken if it may not be done."""
    match write:
        case OpenLease():
            if lease is not None and lease.epoch >= write.lease.epoch:
                raise FenceBroken(lease)
            return write.lease
        case CheckLease():
            if not write.fence.admits(lease):
                raise FenceBroken(lease)
            return lease
        case DirectLease():
            if lease is None or lease.epoch != write.epoch or lease.closed:
                raise FenceBroken(lease)
            return lease.model_copy(update={"directive": Directive(write.directive), "directive_reason": write.reason})
        case CloseLease():
            return _closed(write, lease, change)


def _closed(write: CloseLease, lease: Lease | None, change: Change) -> Lease:
    if lease is None and write.fence is None and write.expired_at is None:
        # A user's command goes through even where the row is lost.
        now = change.job.updated_at
        stub = Lease(
            job_id=write.job_id,
            tenant=change.job.tenant,
            epoch=write.epoch,
            expires_at=now,
            duration_s=0,
            heartbeat_interval_s=0,
        )
        return stub.model_copy(update={"closed": write.closed})
    admitted = lease is not None and lease.epoch == write.epoch
    if write.fence is not None:
        admitted = admitted and write.fence.admits(lease)
    if write.expired_at is not None:
        admitted = admitted and lease is not None and not lease.closed and lease.expires_at <= write.expired_at
    if lease is None or not admitted:
        raise FenceBroken(lease)
    return lease.model_copy(update={"closed": write.closed})


def _version(record: CheckpointRecord) -> tuple[int, int, bool, bool]:
    """What tells one checkpoint of a step from another."""
    return record.epoch, record.committed_at, record.damaged, record.pinned


def _pair(position: list[str | int] | None) -> tuple[str, str] | None:
    return None if position is None else (str(position[0]), str(position[1]))


def _number(position: list[str | int] | None) -> int | None:
    return None if position is None else int(position[0])
