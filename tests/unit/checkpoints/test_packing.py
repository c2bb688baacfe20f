"""Packs: few, within their sizes, and equal for jobs with equal chunks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.checkpoints.manifest import Chunk, ChunkedFile, Manifest, Pack
from gpu_client.checkpoints.format.packing import (
    MAX_PACK_BYTES,
    MIN_PACK_BYTES,
    SPARE_PACKS,
    PackCutter,
    PackWriter,
    StoredDigest,
    find_sparse_packs,
)
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.transfer_requests import Segment
from tests.unit.checkpoints.fake_cloud import JOB_ID

KIB = 1024
MIB = 1024 * KIB
CRC = "AAAAAAAAAAA="
Sized = tuple[str, int]


def chunk(name: object, size_bytes: int) -> Sized:
    return blake3(str(name).encode()).hexdigest(), size_bytes


def packs_of(chunks: list[Sized], checkpoint_bytes: int = 0) -> list[tuple[Sized, ...]]:
    cutter = PackCutter(checkpoint_bytes)
    packs: list[list[Sized]] = []
    for one in chunks:
        if cutter.begins_pack(*one):
            packs.append([])
        packs[-1].append(one)
    return [tuple(pack) for pack in packs]


def size_of(pack: tuple[Sized, ...]) -> int:
    return sum(size for _, size in pack)


chunk_sizes = st.sampled_from([1, 100, 64 * KIB, 255 * KIB, 300 * KIB, MIB, 3 * MIB, 8 * MIB])


@given(st.lists(chunk_sizes, max_size=300), st.integers())
def test_packs_are_few_and_of_the_right_size(sizes: list[int], seed: int) -> None:
    packs = packs_of([chunk((seed, index), size) for index, size in enumerate(sizes)])
    assert sum(map(len, packs)) == len(sizes)
    assert all(size_of(pack) >= MIN_PACK_BYTES for pack in packs[:-1])
    assert all(size_of(pack) <= MAX_PACK_BYTES for pack in packs)
    assert len(packs) <= sum(sizes) / MIN_PACK_BYTES + 1


@pytest.mark.parametrize(
    ("checkpoint_bytes", "least_mib"),
    [(0, 32), (100 * MIB, 32), (191 * MIB, 32), (192 * MIB, 48), (10**9, 192), (1024 * MIB, 256), (2**40, 256)],
)
def test_packs_grow_with_the_checkpoint(checkpoint_bytes: int, least_mib: int) -> None:
    cutter = PackCutter(checkpoint_bytes)
    assert (cutter.min_bytes, cutter.max_bytes) == (least_mib * MIB, 2 * least_mib * MIB)


def test_a_gigabyte_of_new_bytes_is_few_packs() -> None:
    total_bytes = 10**9
    chunks = [chunk(index, 8 * MIB) for index in range(total_bytes // (8 * MIB))]
    packs = packs_of(chunks, total_bytes)
    assert 3 <= len(packs) <= 5
    assert all(size_of(pack) >= 192 * MIB for pack in packs[:-1])


@given(st.lists(st.sampled_from([1, 30 * MIB, 100 * MIB, 1024 * MIB]), max_size=20))
def test_a_pack_that_is_too_small_is_not_cut_for_a_large_chunk(sizes: list[int]) -> None:
    packs = packs_of([chunk(index, size) for index, size in enumerate(sizes)])
    assert len(packs) <= sum(sizes) / MIN_PACK_BYTES + 1
    assert all(size_of(pack) >= MIN_PACK_BYTES for pack in packs[:-1])


@pytest.mark.parametrize("size_bytes", [256 * KIB, 2 * MIB, 8 * MIB])
def test_jobs_with_the_same_frozen_base_write_mostly_equal_packs(size_bytes: int) -> None:
    """Jobs with the same frozen base share most pack bytes, although one has other chunks before and between."""
    base = [chunk(("base", index), size_bytes) for index in range(800 * MIB // size_bytes)]
    randomness = random.Random(5)
    other: list[Sized] = [chunk("new", 5 * MIB)]
    for index, one in enumerate(base):
        other.append(one)
        if randomness.random() < 20 * MIB / 800 / MIB * size_bytes / 20 / MIB:
            other.append(chunk(("adapter", index), 300 * KIB))
    first, second = packs_of(base), packs_of(other)
    assert first[0] != second[0]
    shared_bytes = sum(size_of(pack) for pack in set(first) & set(second))
    assert shared_bytes > 0.5 * size_of(tuple(base))


def test_the_same_chunks_make_the_same_packs() -> None:
    chunks = [chunk(index, (index * 7919) % (8 * MIB) + 1) for index in range(100)]
    assert packs_of(chunks) == packs_of(chunks)


def test_packs_are_hashed_and_their_bytes_are_where_they_say(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in "ab"}
    contents = {"a": b"a" * 1000 + b"b" * 500, "b": b"c" * 70}
    for name, path in files.items():
        path.write_bytes(contents[name])
    writer = PackWriter()
    places = [
        writer.add("f" * 64, StoredDigest.of(b"a" * 1000), Segment(files["a"], 0, 1000)),
        writer.add("f" * 64, StoredDigest.of(b"b" * 500), Segment(files["a"], 1000, 500)),
        writer.add("f" * 64, StoredDigest.of(b"c" * 70), Segment(files["b"], 0, 70)),
    ]
    writer.finish()
    assert places == [(0, 0), (0, 1000), (0, 1500)]
    (new,) = writer.packs
    body = b"".join(
        segment.path.read_bytes()[segment.offset : segment.offset + segment.size_bytes] for segment in new.segments
    )
    stored = [b"a" * 1000, b"b" * 500, b"c" * 70]
    name = blake3(b"".join(blake3(data).digest() for data in stored)).hexdigest()
    crc = digest_bytes(b"".join(stored)).crc64nvme
    assert (new.pack.size_bytes, new.pack.blake3, new.pack.crc64nvme) == (1570, name, crc)
    assert body == contents["a"] + contents["b"]
    assert len(new.segments) == 2, "neighbours in a file are one segment"


def test_nothing_new_makes_no_pack() -> None:
    writer = PackWriter()
    writer.finish()
    assert writer.packs == []


def manifest_of(live: list[tuple[int, int]]) -> Manifest:
    """A checkpoint with packs of such (live, whole) bytes."""
    chunks = [Chunk(blake3=chunk(index, 0)[0], size_bytes=bytes_, pack=index) for index, (bytes_, _) in enumerate(live)]
    return Manifest(
        version=2,
        job_id=JOB_ID,
        step=1,
        epoch=1,
        packs=[
            Pack(blake3=chunk(("pack", index), 0)[0], size_bytes=whole, crc64nvme=CRC)
            for index, (_, whole) in enumerate(live)
        ],
        chunks=chunks,
        files=[
            ChunkedFile(path="f", size_bytes=sum(one.size_bytes for one in chunks), chunks=list(range(len(chunks))))
        ],
    )


def test_few_packs_are_left_as_they_are() -> None:
    assert find_sparse_packs(manifest_of([(MIB, 40 * MIB)] * (SPARE_PACKS + 2))) == frozenset()
    assert find_sparse_packs(manifest_of([(40 * MIB, 40 * MIB)] * 100)) == frozenset()


def test_of_too_many_packs_those_go_that_hold_the_least_of_the_checkpoint() -> None:
    manifest = manifest_of([(32 * MIB, 40 * MIB)] * 4 + [(MIB, 40 * MIB)] * 20)
    going = find_sparse_packs(manifest)
    by_digest = {pack.blake3: index for index, pack in enumerate(manifest.packs)}
    assert all(by_digest[digest] >= 4 for digest in going)
    live_bytes = 4 * 32 * MIB + 20 * MIB
    most = 2 * -(-live_bytes // MIN_PACK_BYTES) + SPARE_PACKS
    assert len(manifest.packs) > most
    assert len(manifest.packs) - len(going) <= most / 2 + 1
