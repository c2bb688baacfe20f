"""Build checkpoints chunk by chunk, as a foreign, odd or malicious writer could store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.contract.checkpoints.manifest import Chunk, ChunkedFile, Codec, Manifest, Pack
from gpu_client.checkpoints.format.codecs import encode
from gpu_client.transport.net.digests import digest_bytes
from tests.unit.checkpoints.fake_cloud import JOB_ID, FakeCloud


@dataclass
class Maker:
    """Chunks are added to packs, then to files; `manifest` is made of all that."""

    step: int = 100
    epoch: int = 1
    chunks: list[Chunk] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    bodies: list[bytearray] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)

    def chunk(
        self, raw: bytes, *, pack: int = 0, codec: Codec = "raw", width: int = 1, base: int | None = None, gap: int = 0
    ) -> int:
        """Put a chunk into a pack, behind `gap` bytes that no chunk names. Returns the chunk's index."""
        while codec != "zeros" and len(self.bodies) <= pack:
            self.bodies.append(bytearray())
        stored = encode(codec, memoryview(raw), width=width, base=None if base is None else memoryview(self.raw[base]))
        said: dict[str, Any] = {"blake3": digest_bytes(raw).blake3, "size_bytes": len(raw), "codec": codec}
        if codec != "zeros":
            self.bodies[pack] += b"?" * gap
            said |= {"pack": pack, "offset": len(self.bodies[pack])}
            self.bodies[pack] += stored
        if codec in ("planes", "delta"):
            said |= {"length_bytes": len(stored), "width": width, "base": base}
        self.chunks.append(Chunk(**said))
        self.raw.append(raw)
        return len(self.chunks) - 1

    def file(self, path: str, chunks: Sequence[int]) -> None:
        self.files[path] = list(chunks)

    @property
    def contents(self) -> dict[str, bytes]:
        return {path: b"".join(self.raw[index] for index in chunks) for path, chunks in self.files.items()}

    @property
    def packs(self) -> list[Pack]:
        found = [digest_bytes(bytes(body)) for body in self.bodies]
        return [Pack(blake3=one.blake3, size_bytes=one.size_bytes, crc64nvme=one.crc64nvme) for one in found]

    @property
    def objects(self) -> Mapping[str, bytes]:
        """The packs' bytes, by BLAKE3."""
        return {pack.blake3: bytes(body) for pack, body in zip(self.packs, self.bodies, strict=True)}

    @property
    def manifest(self) -> Manifest:
        return Manifest(
            version=2,
            job_id=JOB_ID,
            step=self.step,
            epoch=self.epoch,
            packs=self.packs,
            chunks=self.chunks,
            files=[
                ChunkedFile(path=path, size_bytes=sum(len(self.raw[index]) for index in chunks), chunks=chunks)
                for path, chunks in self.files.items()
            ],
        )


def put(cloud: FakeCloud, made: Maker) -> Manifest:
    """Commit it, without any worker."""
    manifest = made.manifest
    cloud.committed.append(manifest)
    cloud.store.objects[cloud.manifest_path(manifest)] = manifest.canonical_bytes()
    cloud.store.objects |= {cloud.pack_path(digest): body for digest, body in made.objects.items()}
    return manifest
