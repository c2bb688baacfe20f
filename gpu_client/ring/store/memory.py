"""A ring in the memory of one process: for tests, and for a generator and a training in one process."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_client.ring.format.records import Versioned
from gpu_client.ring.store import fork_lock


class MemoryStore:
    """Store of one process. Thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._versions: dict[str, int] = {}
        self._count = 0
        self._lock = fork_lock.make_lock()

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """Implement the protocol."""
        data = b"".join(pieces)
        with self._lock:
            if key in self._objects:
                return False
            self._put(key, data)
        return True

    def read(self, key: str) -> memoryview | None:
        """Implement the protocol."""
        found = self._objects.get(key)
        return None if found is None else memoryview(bytearray(found))

    def record(self, key: str) -> Versioned | None:
        """Implement the protocol."""
        with self._lock:
            data = self._objects.get(key)
            return None if data is None else Versioned(data, str(self._versions[key]))

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        """Implement the protocol."""
        with self._lock:
            there = str(self._versions[key]) if key in self._objects else None
            if there != seen:
                return None
            self._put(key, data)
            return str(self._versions[key])

    def keys(self, prefix: str) -> list[str]:
        """Implement the protocol."""
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """Implement the protocol."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def tidy(self, older_than_s: float) -> int:
        """Do nothing: no write is ever incomplete."""
        return 0

    def stored_bytes(self) -> int:
        """Implement the protocol."""
        with self._lock:
            return sum(map(len, self._objects.values()))

    def close(self) -> None:
        """Do nothing."""

    def _put(self, key: str, data: bytes) -> None:
        self._count += 1
        self._objects[key] = data
        self._versions[key] = self._count
