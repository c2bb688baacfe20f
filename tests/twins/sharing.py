"""Store the records of shared outputs in memory."""

from __future__ import annotations

from collections.abc import Sequence

from functions.domain.checkpoints.shared_outputs import SharedRecord
from tests.twins.state import MemoryState


class MemorySharedStore:
    """Twin of DynamoSharedStore."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def get_many(self, tenant: str, shared_keys: Sequence[str]) -> dict[str, SharedRecord]:
        with self._state.lock:
            found = {key: self._state.shared.get((tenant, key)) for key in shared_keys}
        return {key: record for key, record in found.items() if record is not None}

    def replace(self, record: SharedRecord, *, seen: SharedRecord | None) -> bool:
        place = record.tenant, record.key
        with self._state.lock:
            there = self._state.shared.get(place)
            if (there and there.object_key) != (seen and seen.object_key):
                return False
            self._state.shared[place] = record
            return True
