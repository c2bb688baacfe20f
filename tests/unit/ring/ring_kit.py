"""A ring on its own clock, in a store that dies at a chosen operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gpu_client.ring.format.records import Versioned
from gpu_client.ring.store.protocol import RingBackend

T = TypeVar("T")


class Died(BaseException):
    """Simulated death of the process that uses the store: product code must not catch it."""


class MortalStore:
    """One process's connection to a shared store; dies before or after a chosen operation."""

    def __init__(self, store: RingBackend) -> None:
        self.store = store
        self.dies_after: int | None = None
        """Number of operations before the last one."""
        self.done_first = False
        """True if the last operation takes effect."""
        self.operations = 0

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        return self._do(lambda: self.store.create(key, pieces))

    def read(self, key: str) -> memoryview | None:
        return self._do(lambda: self.store.read(key))

    def record(self, key: str) -> Versioned | None:
        return self._do(lambda: self.store.record(key))

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        return self._do(lambda: self.store.swap(key, data, seen))

    def keys(self, prefix: str) -> list[str]:
        return self._do(lambda: self.store.keys(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._do(lambda key=key: self.store.delete([key]))  # type: ignore[misc]

    def tidy(self, older_than_s: float) -> int:
        return self._do(lambda: self.store.tidy(older_than_s))

    def close(self) -> None:
        pass

    def _do(self, operation: Callable[[], T]) -> T:
        self.operations += 1
        if self.dies_after is not None:
            if self.dies_after <= 0:
                if self.done_first:
                    operation()
                self.dies_after = 0
                self.done_first = False
                raise Died
            self.dies_after -= 1
        return operation()
