"""Removing a ring with all that is in it, wherever it lies. What still uses it has to be stopped before."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpu_client.ring.collector import READ_BEFORE
from gpu_client.ring.errors import RingMissing
from gpu_client.ring.leases import COPIES, GROUPS, PINS, PUBLISHER, QUARANTINE, READERS, WATCHED, WRITERS
from gpu_client.ring.manifest import INBOX, MANIFESTS, SAMPLES
from gpu_client.ring.places import store_at
from gpu_client.ring.ring import POINTER, SCHEMA, SETTINGS
from gpu_client.ring.room import ROOM
from gpu_client.ring.seeds import SEEDS
from gpu_client.ring.store import RingStore
from gpu_client.ring.store_fs import DirectoryStore
from gpu_client.ring.swaps import SWAPS
from gpu_client.ring.tally import GENERATORS

_PREFIXES = (INBOX, MANIFESTS, SAMPLES, WRITERS, READERS, PINS, GROUPS, QUARANTINE, GENERATORS, COPIES)


@runtime_checkable
class RemovingStore(Protocol):
    """A store that removes its ring itself."""

    def remove(self) -> int:
        """Remove all records and objects; return how many there were. Raises RingMissing if there is no ring."""


def remove_ring(place: str) -> int:
    """Remove a ring; return how many objects and records are gone. Raises RingMissing if there is no ring.

    Its settings go last: whatever is interrupted is still a ring, and can be removed.
    """
    store = store_at(place, make=False)
    try:
        if isinstance(store, RemovingStore):
            return store.remove()
        if store.read(SETTINGS) is None:
            raise RingMissing(f"there is no ring at {place}", "Name the place where it is")
        removed = emptied(store)
        if isinstance(store, DirectoryStore):
            _remove_empty(store.root)
        return removed
    finally:
        store.close()


def emptied(store: RingStore) -> int:
    """The same of a store."""
    # The pointer first: readers and publishers find an empty ring, not one that lacks what it lists.
    store.delete([POINTER])
    removed = 0
    for prefix in _PREFIXES:
        keys = store.keys(prefix)
        store.delete(keys)
        removed += len(keys)
    store.delete([SCHEMA, PUBLISHER, WATCHED, ROOM, READ_BEFORE, SEEDS, SWAPS])
    store.delete([SETTINGS])
    return removed


def _remove_empty(root: Path) -> None:
    """The directories that a ring has made; one in which something else lies stays."""
    (root / "lock").unlink(missing_ok=True)
    for directory in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            directory.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()
