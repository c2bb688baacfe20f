"""Open the store that a place names, and find the control plane.

Places: a directory (`/mnt/ring`, `fs:/mnt/ring`), a part of a bucket (`s3://bucket/prefix`), `baton:NAME` with the
control plane, or `memory:NAME` within this process.
"""

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
from gpu_client.ring.store.protocol import RingBackend

URL = "BATON_API_URL"
TOKEN = RING_TOKEN_VARIABLE
"""The agent sets the token for a job that names rings; it opens these rings for the time of the attempt."""
KEY = "BATON_API_KEY"


class ControlPlaneAccess(NamedTuple):
    """Address of the control plane, and an API key or a token."""

    url: str
    key: str

    def __repr__(self) -> str:
        return f"Access({self.url!r})"


_access_sources: list[Callable[[], tuple[str, str] | None]] = []


def set_access_source(find: Callable[[], tuple[str, str] | None] | None) -> None:
    """Set a function that finds address and key before the environment does, for a command line with profiles. None
    resets. The function returns None to defer to the environment.
    """
    _access_sources[:] = [] if find is None else [find]


def find_access(environ: Mapping[str, str] = os.environ) -> ControlPlaneAccess:
    """Find address and key: by the access source, else in the environment. Raises RingMismatch, or an exception of the
    source.
    """
    found = _access_sources[0]() if _access_sources else None
    if found is not None:
        return ControlPlaneAccess(*found)
    url, key = environ.get(URL, ""), environ.get(TOKEN) or environ.get(KEY, "")
    if url and key:
        return ControlPlaneAccess(url, key)
    raise RingMismatch(
        f"the address of the control plane or a key is missing: {URL} and {KEY} are not both set",
        f"Set both variables; in a job, name the ring in the field 'rings': the agent then sets {URL} and {TOKEN}",
    )


_in_memory: dict[str, MemoryStore] = {}


def open_store(place: str, *, make: bool) -> RingBackend:
    """Open the store of a place. `make`: create a missing directory. Raises RingMismatch for an unusable place."""
    kind, colon, rest = place.partition(":")
    if not colon or kind == "fs":
        return DirectoryStore(Path(rest if colon else place).expanduser(), make=make)
    if kind == "s3" and rest.startswith("//"):
        # Imported on demand: the S3 store needs an HTTP client and a request signer.
        from gpu_client.ring.store.s3 import BucketStore

        return BucketStore(rest.removeprefix("//"))
    if kind == "memory" and rest:
        return _in_memory.setdefault(rest, MemoryStore())
    if kind == "baton":
        return _open_control_plane_store(rest)
    raise RingMismatch(
        f"{place!r} is not a place of a ring", "Name a directory, s3://bucket/prefix, baton:NAME, or memory:NAME"
    )


def _open_control_plane_store(name: str) -> RingBackend:
    if not re.fullmatch(RING_NAME_PATTERN, name):
        raise RingMismatch(f"{name!r} is not a name of a ring", "Use small letters, digits and '-', up to 63 of them")
    # Imported on demand: a ring in a directory needs no network.
    from gpu_client.ring.store.control_plane import ControlPlaneStore

    return ControlPlaneStore(name, find_access())
