"""Where rings lie, in one text: a directory (`/mnt/ring`, `fs:/mnt/ring`), a part of a bucket (`s3://bucket/prefix`),
`baton:NAME` with the control plane, or `memory:NAME` within this process."""

from __future__ import annotations

import re
from pathlib import Path

from baton.contract.names import RING_NAME_PATTERN
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.ring import Ring
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store import RingStore
from gpu_client.ring.store_fs import DirectoryStore
from gpu_client.ring.store_memory import MemoryStore

_in_memory: dict[str, MemoryStore] = {}


def store_at(place: str, *, make: bool) -> RingStore:
    """`make`: it need not be there. Raises RingMismatch for a text that names no place, or one that cannot be used."""
    kind, colon, rest = place.partition(":")
    if not colon or kind == "fs":
        return DirectoryStore(Path(rest if colon else place).expanduser(), make=make)
    if kind == "s3" and rest.startswith("//"):
        # Not with the rest: it takes a client of HTTP, and what signs requests.
        from gpu_client.ring.store_s3 import BucketStore

        return BucketStore(rest.removeprefix("//"))
    if kind == "memory" and rest:
        return _in_memory.setdefault(rest, MemoryStore())
    if kind == "baton":
        return _with_baton(rest)
    raise RingMismatch(
        f"{place!r} is no place of a ring", "Name a directory, s3://bucket/prefix, baton:NAME, or memory:NAME"
    )


def open_ring(place: str) -> Ring:
    """The ring that is there. Raises RingMismatch if there is none."""
    ring = Ring.open(store_at(place, make=False))
    ring.place = place
    return ring


def make_ring(place: str, settings: RingSettings) -> Ring:
    """The ring that is there, or a new one. Raises RingMismatch where it has other settings."""
    ring = Ring.make(store_at(place, make=True), settings)
    ring.place = place
    return ring


def _with_baton(name: str) -> RingStore:
    if not re.fullmatch(RING_NAME_PATTERN, name):
        raise RingMismatch(f"{name!r} is no name of a ring", "Use small letters, digits and '-', up to 63 of them")
    # Only here: a ring in a directory needs no network.
    from gpu_client.ring.access import find_access
    from gpu_client.ring.store_api import ApiStore

    return ApiStore(name, find_access())
