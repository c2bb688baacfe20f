"""Operations that a ring needs of its place: few, and each atomic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from gpu_client.ring.format.records import Versioned


class RingBackend(Protocol):
    """A store of immutable objects and of a few records that are compared and swapped.

    Keys are relative paths of letters, digits and `-_.`. A place holds one ring. All operations may raise OSError for
    an unreachable store, and StoreFull.
    """

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """Store an object completely or not at all. Returns False, without a change, if the key exists.

        A process that is killed may leave an incomplete object of samples (`EncodedObject`), which lacks its claim.
        """

    def read(self, key: str) -> memoryview | None:
        """Read an object; None if absent. The bytes stay valid after a deletion, and the caller may change them."""

    def record(self, key: str) -> Versioned | None:
        """Read a record."""

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        """Write a record if its version is still `seen` (None: absent). Returns the new version, or None if another was
        faster.
        """

    def keys(self, prefix: str) -> list[str]:
        """List the keys below a prefix that ends with `/`, sorted: all that exist during the whole call."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects or records; absent keys are ignored."""

    def tidy(self, older_than_s: float) -> int:
        """Remove incomplete writes of dead processes, older than this (s). Returns the number of removed pieces."""

    def close(self) -> None:
        """Release the resources of this process."""


@runtime_checkable
class DistantStore(Protocol):
    """A store with a high latency, where concurrent reads pay off."""

    def prefetch(self, keys: Sequence[str]) -> None:
        """Begin to fetch objects that are read next. Cancels earlier prefetches that were not read."""


@runtime_checkable
class SizedStore(Protocol):
    """A store that knows its size."""

    def stored_bytes(self) -> int:
        """Sum up the bytes of all that exists during the whole call, incomplete writes included."""


@runtime_checkable
class ExpectingStore(Protocol):
    """A store that benefits from knowing future reads."""

    def expect(self, keys: Sequence[str]) -> None:
        """Announce objects that will be read, in any order."""


@runtime_checkable
class SyncingStore(Protocol):
    """A store that can flush writes: without a flush, a loss of power can undo the last writes of a file system."""

    def sync_writes(self) -> None:
        """Flush each write to the disk from now on, before the operation returns.

        Raises RingMismatch for a file system that cannot flush directories.
        """


@runtime_checkable
class RemovingStore(Protocol):
    """A store that removes its ring by one operation."""

    def remove(self) -> int:
        """Remove all records and objects. Returns their number. Raises RingMissing if there is no ring."""
