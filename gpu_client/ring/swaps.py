"""Record when generations became readable, for logs: manifests are removed, this record stays.

Any process may add to the record. Compare-and-swap decides which process adds a generation, so each is added once.
"""

from __future__ import annotations

from typing import NamedTuple

from gpu_client.ring.errors import ManifestMissing
from gpu_client.ring.leases import content_of
from gpu_client.ring.manifest import MANIFESTS, manifest_number
from gpu_client.ring.ring import Ring
from gpu_client.ring.sealing import sealed

SWAPS = "swaps"
KEPT = 200
"""Swaps in the record: the newest."""


class Swap(NamedTuple):
    """One generation that became readable."""

    manifest: int
    """The number of its manifest."""
    total: int
    """Swaps up to this one."""
    inserted: int
    """Samples that had become readable up to this one."""
    at_ms: int


def swaps_of(ring: Ring) -> list[Swap]:
    """Return the recorded swaps, oldest first."""
    return [Swap(*entry) for entry in content_of(ring.store.record(SWAPS)).get("swaps", [])]


def note_swaps(ring: Ring) -> list[Swap]:
    """Record the generations that became readable since the last entry. Return those that this call has added.

    A generation whose manifest was removed before any process called this counts, and has no entry.
    """
    while True:
        record = ring.store.record(SWAPS)
        known = [Swap(*entry) for entry in content_of(record).get("swaps", [])]
        last = known[-1] if known else Swap(0, 0, 0, 0)
        newest = ring.newest()
        if newest.inserted <= last.inserted:
            return []
        added: list[Swap] = []
        for number in sorted(map(manifest_number, ring.store.keys(MANIFESTS))):
            if not last.manifest < number <= newest.number:
                continue
            try:
                found = ring.manifest(number)
            except ManifestMissing:
                continue  # the collector was faster
            before = added[-1] if added else last
            more = found.inserted - before.inserted
            if more > 0:
                swaps = -(-more // ring.settings.cap)
                added.append(Swap(number, before.total + swaps, found.inserted, found.at_ms))
        content = {"swaps": [*known, *added][-KEPT:]}
        if not added or ring.store.swap(SWAPS, sealed(content), record.version if record else None) is not None:
            return added
