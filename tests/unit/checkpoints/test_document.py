"""Read checkpoints with a reader that is written from docs/checkpoints.md alone.

`read` knows JSON, BLAKE3 and zstd, and nothing of gpu_client.checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3

from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.checkpoints.save.manifest_builder import LocalManifest, build_manifest
from tests.unit.checkpoints.fake_cloud import JOB_ID
from tests.unit.checkpoints.made_checkpoints import Maker

SLOW_LINE = 1e6
"""Bytes per second that every codec pays on."""

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


# ----- from the document -----


def verified(data: bytes, digest: str) -> bytes:
    assert blake3(data).hexdigest() == digest
    return data


def decompressed(stored: bytes, width: int, size_bytes: int) -> bytes:
    planes = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size_bytes)
    elements = size_bytes // width
    data = bytearray(planes)
    for index in range(width):
        data[index : elements * width : width] = planes[index * elements : (index + 1) * elements]
    return bytes(data)


def decoded(manifest: dict[str, Any], index: int, get: Callable[[str], bytes]) -> bytes:
    chunk = manifest["chunks"][index]
    size_bytes, codec = chunk["size_bytes"], chunk.get("codec", "raw")
    if codec == "zeros":
        return verified(bytes(size_bytes), chunk["blake3"])
    pack = get("packs/" + manifest["packs"][chunk["pack"]]["blake3"])
    offset = chunk.get("offset", 0)
    data = pack[offset : offset + chunk.get("length_bytes", size_bytes)]
    if codec != "raw":
        data = decompressed(data, chunk.get("width", 1), size_bytes)
    if codec == "delta":
        base = decoded(manifest, chunk["base"], get)
        data = bytes(one ^ other for one, other in zip(data, base, strict=True))
    return verified(data, chunk["blake3"])


def read(data: bytes, digest: str, get: Callable[[str], bytes]) -> dict[str, bytes]:
    manifest = json.loads(verified(data, digest))
    assert manifest["version"] == 2
    files = {}
    for file in manifest["files"]:
        files[file["path"]] = b"".join(decoded(manifest, index, get) for index in file["chunks"])
        assert len(files[file["path"]]) == file["size_bytes"]
    return files


# ----- what it reads -----


class Bucket:
    """Packs by key."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def take(self, local: LocalManifest) -> None:
        for digest, segments in local.packs.items():
            pieces = []
            for segment in segments:
                with segment.path.open("rb") as file:
                    file.seek(segment.offset)
                    pieces.append(file.read(segment.size_bytes))
            self.objects["packs/" + digest] = b"".join(pieces)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint with something for each codec but delta."""
    place = tmp_path / "first"
    (place / "sub").mkdir(parents=True)
    random = np.random.default_rng(1)
    weights = random.normal(0, 0.02, 100_001).astype(np.float32).tobytes()
    (place / "weights.bin").write_bytes(weights + b"end")
    (place / "noise").write_bytes(random.bytes(200_000))
    (place / "zeros").write_bytes(bytes(150_000))
    (place / "sub" / "mit ä.txt").write_bytes(b"text")
    (place / "empty").touch()
    return place


def test_it_reads_what_is_built(directory: Path, tmp_path: Path) -> None:
    bucket, store = Bucket(), LocalChunkCache(tmp_path / "store", JOB_ID)
    known = ChunkIndex.from_manifests([], store)
    first = build_manifest(
        directory, job_id=JOB_ID, step=1, epoch=1, metrics={"loss": 0.5, "accuracy": 1.0}, known=known,
        upload_bytes_per_s=SLOW_LINE, spool=tmp_path / "spool",
    )  # fmt: skip
    bucket.take(first)
    expected = contents(directory)
    known.learn(first.manifest)
    store.record_committed(first.manifest, directory)

    later = tmp_path / "second"
    (later / "sub").mkdir(parents=True)
    for name, data in expected.items():
        (later / name).write_bytes(data)
    changed = np.frombuffer(expected["noise"], np.uint8).copy()
    changed[::5000] ^= 1
    (later / "noise").write_bytes(changed.tobytes())
    second = build_manifest(
        later, job_id=JOB_ID, step=2, epoch=1, known=known, upload_bytes_per_s=SLOW_LINE, spool=tmp_path / "spool"
    )
    bucket.take(second)

    chunks = [*first.manifest.chunks, *second.manifest.chunks]
    assert {chunk.codec for chunk in chunks} == {"raw", "zeros", "planes", "delta"}
    assert any(chunk.size_bytes % chunk.width for chunk in chunks if chunk.codec == "planes"), "bytes behind the planes"
    for local, place in ((first, None), (second, later)):
        data = local.manifest.canonical_bytes()
        found = read(data, blake3(data).hexdigest(), bucket.objects.__getitem__)
        assert found == (expected if place is None else contents(place))
        local.close()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_it_reads_every_width(width: int) -> None:
    made = Maker()
    raw = np.random.default_rng(2).integers(0, 4, 1003, np.uint8).tobytes()
    base = made.chunk(raw, codec="planes", width=width)  # type: ignore[arg-type]
    other = made.chunk(raw[::-1], codec="delta", width=width, base=base, gap=7)  # type: ignore[arg-type]
    nothing = made.chunk(bytes(1003), codec="zeros")
    made.chunk(raw[1:] + raw[:1], pack=1, codec="delta", width=width, base=nothing)  # type: ignore[arg-type]
    made.file("a", [other, nothing, 3, other])
    objects = {"packs/" + digest: body for digest, body in made.objects.items()}
    data = made.manifest.canonical_bytes()
    assert read(data, blake3(data).hexdigest(), objects.__getitem__) == made.contents


def test_the_example_is_as_long_as_it_says() -> None:
    example = json.loads(PAGE.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0])
    sizes = [chunk["size_bytes"] for chunk in example["chunks"]]
    assert [file["size_bytes"] for file in example["files"]] == [sum(sizes)]
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 110, "two pages"


def test_a_pack_is_named_as_the_document_says(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    place.mkdir()
    (place / "a").write_bytes(b"a" * 200_000)
    (place / "b").write_bytes(bytes(range(256)) * 2000)
    local = build_manifest(place, job_id=JOB_ID, step=1, epoch=1)
    (pack,) = local.manifest.packs
    stored = [bytes.fromhex(chunk.blake3) for chunk in sorted(local.manifest.chunks, key=lambda chunk: chunk.offset)]
    assert {chunk.codec for chunk in local.manifest.chunks} == {"raw"}, "so what is stored is the chunk"
    assert blake3(b"".join(stored)).hexdigest() == pack.blake3
