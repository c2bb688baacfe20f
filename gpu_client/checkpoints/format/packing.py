"""Group chunks into packs with content-defined cuts.

Cuts depend on the chunks alone and not on earlier packs. Jobs that share a frozen base therefore write equal packs from
their first common cut on.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field

from awscrt import checksums
from blake3 import blake3

from baton.contract.checkpoints.manifest import Manifest, Pack
from gpu_client.transport.transfer.transfer_requests import Segment

MIN_PACK_BYTES = 32 * 1024 * 1024
"""Minimum size of every pack except the last, which limits new packs to (new bytes / MIN_PACK_BYTES + 1)."""
MAX_PACK_BYTES = 64 * 1024 * 1024
"""Maximum size of a pack. A large chunk at the end of a pack below MIN_PACK_BYTES may exceed the bound."""
_USUAL_CUT_BYTES = 16 * 1024 * 1024
"""Mean distance of a cut behind MIN_PACK_BYTES, independent of the chunk sizes."""
_STEPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Factors by which the three sizes grow with the checkpoint; few, so that jobs of similar size cut alike."""
_PACKS = 4
"""Target number of packs of an entirely new checkpoint, until the packs reach their maximum size. Each pack costs a PUT
and the writes of its item, which are most of a checkpoint's cost."""

LARGE_CHUNK_BYTES = 256 * 1024

SPARE_PACKS = 8


class PackCutter:
    """Cutter that decides at which chunks packs begin. `checkpoint_bytes`: size of all files, new or not."""

    def __init__(self, checkpoint_bytes: int = 0) -> None:
        step = max((step for step in _STEPS if step * MIN_PACK_BYTES * _PACKS <= checkpoint_bytes), default=1.0)
        self.min_bytes = int(step * MIN_PACK_BYTES)
        self.max_bytes = int(step * MAX_PACK_BYTES)
        self._usual_cut_bytes = step * _USUAL_CUT_BYTES
        self._pack_bytes = 0
        self._ended = True

    def begins_pack(self, blake3: str, stored_bytes: int) -> bool:
        """Return True if the next chunk begins a pack."""
        exceeds = self._pack_bytes >= self.min_bytes and self._pack_bytes + stored_bytes > self.max_bytes
        begins = self._ended or exceeds
        self._pack_bytes = stored_bytes if begins else self._pack_bytes + stored_bytes
        chance = min(0.5, stored_bytes / self._usual_cut_bytes)
        self._ended = self._pack_bytes >= self.min_bytes and int(blake3[:8], 16) < chance * 2**32
        return begins


@dataclass(frozen=True, slots=True)
class StoredDigest:
    """Digests of a chunk's stored bytes: `blake3` as 32 bytes, `crc64nvme` as a number."""

    size_bytes: int
    blake3: bytes
    crc64nvme: int

    @classmethod
    def of(cls, stored: bytes | memoryview, known: bytes | None = None) -> StoredDigest:
        """Digest stored bytes. `known`: their BLAKE3, if known to the caller."""
        return cls(len(stored), known or blake3(stored).digest(), checksums.crc64nvme(stored, 0))


@dataclass(slots=True)
class _PackInProgress:
    """A pack under construction. The digests of the chunks give name and CRC of the pack, without reading bytes."""

    size_bytes: int = 0
    digests: list[bytes] = field(default_factory=list)
    crc64nvme: int = 0
    segments: list[Segment] = field(default_factory=list)

    def append(self, stored: StoredDigest, segment: Segment) -> None:
        """Add a chunk. A segment that continues the last segment of the same file extends the last segment."""
        self.size_bytes += stored.size_bytes
        self.digests.append(stored.blake3)
        self.crc64nvme = checksums.combine_crc64nvme(self.crc64nvme, stored.crc64nvme, stored.size_bytes)
        last = self.segments[-1] if self.segments else None
        if last and (last.path, last.offset + last.size_bytes) == (segment.path, segment.offset):
            self.segments[-1] = Segment(last.path, last.offset, last.size_bytes + segment.size_bytes)
        else:
            self.segments.append(segment)


@dataclass(frozen=True, slots=True)
class NewPack:
    """A pack and the local segments of its bytes."""

    pack: Pack
    segments: tuple[Segment, ...]


class PackWriter:
    """Writer that puts new chunks into packs and records the segments of the bytes, not the bytes."""

    def __init__(self, checkpoint_bytes: int = 0) -> None:
        self._cutter = PackCutter(checkpoint_bytes)
        self._growing: _PackInProgress | None = None
        self.packs: list[NewPack] = []
        """The finished packs."""

    def add(self, blake3: str, stored: StoredDigest, segment: Segment) -> tuple[int, int]:
        """Add a chunk with its stored bytes at `segment`. Returns its pack (an index in `packs`) and its offset."""
        if self._cutter.begins_pack(blake3, stored.size_bytes) or self._growing is None:
            self.finish()
            self._growing = _PackInProgress()
        offset = self._growing.size_bytes
        self._growing.append(stored, segment)
        return len(self.packs), offset

    def finish(self) -> None:
        """Finish the last pack."""
        if self._growing is None:
            return
        grown = self._growing
        pack = Pack(
            blake3=name_pack(grown.digests),
            size_bytes=grown.size_bytes,
            crc64nvme=base64.b64encode(grown.crc64nvme.to_bytes(8, "big")).decode(),
        )
        self.packs.append(NewPack(pack, tuple(grown.segments)))
        self._growing = None


def name_pack(digests: Iterable[bytes]) -> str:
    """Return the name of a pack: the BLAKE3 of the BLAKE3s of its chunks' stored bytes, 32 bytes each.

    Hashing the bytes once more would double the cost, and the name identifies the bytes as well.
    """
    return blake3(b"".join(digests)).hexdigest()


def find_sparse_packs(manifest: Manifest) -> frozenset[str]:
    """Return the BLAKE3s of packs whose chunks the next checkpoint should write anew; empty while packs are few.

    A restore sends a request for each pack, therefore the number of packs has a bound: twice the packs that the
    checkpoint's bytes need, plus SPARE_PACKS. Beyond the bound, the function returns the packs with the smallest live
    share, so that half of the bound is left.
    """
    live_bytes = [0] * len(manifest.packs)
    for chunk in manifest.chunks:
        if chunk.pack is not None:
            live_bytes[chunk.pack] += chunk.stored_bytes
    most = 2 * -(-sum(live_bytes) // MIN_PACK_BYTES) + SPARE_PACKS
    if len(manifest.packs) <= most:
        return frozenset()
    by_share = sorted(
        (live / max(1, pack.size_bytes), pack.blake3) for live, pack in zip(live_bytes, manifest.packs, strict=True)
    )
    return frozenset(blake3 for _, blake3 in by_share[: len(by_share) - most // 2])
