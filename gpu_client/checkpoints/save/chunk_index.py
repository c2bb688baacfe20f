"""Index the stored chunks of the worker's last checkpoint, which the worker restored or committed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.contract.checkpoints.manifest import Chunk, Manifest, Pack
from gpu_client.checkpoints.format.packing import find_sparse_packs
from gpu_client.transport.transfer.transfer_requests import Segment


class LocalChunks(Protocol):
    """Source of raw chunks on this machine, implemented by LocalChunkCache."""

    def find(self, blake3: str) -> Segment | None:
        """Return the unverified bytes of a chunk; None if the machine lacks the chunk."""
        ...


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk in a stored pack. `base`: the base of a delta."""

    chunk: Chunk
    pack: Pack
    base: StoredChunk | None = None


class ChunkIndex:
    """Index of stored chunks, which need no upload. One thread changes the index.

    The control plane has the last word: the index forgets packs that the control plane reports as missing.
    """

    def __init__(self, raw: LocalChunks | None = None) -> None:
        self.raw = raw
        self._stored: dict[str, StoredChunk] = {}
        self._places: dict[tuple[str, int], Chunk] = {}
        self._bases: dict[str, str] = {}

    @classmethod
    def from_manifests(cls, manifests: Iterable[Manifest], raw: LocalChunks | None = None) -> ChunkIndex:
        """Index the chunks of committed manifests, newest last. `raw`: source of the bases of deltas."""
        known = cls(raw)
        for manifest in manifests:
            known._take(manifest)
        return known

    def learn(self, manifest: Manifest) -> None:
        """Replace the indexed manifests, whose packs retention may delete, by a newly committed manifest."""
        self._stored = {}
        self._take(manifest)

    def forget(self, packs: Collection[str]) -> None:
        """Remove the chunks of packs (by BLAKE3) that are no longer stored or too sparse."""
        self._stored = {
            blake3: stored
            for blake3, stored in self._stored.items()
            if stored.pack.blake3 not in packs and (stored.base is None or stored.base.pack.blake3 not in packs)
        }

    def find(self, blake3: str) -> StoredChunk | None:
        """Return the stored chunk with a digest, or None."""
        return self._stored.get(blake3)

    def base_for(self, path: str, offset: int, size_bytes: int) -> StoredChunk | None:
        """Return the base for a delta: the chunk at this place in the newest checkpoint, or the base of this chunk.

        The base is never a delta, so that a reader needs at most one other chunk.
        """
        chunk = self._places.get((path, offset))
        if chunk is None or chunk.size_bytes != size_bytes:
            return None
        return self._stored.get(self._bases.get(chunk.blake3, chunk.blake3))

    def _take(self, manifest: Manifest) -> None:
        self._bases = {}
        # Bases come first. A delta never replaces a chunk that is stored as a whole.
        for chunk in sorted(manifest.chunks, key=lambda chunk: chunk.base is not None):
            if chunk.pack is None:
                continue
            pack = manifest.packs[chunk.pack]
            if chunk.base is None:
                self._stored[chunk.blake3] = StoredChunk(chunk, pack)
                continue
            base = manifest.chunks[chunk.base].blake3
            self._bases[chunk.blake3] = base
            # A base of zeros is in no pack, therefore the index lacks the base.
            if base in self._stored:
                self._stored.setdefault(chunk.blake3, StoredChunk(chunk, pack, self._stored[base]))
        self._places = {}
        for file in manifest.files:
            offset = 0
            for index in file.chunks:
                self._places[file.path, offset] = manifest.chunks[index]
                offset += manifest.chunks[index].size_bytes
        self.forget(find_sparse_packs(manifest))
