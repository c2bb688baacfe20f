"""Jobs, attempts, events and checkpoints in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TypeVar

from baton.contract.jobs import JobState
from baton.contract.steering import MAX_COMMANDS
from functions.domain.change import Change, Forget, NoteLease, OpenLease, ReopenLease
from functions.domain.errors import WriteConflict
from functions.domain.ports import MAX_MEMBERS, Page
from functions.domain.records import (
    Attempt,
    CheckpointRecord,
    CommandRecord,
    ControlRecord,
    Event,
    Job,
    MemberRecord,
    RulesRecord,
    StandingRecord,
)
from functions.domain.scale_records import ScalingRecord
from functions.domain.stored import Record
from functions.storage import keys
from functions.storage.documents import dump, load
from functions.storage.paging import (
    attempts_list,
    checkpoints_list,
    events_list,
    jobs_list,
    page,
    ready_list,
    rules_list,
)
from tests.twins.leases import lease_after, noted
from tests.twins.state import MemoryState, StoredJob, created_of

R = TypeVar("R", bound=Record)


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
        put = [(kind, number, dump(record)) for kind, number, record in _parts(change)]
        scalings = {(one.tenant, one.group): dump(one) for one in change.scalings}
        standing = change.standing
        with state.lock:
            stored = state.jobs.get(job.id)
            if (stored.rev if stored else None) != change.seen_rev:
                raise WriteConflict
            forgotten = [one.record.step for one in change.forgotten if self._forgettable(job.id, one)]
            self._require_versions(change)
            lease = None
            if change.lease is not None:
                lease = lease_after(change.lease, state.leases, change)
            state.jobs[job.id] = StoredJob(job.rev, document)
            self._index(job)
            for kind, number, text in put:
                state.numbered(job.id, kind).put(number, text)
            if standing is not None:
                self._note_timer(job.id, standing)
            state.scalings |= scalings
            for step in forgotten:
                state.numbered(job.id, keys.CHECKPOINT).remove(step)
            for seq in change.dropped_commands:
                state.numbered(job.id, keys.COMMAND).remove(seq)
            if lease is not None:
                state.leases[lease.job_id] = lease
                if isinstance(change.lease, OpenLease | ReopenLease):
                    opened_at = lease.expires_at - lease.duration_s
                    due_at = keys.due_bucket(lease.job_id, opened_at) + lease.duration_s
                    state.due.put(lease.job_id, keys.DUE, due_at)
                elif lease.closed:
                    state.due.discard(lease.job_id)

    def _forgettable(self, job_id: str, forget: Forget) -> bool:
        """False if the record is gone already. Raises WriteConflict if it is another one, or is being read."""
        stored = self.checkpoint(job_id, forget.record.step)
        if stored is None:
            return False
        if stored.protected_until > forget.now or _version(stored) != _version(forget.record):
            raise WriteConflict
        return True

    def _index(self, job: Job) -> None:
        state = self._state
        created = keys.created_sk(job.created_at, job.id)
        state.by_tenant.put(job.id, job.tenant, created)
        state.by_state.put(job.id, keys.state_pk(job.tenant, job.state), created)
        if job.claimable:
            state.ready.put(job.id, keys.ready_pk(job.tenant, job.queue, job.shard), job.ready_rank)
        else:
            state.ready.discard(job.id)
        if job.timer_at is not None:
            state.timers.put(job.id, keys.TIMER, job.timer_at)
        elif job.retention_at is not None:
            state.timers.put(job.id, keys.RETENTION, job.retention_at)
        else:
            state.timers.discard(job.id)

    def ready(self, tenant: str, queue: str, shard: int, *, limit: int, cursor: str | None = None) -> Page[Job]:
        ready = ready_list(tenant, queue, shard)
        position = ready.position(cursor)
        with self._state.lock:
            entries = self._state.ready.after(keys.ready_pk(tenant, queue, shard), _pair(position), limit + 1)
            jobs = self.get_many([job_id for _, job_id in entries])
        return page(jobs, limit, ready, lambda job: (job.ready_rank, job.id))

    def longest_waiting(self, *, limit: int) -> int | None:
        with self._state.lock:
            waiting = self.get_many(sorted(self._state.ready.members())[:limit])
        return min((job.updated_at for job in waiting), default=None)

    def list_jobs(
        self,
        tenant: str,
        *,
        state: JobState | None,
        limit: int,
        cursor: str | None = None,
        newest_first: bool = False,
    ) -> Page[Job]:
        listed = jobs_list(tenant, state, newest_first=newest_first)
        position = listed.position(cursor)
        place = created_of(position)
        index, partition = (
            (self._state.by_tenant, tenant) if state is None else (self._state.by_state, keys.state_pk(tenant, state))
        )
        with self._state.lock:
            read = index.before if newest_first else index.after
            jobs = self.get_many([job_id for _, job_id in read(partition, place, limit + 1)])
        return page(jobs, limit, listed, lambda job: (job.created_at, job.id))

    def due_timers(self, now: int, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.timers.up_to(keys.TIMER, now, limit)]

    def due_retentions(self, now: int, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.timers.up_to(keys.RETENTION, now, limit)]

    def due_rules(self, now: int, *, limit: int) -> list[str]:
        with self._state.lock:
            return [job_id for _, job_id in self._state.rules_due.up_to(keys.RULES_DUE, now, limit)]

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
        end = None if up_to_step is None else up_to_step + 1
        before = end if position is None else position
        found = self._newest(CheckpointRecord, job_id, keys.CHECKPOINT, limit + 1, before=before)
        return page(found, limit, listed, lambda record: (record.step,))

    def rules(self, job_id: str, revision: int) -> RulesRecord | None:
        return self._one(RulesRecord, job_id, keys.RULES, revision)

    def rules_history(self, job_id: str, *, limit: int, cursor: str | None = None) -> Page[RulesRecord]:
        listed = rules_list(job_id)
        position = _number(listed.position(cursor))
        found = self._newest(RulesRecord, job_id, keys.RULES, limit + 1, before=position)
        return page(found, limit, listed, lambda record: (record.revision,))

    def commands(self, job_id: str, *, after: int = 0) -> list[CommandRecord]:
        return self._some(CommandRecord, job_id, keys.COMMAND, MAX_COMMANDS, after=after)

    def control(self, job_id: str) -> ControlRecord | None:
        return self._one(ControlRecord, job_id, keys.CONTROL, 0)

    def note(self, job_id: str, control: ControlRecord, lease: NoteLease) -> None:
        text = dump(control)
        with self._state.lock:
            self._state.leases[job_id] = noted(lease, self._state.leases)
            self._state.numbered(job_id, keys.CONTROL).put(0, text)

    def standing(self, job_id: str) -> StandingRecord | None:
        return self._one(StandingRecord, job_id, keys.STANDING, 0)

    def stand(self, job_id: str, standing: StandingRecord) -> None:
        text = dump(standing)
        with self._state.lock:
            self._require_next(job_id, standing)
            self._state.numbered(job_id, keys.STANDING).put(0, text)
            self._note_timer(job_id, standing)

    def members(self, tenant: str, group: str) -> dict[str, MemberRecord]:
        with self._state.lock:
            texts = sorted(self._state.groups.get((tenant, group), {}).items())[:MAX_MEMBERS]
        return {job_id: load(MemberRecord, text) for job_id, text in texts}

    def join(self, tenant: str, group: str, job_id: str, member: MemberRecord) -> None:
        with self._state.lock:
            self._state.groups.setdefault((tenant, group), {})[job_id] = dump(member)

    def scaling(self, tenant: str, group: str) -> ScalingRecord | None:
        with self._state.lock:
            text = self._state.scalings.get((tenant, group))
        return load(ScalingRecord, text) if text else None

    def _require_versions(self, change: Change) -> None:
        if change.standing is not None:
            self._require_next(change.job.id, change.standing)
        for scaling in change.scalings:
            stored = self.scaling(scaling.tenant, scaling.group)
            if (stored.version if stored else 0) != scaling.version - 1:
                raise WriteConflict

    def _require_next(self, job_id: str, standing: StandingRecord) -> None:
        stored = self.standing(job_id)
        if (stored.version if stored else 0) != standing.version - 1:
            raise WriteConflict

    def _note_timer(self, job_id: str, standing: StandingRecord) -> None:
        if standing.next_at is None:
            self._state.rules_due.discard(job_id)
        else:
            self._state.rules_due.put(job_id, keys.RULES_DUE, standing.next_at)

    def protect_checkpoint(self, job_id: str, step: int, until: int) -> CheckpointRecord | None:
        with self._state.lock:
            record = self.checkpoint(job_id, step)
            if record is None or record.protected_until >= until:
                return record
            record = record.model_copy(update={"protected_until": until})
            self._state.numbered(job_id, keys.CHECKPOINT).put(step, dump(record))
            return record

    def _one(self, kind: type[R], job_id: str, prefix: str, number: int) -> R | None:
        with self._state.lock:
            text = self._state.numbered(job_id, prefix).documents.get(number)
        return load(kind, text) if text else None

    def _newest(self, kind: type[R], job_id: str, prefix: str, limit: int, *, before: int | None) -> list[R]:
        with self._state.lock:
            kept = self._state.numbered(job_id, prefix)
            last = len(kept.numbers) if before is None else bisect_left(kept.numbers, before)
            texts = [kept.documents[number] for number in reversed(kept.numbers[max(last - limit, 0) : last])]
        return [load(kind, text) for text in texts]

    def _some(self, kind: type[R], job_id: str, prefix: str, limit: int, *, after: int | None) -> list[R]:
        with self._state.lock:
            kept = self._state.numbered(job_id, prefix)
            first = 0 if after is None else bisect_left(kept.numbers, after + 1)
            texts = [kept.documents[number] for number in kept.numbers[first : first + limit]]
        return [load(kind, text) for text in texts]


def _parts(change: Change) -> Iterator[tuple[str, int, Record]]:
    """What a change puts beside the job: kind, number, record."""
    yield from ((keys.EVENT, event.seq, event) for event in change.events)
    if change.attempt:
        yield keys.ATTEMPT, change.attempt.epoch, change.attempt
    if change.checkpoint:
        yield keys.CHECKPOINT, change.checkpoint.step, change.checkpoint
    if change.rules:
        yield keys.RULES, change.rules.revision, change.rules
    yield from ((keys.COMMAND, command.seq, command) for command in change.commands)
    if change.control:
        yield keys.CONTROL, 0, change.control
    if change.standing:
        yield keys.STANDING, 0, change.standing


def _version(record: CheckpointRecord) -> tuple[int, int, bool, bool]:
    """What tells one checkpoint of a step from another."""
    return record.epoch, record.committed_at, record.damaged, record.pinned


def _pair(position: list[str | int] | None) -> tuple[str, str] | None:
    return None if position is None else (str(position[0]), str(position[1]))


def _number(position: list[str | int] | None) -> int | None:
    return None if position is None else int(position[0])
