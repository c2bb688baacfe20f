"""Values that a store keeps for rings of the control plane. The records of a ring are opaque to the control plane."""

from __future__ import annotations

from dataclasses import dataclass

from baton.contract.names import RINGS_PREFIX


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
