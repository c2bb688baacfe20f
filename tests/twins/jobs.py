"""Jobs, attempts, events and checkpoints in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from baton.contract.jobs.job import JobState
from baton.contract.worker.control import MAX_COMMANDS
from functions.domain import table_keys
from functions.domain.errors import WriteConflict
from functions.domain.jobs.transaction import Delete, Put, PutFleet, Transaction
from functions.domain.ports import MAX_MEMBERS, ResultPage
from functions.domain.record_base import TableRecord
from functions.domain.records import CheckpointRecord, CommandRecord, Job, MemberRecord, ScalingRecord, scaling_owner
from functions.storage.dynamodb.items.documents import dump, load
from functions.storage.paging import history_list, jobs_list, page, ready_list
from tests.twins.leases import lease_after, store_lease
from tests.twins.state import MemoryState, StoredItem, created_of

R = TypeVar("R", bound=TableRecord)


class MemoryJobStore:
    """Twin of DynamoJobStore."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def get(self, job_id: str) -> Job | None:
        return self.read(Job, job_id)

    def get_many(self, job_ids: Sequence[str]) -> list[Job]:
        with self._state.lock:
            found = [self.get(job_id) for job_id in dict.fromkeys(job_ids)]
        return [job for job in found if job is not None]

    def apply(self, transaction: Transaction) -> None:
        state = self._state
        documents = [dump(write.record) if isinstance(write, Put) else "" for write in transaction.writes]
        with state.lock:
            if not all(state.jobs.admits(write) for write in transaction.writes if isinstance(write, Put | Delete)):
                raise WriteConflict
            for fleet in (write for write in transaction.writes if isinstance(write, PutFleet)):
                before, _ = state.fleets.get((fleet.tenant, fleet.name), (None, None))
                if before not in (None, fleet.version - 1):
                    raise WriteConflict
            # Nothing is written yet when the guard of a lease refuses.
            leases = [
                None if isinstance(write, Put | Delete | PutFleet) else lease_after(write, state.leases)
                for write in transaction.writes
            ]
            for write, document, lease in zip(transaction.writes, documents, leases, strict=True):
                match write:
                    case Put():
                        state.jobs.put(write, document)
                    case Delete():
                        state.jobs.delete(write.key)
                    case PutFleet():
                        state.fleets[write.tenant, write.name] = (write.version, write.record)
                    case _:
                        assert lease is not None
                        store_lease(state, write, lease)

    def put(self, write: Put) -> None:
        document = dump(write.record)
        with self._state.lock:
            if not self._state.jobs.admits(write):
                raise WriteConflict
            self._state.jobs.put(write, document)

    def ready(self, tenant: str, queue: str, shard: int, *, limit: int, cursor: str | None = None) -> ResultPage[Job]:
        ready = ready_list(tenant, queue, shard)
        position = ready.position(cursor)
        with self._state.lock:
            entries = self._state.jobs.ready.after(
                table_keys.ready_pk(tenant, queue, shard), _pair(position), limit + 1
            )
            jobs = self.get_many([job_id for _, job_id in entries])
        return page(jobs, limit, ready, lambda job: (job.ready_rank, job.id))

    def longest_waiting(self, *, limit: int) -> int | None:
        with self._state.lock:
            waiting = self.get_many(sorted(self._state.jobs.ready.members())[:limit])
        return min((job.updated_at for job in waiting), default=None)

    def list_jobs(
        self,
        tenant: str,
        *,
        state: JobState | None,
        limit: int,
        cursor: str | None = None,
        newest_first: bool = False,
        consistent: bool = True,
    ) -> ResultPage[Job]:
        listed = jobs_list(tenant, state, newest_first=newest_first)
        position = listed.position(cursor)
        place = created_of(position)
        index, partition = (
            (self._state.jobs.by_tenant, tenant)
            if state is None
            else (self._state.jobs.by_state, table_keys.state_pk(tenant, state))
        )
        with self._state.lock:
            read = index.before if newest_first else index.after
            jobs = self.get_many([job_id for _, job_id in read(partition, place, limit + 1)])
        return page(jobs, limit, listed, lambda job: (job.created_at, job.id))

    def count_jobs(self, tenant: str, state: JobState, *, up_to: int) -> int:
        with self._state.lock:
            return len(self._state.jobs.by_state.after(table_keys.state_pk(tenant, state), None, up_to))

    def due_timers(self, now: int, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.jobs.timers.up_to(table_keys.TIMER, now, limit)]

    def due_retentions(self, now: int, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.jobs.timers.up_to(table_keys.RETENTION, now, limit)]

    def unsettled(self, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.jobs.timers.up_to(table_keys.SEATS, 10**11, limit)]

    def due_rules(self, now: int, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.jobs.rules_due.up_to(table_keys.RULES_DUE, now, limit)]

    def read(self, kind: type[R], job_id: str, number: int = 0) -> R | None:
        with self._state.lock:
            return _record(kind, self._state.jobs.get(kind.key(job_id, number)))

    def history(
        self, kind: type[R], job_id: str, *, limit: int, cursor: str | None = None, up_to: int | None = None
    ) -> ResultPage[R]:
        listed = history_list(kind, job_id, up_to)
        position = listed.position(cursor)
        last = 10**kind.DIGITS - 1 if up_to is None else up_to
        first = 0
        if position is not None:
            first, last = (0, int(position[0]) - 1) if kind.NEWEST_FIRST else (int(position[0]) + 1, last)
        found = self._some(kind, job_id, first, last, limit=limit + 1)
        return page(found, limit, listed, lambda record: (number_of(record),))

    def commands(self, job_id: str, *, after: int = 0) -> list[CommandRecord]:
        return self._some(CommandRecord, job_id, after + 1, 10**CommandRecord.DIGITS - 1, limit=MAX_COMMANDS)

    def scaling(self, tenant: str, group: str) -> ScalingRecord | None:
        with self._state.lock:
            return _record(ScalingRecord, self._state.jobs.get(ScalingRecord.key(scaling_owner(tenant, group))))

    def members(self, tenant: str, group: str) -> dict[str, MemberRecord]:
        with self._state.lock:
            texts = sorted(self._state.groups.get((tenant, group), {}).items())[:MAX_MEMBERS]
        return {job_id: load(MemberRecord, text) for job_id, text in texts}

    def join(self, tenant: str, group: str, job_id: str, member: MemberRecord) -> None:
        with self._state.lock:
            self._state.groups.setdefault((tenant, group), {})[job_id] = dump(member)

    def protect_checkpoint(self, job_id: str, step: int, until: int) -> CheckpointRecord | None:
        key = CheckpointRecord.key(job_id, step)
        with self._state.lock:
            stored = self._state.jobs.get(key)
            if stored is not None and int(stored.attributes["protected_until"]) < until:
                stored = stored._replace(attributes={**stored.attributes, "protected_until": until})
                self._state.jobs.replace(key, stored)
            return _record(CheckpointRecord, stored)

    def _some(self, kind: type[R], job_id: str, first: int, last: int, *, limit: int) -> list[R]:
        with self._state.lock:
            items = (
                self._state.jobs.between(kind.key(job_id, max(first, 0)), kind.key(job_id, last)) if last >= 0 else []
            )
        chosen = items[::-1] if kind.NEWEST_FIRST else items
        return [record for item in chosen[:limit] if (record := _record(kind, item)) is not None]


def _record(kind: type[R], item: StoredItem | None) -> R | None:
    if item is None:
        return None
    return load(kind, item.document).model_copy(update={name: item.attributes[name] for name in kind.BESIDE})


def number_of(record: TableRecord) -> int:
    """Return what tells a record from the others of its kind and job."""
    return int(getattr(record, str(record.NUMBER)))


def _pair(position: list[str | int] | None) -> tuple[str, str] | None:
    return None if position is None else (str(position[0]), str(position[1]))
