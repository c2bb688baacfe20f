"""Rings and their records in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.contract.errors import ErrorCode
from functions.domain.access.rings import RingRecord, StoredRing
from functions.domain.errors import Refusal
from functions.domain.ports import ResultPage
from functions.storage.paging import page, ring_keys_list, rings_list
from tests.twins.state import MemoryState


class MemoryRings:
    """Twin of DynamoRings."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def make(self, ring: StoredRing) -> bool:
        with self._state.lock:
            there = self._state.rings.get((ring.tenant, ring.name))
            if there is not None:
                return there.id == ring.id
            self._state.rings[ring.tenant, ring.name] = ring
            return True

    def get(self, tenant: str, name: str) -> StoredRing | None:
        with self._state.lock:
            return self._state.rings.get((tenant, name))

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[StoredRing]:
        listed = rings_list(tenant)
        position = listed.position(cursor)
        after = "" if position is None else str(position[0])
        with self._state.lock:
            found = [
                ring
                for (owner, name), ring in sorted(self._state.rings.items(), key=lambda stored: stored[0])
                if owner == tenant and name > after
            ]
        return page(found[: limit + 1], limit, listed, lambda ring: (ring.name,))

    def begin_removal(self, ring: StoredRing) -> bool:
        with self._state.lock:
            there = self._state.rings.get((ring.tenant, ring.name))
            if there is None or there.id != ring.id:
                return False
            self._state.rings[ring.tenant, ring.name] = replace(there, removing=True)
            return True

    def forget(self, ring: StoredRing) -> None:
        with self._state.lock:
            there = self._state.rings.get((ring.tenant, ring.name))
            if there is not None and there.id == ring.id and there.removing:
                del self._state.rings[ring.tenant, ring.name]

    def write(self, ring: StoredRing, key: str, data: bytes, *, version: str, seen: str | None) -> bool:
        with self._state.lock:
            records = self._of(ring)
            there = records.get(key)
            if (there and there.version) not in (seen, version):
                return False
            records[key] = RingRecord(data, version)
            return True

    def read(self, ring: StoredRing, keys: Sequence[str]) -> dict[str, RingRecord]:
        with self._state.lock:
            records = self._of(ring)
            return {key: records[key] for key in keys if key in records}

    def keys(self, ring: StoredRing, prefix: str, *, limit: int, cursor: str | None = None) -> ResultPage[str]:
        listed = ring_keys_list(ring.id, prefix)
        position = listed.position(cursor)
        after = "" if position is None else str(position[0])
        if position is not None and not after.startswith(prefix):
            raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
        with self._state.lock:
            found = sorted(key for key in self._of(ring) if key.startswith(prefix) and key > after)
        return page(found[: limit + 1], limit, listed, lambda key: (key,))

    def delete(self, ring: StoredRing, keys: Sequence[str]) -> None:
        with self._state.lock:
            records = self._of(ring)
            for key in keys:
                records.pop(key, None)

    def _of(self, ring: StoredRing) -> dict[str, RingRecord]:
        return self._state.ring_records.setdefault((ring.tenant, ring.name, ring.id), {})
