"""How chunks become packs: large ones first in the order of their files, small ones behind, cut where content says so.

Cuts depend on the chunks alone, not on what was stored before them: jobs that share a frozen base write equal packs
from the first cut on that they have in common.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field

from awscrt import checksums
from blake3 import blake3

from baton.contract.manifest import Manifest, Pack
from gpu_client.transport.transfer.transfer_requests import Segment

MIN_PACK_BYTES = 32 * 1024 * 1024
"""A pack is not cut below this: there are never more than new bytes / MIN_PACK_BYTES + 1 of them."""
MAX_PACK_BYTES = 64 * 1024 * 1024
"""Exceeded only by a chunk that is large itself, in a pack that is not yet worth its PUT."""
_USUAL_CUT_BYTES = 16 * 1024 * 1024
"""Behind MIN_PACK_BYTES a cut comes after about as many bytes, however large the chunks are."""
_STEPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""By which all three rise with the checkpoint. Few steps: jobs of about the same size shall cut alike."""
_PACKS = 4
"""A checkpoint of which everything is new has about so many packs, until they are as large as they get: each costs a
PUT and the writes of its item, most of what a checkpoint costs."""

LARGE_CHUNK_BYTES = 256 * 1024

SPARE_PACKS = 8


class PackCutter:
    """Says where packs begin, chunk by chunk. `checkpoint_bytes`: of all its files, new or not."""

    def __init__(self, checkpoint_bytes: int = 0) -> None:
        step = max((step for step in _STEPS if step * MIN_PACK_BYTES * _PACKS <= checkpoint_bytes), default=1.0)
        self.min_bytes = int(step * MIN_PACK_BYTES)
        self.max_bytes = int(step * MAX_PACK_BYTES)
        self._usual_cut_bytes = step * _USUAL_CUT_BYTES
        self._pack_bytes = 0
        self._ended = True

    def begins_pack(self, blake3: str, stored_bytes: int) -> bool:
        """The next chunk: True if it is the first of a pack."""
        exceeds = self._pack_bytes >= self.min_bytes and self._pack_bytes + stored_bytes > self.max_bytes
        begins = self._ended or exceeds
        self._pack_bytes = stored_bytes if begins else self._pack_bytes + stored_bytes
        chance = min(0.5, stored_bytes / self._usual_cut_bytes)
        self._ended = self._pack_bytes >= self.min_bytes and int(blake3[:8], 16) < chance * 2**32
        return begins


@dataclass(frozen=True, slots=True)
class StoredDigest:
    """Of the bytes that a pack holds of a chunk. `blake3` is 32 bytes, `crc64nvme` the number."""

    size_bytes: int
    blake3: bytes
    crc64nvme: int

    @classmethod
    def of(cls, stored: bytes | memoryview, known: bytes | None = None) -> StoredDigest:
        """`known`: their BLAKE3, where somebody has it already."""
        return cls(len(stored), known or blake3(stored).digest(), checksums.crc64nvme(stored, 0))


@dataclass(slots=True)
class _PackInProgress:
    """A pack that is being put together.

    No byte is read for it: a pack is named by the digests of its chunks, and its CRC is put together from theirs.
    """

    size_bytes: int = 0
    digests: list[bytes] = field(default_factory=list)
    crc64nvme: int = 0
    segments: list[Segment] = field(default_factory=list)

    def append(self, stored: StoredDigest, segment: Segment) -> None:
        """What lies behind the last segment in the same file makes it longer."""
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
    """A pack, and where its bytes lie here."""

    pack: Pack
    segments: tuple[Segment, ...]


class PackWriter:
    """Puts new chunks into packs. Keeps no bytes: it notes where they lie."""

    def __init__(self, checkpoint_bytes: int = 0) -> None:
        self._cutter = PackCutter(checkpoint_bytes)
        self._growing: _PackInProgress | None = None
        self.packs: list[NewPack] = []
        """Those that are complete."""

    def add(self, blake3: str, stored: StoredDigest, segment: Segment) -> tuple[int, int]:
        """A chunk whose stored bytes lie at `segment`. Returns its pack (an index in `packs`) and its offset."""
        if self._cutter.begins_pack(blake3, stored.size_bytes) or self._growing is None:
            self.finish()
            self._growing = _PackInProgress()
        offset = self._growing.size_bytes
        self._growing.append(stored, segment)
        return len(self.packs), offset

    def finish(self) -> None:
        """No more chunks."""
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
    """The BLAKE3 that names a pack: of the BLAKE3s of what it stores of each chunk, 32 bytes each.

    It stands for the bytes as theirs would, and hashing them once more would cost as much as all else does.
    """
    return blake3(b"".join(digests)).hexdigest()


def find_sparse_packs(manifest: Manifest) -> frozenset[str]:
    """BLAKE3s of the packs whose chunks the next checkpoint should write anew; none while the packs are few enough.

    More than twice the packs that its bytes need, and some, are too many: fetching it takes that many requests. Then
    those go that hold the least of it, until half as many are left.
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
