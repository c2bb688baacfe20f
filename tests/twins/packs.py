"""Store the references of jobs to packs in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from functions.domain.checkpoints import packs as rules
from functions.domain.checkpoints.packs import PackSnapshot, PackWrite
from functions.domain.records import PackRecord
from tests.twins.state import MemoryState


class MemoryPackStore:
    """Twin of DynamoPackStore. Items of condemned packs stay."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def get_many(self, tenant: str, digests: Iterable[str], *, consistent: bool = True) -> dict[str, PackRecord]:
        with self._state.lock:
            found = {digest: self._state.packs.get((tenant, digest)) for digest in digests}
        return {digest: record for digest, record in found.items() if record is not None}

    def add_references(self, tenant: str, job_id: str, sightings: Sequence[PackSnapshot]) -> bool:
        done = True
        for sighting in sightings:
            place = tenant, sighting.pack.blake3
            with self._state.lock:
                current = self._state.packs.get(place)
                if rules.may_reference(sighting, current):
                    version = self._state.pack_version()
                    self._state.packs[place] = rules.referenced_record(tenant, job_id, sighting.pack, current, version)
                else:
                    done = False
        return done

    def remove_references(self, tenant: str, job_id: str, writes: Sequence[PackWrite]) -> set[str]:
        refused = set()
        for write in writes:
            place = tenant, write.pack.blake3
            with self._state.lock:
                current = self._state.packs.get(place)
                if rules.may_release(write, current):
                    version = self._state.pack_version()
                    self._state.packs[place] = rules.released_record(tenant, job_id, write, current, version)
                else:
                    refused.add(write.pack.blake3)
        return refused

    def mark_suspect(self, tenant: str, job_id: str, digests: Iterable[str]) -> None:
        for digest in digests:
            with self._state.lock:
                current = self._state.packs.get((tenant, digest))
                if current is not None and job_id in current.jobs:
                    self._state.packs[tenant, digest] = current.model_copy(update={"doubted": True})
