"""Where rings lie, in one text: a directory (`/mnt/ring`, `fs:/mnt/ring`), a part of a bucket (`s3://bucket/prefix`),
`baton:NAME` with the control plane, or `memory:NAME` within this process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from baton.contract.names import RING_NAME_PATTERN, RING_TOKEN_VARIABLE
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.store.filesystem import DirectoryStore
from gpu_client.ring.store.memory import MemoryStore
from gpu_client.ring.store.protocol import RingStore

URL = "BATON_API_URL"
TOKEN = RING_TOKEN_VARIABLE
"""A job's processes have it where the job names rings: it is good for these, as long as the attempt lives."""
KEY = "BATON_API_KEY"


class Access(NamedTuple):
    """An address, and an API key or a token in its place."""

    url: str
    key: str

    def __repr__(self) -> str:
        return f"Access({self.url!r})"


_elsewhere: list[Callable[[], tuple[str, str] | None]] = []


def look_elsewhere(find: Callable[[], tuple[str, str] | None] | None) -> None:
    """Where to look first for address and key in this process: a command line knows profiles. It answers None where it
    knows of none. `find` None: nowhere else any more."""
    _elsewhere[:] = [] if find is None else [find]


def find_access(environ: Mapping[str, str] = os.environ) -> Access:
    """As a command line says, else the environment. Raises RingMismatch, and what a command line raises."""
    found = _elsewhere[0]() if _elsewhere else None
    if found is not None:
        return Access(*found)
    url, key = environ.get(URL, ""), environ.get(TOKEN) or environ.get(KEY, "")
    if url and key:
        return Access(url, key)
    raise RingMismatch(
        f"nothing says where the control plane is, or lets this process in: {URL} and {KEY} are not both set",
        f"Set them; in a job, name the ring in its field 'rings', and they are there as {URL} and {TOKEN}",
    )


_in_memory: dict[str, MemoryStore] = {}


def store_at(place: str, *, make: bool) -> RingStore:
    """`make`: it need not be there. Raises RingMismatch for a text that names no place, or one that cannot be used."""
    kind, colon, rest = place.partition(":")
    if not colon or kind == "fs":
        return DirectoryStore(Path(rest if colon else place).expanduser(), make=make)
    if kind == "s3" and rest.startswith("//"):
        # Not with the rest: it takes a client of HTTP, and what signs requests.
        from gpu_client.ring.store.s3 import BucketStore

        return BucketStore(rest.removeprefix("//"))
    if kind == "memory" and rest:
        return _in_memory.setdefault(rest, MemoryStore())
    if kind == "baton":
        return _with_baton(rest)
    raise RingMismatch(
        f"{place!r} is no place of a ring", "Name a directory, s3://bucket/prefix, baton:NAME, or memory:NAME"
    )


def _with_baton(name: str) -> RingStore:
    if not re.fullmatch(RING_NAME_PATTERN, name):
        raise RingMismatch(f"{name!r} is no name of a ring", "Use small letters, digits and '-', up to 63 of them")
    # Only here: a ring in a directory needs no network.
    from gpu_client.ring.store.control_plane import ApiStore

    return ApiStore(name, find_access())
