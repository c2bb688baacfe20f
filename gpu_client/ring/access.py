"""Where the control plane is, and what lets this process in: for rings at `baton:NAME`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from baton.contract.names import RING_TOKEN_VARIABLE
from gpu_client.ring.errors import RingMismatch

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
