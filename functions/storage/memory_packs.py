"""Who holds which pack, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from functions.domain import packs as rules
from functions.domain.change import Change, CondemnPack, mark_of
from functions.domain.errors import WriteConflict
from functions.domain.packs import Sighting
from functions.domain.records import PackRecord
from functions.storage.memory_state import MemoryState

Place = tuple[str, str]
"""Tenant and digest."""


def packs_after(change: Change, packs: Mapping[Place, PackRecord]) -> dict[Place, PackRecord]:
    """The items that a change writes anew. Raises WriteConflict if one is not as the change wants it."""
    after: dict[Place, PackRecord] = {}
    tenant, job_id = change.job.tenant, change.job.id
    for write in change.packs:
        if isinstance(write, CondemnPack):
            place = tenant, write.pack.blake3
            current = packs.get(place)
            if not rules.may_condemn(job_id, write.seen, current):
                raise WriteConflict
            after[place] = rules.condemned(tenant, write, mark_of(change), current)
        else:
            place = tenant, write.blake3
            current = packs.get(place)
            if current is None or job_id not in current.jobs or len(current.jobs) < 2:
                raise WriteConflict
            after[place] = current.model_copy(update={"jobs": current.jobs - {job_id}})
    return after


class MemoryPackStore:
    """Twin of DynamoPackStore. Items of packs that are gone stay."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def get_many(self, tenant: str, digests: Iterable[str]) -> dict[str, PackRecord]:
        with self._state.lock:
            found = {digest: self._state.packs.get((tenant, digest)) for digest in digests}
        return {digest: record for digest, record in found.items() if record is not None}

    def hold(self, tenant: str, job_id: str, sightings: Sequence[Sighting]) -> bool:
        done = True
        for sighting in sightings:
            place = tenant, sighting.pack.blake3
            with self._state.lock:
                current = self._state.packs.get(place)
                if rules.may_hold(sighting, current):
                    self._state.packs[place] = rules.held(tenant, job_id, sighting.pack, current)
                else:
                    done = False
        return done

    def doubt(self, tenant: str, job_id: str, digests: Iterable[str]) -> None:
        for digest in digests:
            with self._state.lock:
                current = self._state.packs.get((tenant, digest))
                if current is not None and job_id in current.jobs:
                    self._state.packs[tenant, digest] = current.model_copy(update={"doubted": True})

    def mark_gone(self, tenant: str, digests: Iterable[str], mark: str, now: int) -> None:
        for digest in digests:
            with self._state.lock:
                current = self._state.packs.get((tenant, digest))
                if current is not None and current.condemned_by == mark:
                    self._state.packs[tenant, digest] = current.model_copy(update={"gone": True})
