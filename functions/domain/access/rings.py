"""Values that a store keeps for rings of the control plane. The records of a ring are opaque to the control plane."""

from __future__ import annotations

from dataclasses import dataclass

from baton.contract.names import RINGS_PREFIX


@dataclass(frozen=True, kw_only=True)
class StoredRing:
    """Ring of a tenant. `id` distinguishes the ring from earlier and later rings of the same name."""

    tenant: str
    name: str
    id: str
    settings: bytes
    created_at: int
    removing: bool = False

    def object_key(self, key: str) -> str:
        """Return the key of an object of the ring in the tenant's part of the bucket."""
        return f"{self.objects_prefix}{key}"

    @property
    def objects_prefix(self) -> str:
        """Return the prefix of all objects of the ring."""
        return f"{RINGS_PREFIX}{self.name}/{self.id}/"


@dataclass(frozen=True)
class RingRecord:
    """Content of a ring's record, with a version unique to the content."""

    data: bytes
    version: str
