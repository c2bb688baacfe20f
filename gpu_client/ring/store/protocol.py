"""What a ring needs of the place where it lies: few operations, each of them atomic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from gpu_client.ring.format.records import Versioned


class RingStore(Protocol):
    """Objects, which never change, and a few records, which are compared and swapped.

    Keys are relative paths of letters, digits and `-_.`; a place is one ring's alone. All operations may raise OSError
    where the store cannot be reached, and StoreFull where nothing fits in.
    """

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """Store an object whole, or not at all; False, and nothing changes, if there is one of that key."""

    def read(self, key: str) -> memoryview | None:
        """An object, for as long as it is held even if it is deleted; None if there is none.

        The bytes may be altered in place without altering the store's.
        """

    def record(self, key: str) -> Versioned | None:
        """A record as it is now."""

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        """Write a record if its version is still `seen` (None: there is none); its new version, None if it was not."""

    def keys(self, prefix: str) -> list[str]:
        """All keys below a prefix that ends with `/`, in their order, among them every object and record that was there
        before the call and was not deleted."""

    def delete(self, keys: Sequence[str]) -> None:
        """Forget objects or records; those that are not there are passed over."""

    def tidy(self, older_than_s: float) -> int:
        """Remove what was being stored for so long by processes that have died: how many pieces."""

    def close(self) -> None:
        """Give back what this process holds."""


@runtime_checkable
class DistantStore(Protocol):
    """A store where reading is mostly waiting: several objects are fetched in the time of one."""

    def begin(self, keys: Sequence[str]) -> None:
        """These objects are read next: fetch them at the same time. What was begun before and not read is given up."""


@runtime_checkable
class SizedStore(Protocol):
    """A store that can tell how much it has."""

    def stored_bytes(self) -> int:
        """Return the bytes of all that was there before the call and was not deleted, parts of objects included."""


@runtime_checkable
class ExpectingStore(Protocol):
    """A store that is quicker if it knows what comes."""

    def expect(self, keys: Sequence[str]) -> None:
        """These objects are going to be read, in any order."""


@runtime_checkable
class SyncingStore(Protocol):
    """Offer to flush writes: without that a loss of power can undo the last writes of a store on a file system."""

    def sync_writes(self) -> None:
        """Flush each write to the disk from now on, before the operation returns.

        Raises RingMismatch where the file system cannot flush directories.
        """


@runtime_checkable
class RemovingStore(Protocol):
    """A store that removes its ring itself."""

    def remove(self) -> int:
        """Remove all records and objects; return how many there were. Raises RingMissing if there is no ring."""
