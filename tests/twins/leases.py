"""The lease rows in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.contract.jobs.job import Progress
from baton.contract.worker.control import Directive
from functions.domain import table_keys
from functions.domain.errors import FenceBroken
from functions.domain.jobs.lease_expiry import ReclaimWatermark
from functions.domain.jobs.lease_fence import REPROOF_WINDOW_S, Fence
from functions.domain.jobs.transaction import CloseLease, LeaseWrite, OpenLease, ReopenLease
from functions.domain.records import Lease
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
            due_at = table_keys.due_bucket(fence.job_id, fence.now) + lease.duration_s
            self._state.due.put(fence.job_id, table_keys.DUE, due_at)
            return lease

    def get(self, job_id: str) -> Lease | None:
        with self._state.lock:
            return self._state.leases.get(job_id)

    def get_many(self, job_ids: Sequence[str], *, consistent: bool = False) -> dict[str, Lease]:
        with self._state.lock:
            return {job_id: self._state.leases[job_id] for job_id in job_ids if job_id in self._state.leases}

    def due_pages(self, now: int, *, size: int) -> Iterator[list[str]]:
        last: tuple[int, str] | None = None
        while True:
            with self._state.lock:
                entries = [entry for entry in self._state.due.after(table_keys.DUE, last, size) if entry[0] <= now]
            if entries:
                yield [job_id for _, job_id in entries]
            if len(entries) < size:
                return
            last = entries[-1]

    def reclaim_watermark(self) -> ReclaimWatermark | None:
        with self._state.lock:
            return self._state.watch

    def save_reclaim_watermark(self, watch: ReclaimWatermark, *, seen: ReclaimWatermark | None) -> bool:
        with self._state.lock:
            if self._state.watch != seen:
                return False
            self._state.watch = watch
            return True


def lease_after(write: LeaseWrite, leases: Mapping[str, Lease]) -> Lease:
    """Return the lease once `write` is done. Raises FenceBroken if it may not be done."""
    if isinstance(write, OpenLease):
        lease = leases.get(write.lease.job_id)
        if lease is not None and lease.epoch >= write.lease.epoch:
            raise FenceBroken(lease)
        return write.lease
    lease = leases.get(write.job_id)
    if not write.guard.admits(lease):
        raise FenceBroken(lease)
    if lease is None:
        # A user's command goes through even if the row is lost.
        assert isinstance(write, CloseLease)
        lease = Lease(
            job_id=write.job_id,
            tenant=write.tenant,
            epoch=write.epoch,
            expires_at=write.now,
            duration_s=0,
            heartbeat_interval_s=0,
        )
    values: dict[str, Any] = dict(write.values)
    if "directive" in values:
        values["directive"] = Directive(values["directive"])
    if "progress_by" in values and lease.claimant is not None:
        values = {"claimant": lease.claimant.model_copy(update=values)}
    return lease.model_copy(update=values)


def store_lease(state: MemoryState, write: LeaseWrite, lease: Lease) -> None:
    """Store a lease, and enter it into the index `due` while it may run out."""
    state.leases[lease.job_id] = lease
    if isinstance(write, OpenLease | ReopenLease):
        opened_at = lease.expires_at - lease.duration_s
        state.due.put(lease.job_id, table_keys.DUE, table_keys.due_bucket(lease.job_id, opened_at) + lease.duration_s)
    elif lease.closed:
        state.due.discard(lease.job_id)
