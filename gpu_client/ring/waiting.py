"""Samples that wait for their pack to be full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tree import Taken


@dataclass(eq=False)
class Waiting:
    """One of them, from the beginning of its `put` on."""

    taken: Taken
    seed: object
    size_bytes: int
    stored: bool = False
    """Set for the last sample of a pack alone: the `put` of each one before it has returned."""


def bytes_of(pack: Iterable[Waiting]) -> int:
    """Add up the sizes of the samples (bytes)."""
    return sum(one.size_bytes for one in pack)


def fitting(pack: Sequence[Waiting], settings: RingSettings) -> int:
    """Count the samples that the next object holds."""
    size_bytes = 0
    for place, one in enumerate(pack[: settings.pack]):
        size_bytes += one.size_bytes
        if place and size_bytes > settings.most_pack_bytes:
            return place
    return min(len(pack), settings.pack)
