"""Rings that lie here: what is stored of them, and how. What is in their records is nobody's business but the ring's.

Small to load: only the function that serves rings has such a store, and all others name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.contract.names import RINGS_PREFIX

if TYPE_CHECKING:
    from functions.domain.ports import Page


@dataclass(frozen=True, kw_only=True)
class StoredRing:
    """One ring. `id` tells it from others that had, or will have, its name."""

    tenant: str
    name: str
    id: str
    settings: bytes
    created_at: int
    removing: bool = False

    def object_key(self, key: str) -> str:
        """Where an object of it lies in the tenant's part of the bucket."""
        return f"{self.objects_prefix}{key}"

    @property
    def objects_prefix(self) -> str:
        """Where all of them lie."""
        return f"{RINGS_PREFIX}{self.name}/{self.id}/"


@dataclass(frozen=True)
class RingRecord:
    """A record as it is now, and what tells it from any other content that it had or will have."""

    data: bytes
    version: str


class RingStore(Protocol):
    """Rings and their records. Reads are strongly consistent. Every call may raise StorageUnavailable."""

    def make(self, ring: StoredRing) -> bool:
        """Store a new ring; False if its tenant has another of that name. Again with the same id changes nothing."""

    def get(self, tenant: str, name: str) -> StoredRing | None: ...

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> Page[StoredRing]:
        """A tenant's, by name."""

    def begin_removal(self, ring: StoredRing) -> bool:
        """Mark it, if it is still there: from then on nobody is let in."""

    def forget(self, ring: StoredRing) -> None:
        """Remove the ring itself, last of all, if it is marked. Another one of its name is left alone."""

    def write(self, ring: StoredRing, key: str, data: bytes, *, version: str, seen: str | None) -> bool:
        """Write a record if its version is `seen` (None: there is none); False if it is not.

        True also if the record has `version` already: then this very write was done before.
        """

    def read(self, ring: StoredRing, keys: Sequence[str]) -> dict[str, RingRecord]:
        """Those that are there."""

    def keys(self, ring: StoredRing, prefix: str, *, limit: int, cursor: str | None = None) -> Page[str]:
        """Keys of records that begin with the prefix, in their order."""

    def delete(self, ring: StoredRing, keys: Sequence[str]) -> None:
        """Forget records; those that are not there are passed over."""
