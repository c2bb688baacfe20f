"""The lease rows in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.contract.jobs import Progress
from baton.contract.work import Directive
from functions.domain.change import (
    Change,
    CheckLease,
    CloseLease,
    DirectLease,
    LeaseWrite,
    NoteLease,
    OpenLease,
    ReopenLease,
    SteerLease,
)
from functions.domain.errors import FenceBroken
from functions.domain.leases import REPROOF_WINDOW_S, Fence
from functions.domain.reclaiming import Watch
from functions.domain.records import Lease
from functions.storage import keys
from tests.twins.state import MemoryState


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

    def due_pages(self, now: int, *, size: int) -> Iterator[list[str]]:
        last: tuple[int, str] | None = None
        while True:
            with self._state.lock:
                entries = [entry for entry in self._state.due.after(keys.DUE, last, size) if entry[0] <= now]
            if entries:
                yield [job_id for _, job_id in entries]
            if len(entries) < size:
                return
            last = entries[-1]

    def watch(self) -> Watch | None:
        with self._state.lock:
            return self._state.watch

    def keep_watch(self, watch: Watch, *, seen: Watch | None) -> bool:
        with self._state.lock:
            if self._state.watch != seen:
                return False
            self._state.watch = watch
            return True


def lease_after(write: LeaseWrite, leases: Mapping[str, Lease], change: Change) -> Lease | None:
    """The lease once `write` is done. Raises FenceBroken if it may not be done."""
    match write:
        case OpenLease():
            lease = leases.get(write.lease.job_id)
            if lease is not None and lease.epoch >= write.lease.epoch:
                raise FenceBroken(lease)
            return write.lease
        case ReopenLease():
            return _reopened(write, leases.get(write.fence.job_id))
        case CheckLease():
            return _checked(write, leases.get(write.fence.job_id))
        case DirectLease():
            lease = leases.get(write.job_id)
            if lease is None or lease.epoch != write.epoch or lease.closed:
                raise FenceBroken(lease)
            directed = {"directive": Directive(write.directive), "directive_reason": write.reason}
            newer = {} if write.commands_seq is None else {"commands_seq": write.commands_seq}
            return lease.model_copy(update={**directed, **newer})
        case SteerLease():
            lease = leases.get(write.job_id)
            if lease is None or lease.epoch != write.epoch or lease.closed:
                raise FenceBroken(lease)
            newest = {
                "rules_revision": write.rules_revision,
                "commands_seq": write.commands_seq,
                "watched": write.watched,
            }
            return lease.model_copy(update=newest)
        case NoteLease():
            return noted(write, leases)
        case CloseLease():
            return _closed(write, leases.get(write.job_id), change)


def noted(write: NoteLease, leases: Mapping[str, Lease]) -> Lease:
    """The lease with what its worker said of its rules. Raises FenceBroken."""
    lease = leases.get(write.fence.job_id)
    if lease is None or not write.fence.admits(lease):
        raise FenceBroken(lease)
    said = {"rules_in_force": write.rules_in_force, "rules_rejected": write.rules_rejected}
    return lease.model_copy(update=said)


def _checked(write: CheckLease, lease: Lease | None) -> Lease:
    if lease is None or not write.fence.admits(lease):
        raise FenceBroken(lease)
    if write.progress_by is None or lease.claimant is None:
        return lease
    claimant = lease.claimant.model_copy(update={"progress_by": write.progress_by})
    return lease.model_copy(update={"claimant": claimant})


def _reopened(write: ReopenLease, lease: Lease | None) -> Lease:
    if lease is None or not write.fence.recovers(lease):
        raise FenceBroken(lease)
    newest = {"rules_revision": write.rules_revision, "commands_seq": write.commands_seq, "watched": write.watched}
    return lease.model_copy(update={"closed": "", "expires_at": write.fence.now + write.duration_s, **newest})


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
