"""What is stored already, as far as this worker knows: the chunks of the checkpoint that it resumed or wrote last."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.contract.manifest import Chunk, Manifest, Pack
from gpu_client.checkpoints.format.packing import find_sparse_packs
from gpu_client.transport.transfer.transfer_requests import Segment


class LocalChunks(Protocol):
    """Where raw bytes of chunks lie on this machine; LocalStore is one."""

    def find(self, blake3: str) -> Segment | None:
        """The bytes of that chunk, not verified; None if they are not here."""
        ...


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk in a pack. `base`: that of a delta."""

    chunk: Chunk
    pack: Pack
    base: StoredChunk | None = None


class ChunkIndex:
    """Chunks that need not be sent again. One thread changes it.

    The control plane has the last word: what it says is not stored (any more) is forgotten.
    """

    def __init__(self, raw: LocalChunks | None = None) -> None:
        self.raw = raw
        self._stored: dict[str, StoredChunk] = {}
        self._places: dict[tuple[str, int], Chunk] = {}
        self._bases: dict[str, str] = {}

    @classmethod
    def from_manifests(cls, manifests: Iterable[Manifest], raw: LocalChunks | None = None) -> ChunkIndex:
        """The chunks of committed manifests, the newest last. `raw`: for bases of deltas."""
        known = cls(raw)
        for manifest in manifests:
            known._take(manifest)
        return known

    def learn(self, manifest: Manifest) -> None:
        """This one was committed: from now on it alone counts, for retention may take away what others name."""
        self._stored = {}
        self._take(manifest)

    def forget(self, packs: Collection[str]) -> None:
        """These packs (by BLAKE3) are not stored any more, or not worth keeping alive."""
        self._stored = {
            blake3: stored
            for blake3, stored in self._stored.items()
            if stored.pack.blake3 not in packs and (stored.base is None or stored.base.pack.blake3 not in packs)
        }

    def find(self, blake3: str) -> StoredChunk | None:
        """The chunk of that digest."""
        return self._stored.get(blake3)

    def base_for(self, path: str, offset: int, size_bytes: int) -> StoredChunk | None:
        """The chunk to take the difference to: the one at this place in the newest checkpoint, or that one's own base.

        Never a delta, so that a chunk can be read with one other.
        """
        chunk = self._places.get((path, offset))
        if chunk is None or chunk.size_bytes != size_bytes:
            return None
        return self._stored.get(self._bases.get(chunk.blake3, chunk.blake3))

    def _take(self, manifest: Manifest) -> None:
        self._bases = {}
        # bases first; and what is stored whole is not given up for a delta
        for chunk in sorted(manifest.chunks, key=lambda chunk: chunk.base is not None):
            if chunk.pack is None:
                continue
            pack = manifest.packs[chunk.pack]
            if chunk.base is None:
                self._stored[chunk.blake3] = StoredChunk(chunk, pack)
                continue
            base = manifest.chunks[chunk.base].blake3
            self._bases[chunk.blake3] = base
            # a base of zeros lies in no pack, and is not worth the trouble
            if base in self._stored:
                self._stored.setdefault(chunk.blake3, StoredChunk(chunk, pack, self._stored[base]))
        self._places = {}
        for file in manifest.files:
            offset = 0
            for index in file.chunks:
                self._places[file.path, offset] = manifest.chunks[index]
                offset += manifest.chunks[index].size_bytes
        self.forget(find_sparse_packs(manifest))
