"""Restore plans and manifest reading: exactly the needed ranges, few requests, bounded sizes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.contract.checkpoints.calls import CheckpointRef
from baton.contract.checkpoints.manifest import Chunk, Manifest, Pack
from gpu_client.checkpoints.format.manifest_reader import (
    BadManifest,
    ChunkPlace,
    UnknownVersion,
    count_written_bytes,
    map_places,
    read_manifest,
)
from gpu_client.checkpoints.restore.restore_plan import (
    MAX_GAP_BYTES,
    MAX_RANGE_BYTES,
    PackRange,
    count_scratch_bytes,
    find_bases,
    plan_ranges,
)
from gpu_client.transport.net.digests import digest_bytes
from tests.unit.checkpoints.fake_cloud import JOB_ID
from tests.unit.checkpoints.made_checkpoints import Maker

CRC = "UvieJR3alJI="
MIB = 1024 * 1024


def layout(packs: list[list[Chunk]], sizes: list[int] | None = None) -> Manifest:
    """A manifest of nothing but packs and chunks: no bytes are needed to plan."""
    return Manifest.model_construct(
        packs=[
            Pack.model_construct(
                blake3="",
                crc64nvme=CRC,
                size_bytes=sizes[number] if sizes else max((end(one) for one in chunks), default=0),
            )
            for number, chunks in enumerate(packs)
        ],
        chunks=[chunk for chunks in packs for chunk in chunks],
        files=[],
    )


def end(chunk: Chunk) -> int:
    return chunk.offset + chunk.stored_bytes


def raw(pack: int, offset: int, size_bytes: int) -> Chunk:
    return Chunk.model_construct(blake3="", pack=pack, offset=offset, size_bytes=size_bytes)


def encoded(pack: int, offset: int, length_bytes: int, base: int | None = None) -> Chunk:
    return Chunk.model_construct(
        blake3="",
        pack=pack,
        offset=offset,
        size_bytes=2**30,
        length_bytes=length_bytes,
        codec="delta" if base is not None else "planes",
        base=base,
    )


def bytes_of(ranges: list[PackRange]) -> list[tuple[int, int, int]]:
    return [(one.pack, one.offset, one.size_bytes) for one in ranges]


# Sizes around the limits, in whole and odd numbers.
SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(MAX_GAP_BYTES - 2, MAX_GAP_BYTES + 2),
    st.integers(1, 40).map(lambda mib: mib * MIB + 1),
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Manifest, set[int]]:
    packs: list[list[Chunk]] = []
    for number in range(draw(st.integers(1, 3))):
        offset = 0
        chunks: list[Chunk] = []
        for size_bytes, gap, is_raw in draw(
            st.lists(
                st.tuples(SIZES, st.sampled_from([0, 0, 1, MAX_GAP_BYTES, MAX_GAP_BYTES + 1]), st.booleans()),
                min_size=1,
                max_size=12,
            )
        ):
            offset += gap
            chunks.append((raw if is_raw else encoded)(number, offset, size_bytes))
            # Chunks may even overlap: nothing forbids it.
            offset += draw(st.sampled_from([size_bytes, size_bytes, size_bytes, size_bytes // 2]))
        packs.append(chunks)
    count = sum(len(chunks) for chunks in packs)
    wanted = draw(st.sets(st.integers(0, count - 1)))
    return layout(packs), wanted


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_the_plan_covers_exactly_what_is_wanted(made: tuple[Manifest, set[int]]) -> None:
    manifest, wanted = made
    ranges = plan_ranges(manifest, wanted)
    parts = [(part, one) for one in ranges for part in one.parts]
    for index in wanted:
        chunk = manifest.chunks[index]
        mine = sorted((part.start, part.size_bytes, part.offset) for part, one in parts if part.chunk == index)
        # The chunk's parts are its stored bytes, one after the other, each once.
        assert [start for start, _, _ in mine] == [sum(size for _, size, _ in mine[:n]) for n in range(len(mine))]
        assert sum(size for _, size, _ in mine) == chunk.stored_bytes
        assert all(offset == chunk.offset + start for start, _, offset in mine)
        assert chunk.codec == "raw" or len(mine) == 1, "what is decoded comes whole"
    assert {part.chunk for part, _ in parts} == wanted
    for part, one in parts:
        assert manifest.chunks[part.chunk].pack == one.pack
        assert one.offset <= part.offset
        assert part.offset + part.size_bytes <= one.offset + one.size_bytes


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_ranges_are_bounded_and_begin_and_end_with_what_is_wanted(made: tuple[Manifest, set[int]]) -> None:
    manifest, wanted = made
    for one in plan_ranges(manifest, wanted):
        assert one.size_bytes <= MAX_RANGE_BYTES or (
            len(one.parts) == 1 and manifest.chunks[one.parts[0].chunk].codec != "raw"
        )
        assert one.offset == min(part.offset for part in one.parts)
        assert one.offset + one.size_bytes == max(part.offset + part.size_bytes for part in one.parts)
        assert one.offset + one.size_bytes <= manifest.packs[one.pack].size_bytes


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_what_nobody_wants_is_fetched_only_in_small_gaps_or_of_packs_that_are_mostly_wanted(
    made: tuple[Manifest, set[int]],
) -> None:
    manifest, wanted = made
    for one in plan_ranges(manifest, wanted):
        of_pack = sum(chunk.stored_bytes for index in wanted if (chunk := manifest.chunks[index]).pack == one.pack)
        if 2 * of_pack > manifest.packs[one.pack].size_bytes:
            continue
        reached = one.offset
        for part in sorted(one.parts, key=lambda part: part.offset):
            assert part.offset - reached <= MAX_GAP_BYTES
            reached = max(reached, part.offset + part.size_bytes)


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_neighbours_that_fit_one_request_are_one(made: tuple[Manifest, set[int]]) -> None:
    manifest, wanted = made
    assume(
        not any(
            end(a) > b.offset for a, b in zip(manifest.chunks, manifest.chunks[1:], strict=False) if a.pack == b.pack
        )
    )
    ranges = plan_ranges(manifest, wanted)
    for before, behind in pairwise(ranges):
        if before.pack != behind.pack:
            continue
        gap = behind.offset - (before.offset + before.size_bytes)
        first = behind.parts[0]
        assert gap > MAX_GAP_BYTES or first.offset + first.size_bytes - before.offset > MAX_RANGE_BYTES


def test_a_pack_that_is_mostly_wanted_is_one_range() -> None:
    chunks = [raw(0, 0, 3 * MIB), raw(0, 3 * MIB, 2 * MIB), raw(0, 5 * MIB, 3 * MIB)]
    assert bytes_of(plan_ranges(layout([chunks]), {0, 2})) == [(0, 0, 8 * MIB)]
    # Exactly half of it is not most of it.
    assert bytes_of(plan_ranges(layout([chunks], [12 * MIB]), {0, 2})) == [(0, 0, 3 * MIB), (0, 5 * MIB, 3 * MIB)]


def test_a_gap_of_a_mebibyte_is_read_over_and_no_larger_one() -> None:
    for gap, expected in ((MIB, [(0, 0, MIB + 20)]), (MIB + 1, [(0, 0, 10), (0, MIB + 11, 10)])):
        manifest = layout([[raw(0, 0, 10), raw(0, 10 + gap, 10)]], [64 * MIB])
        assert bytes_of(plan_ranges(manifest, {0, 1})) == expected


def test_a_large_raw_chunk_comes_in_parts_and_a_large_encoded_one_whole() -> None:
    manifest = layout([[raw(0, 5, 33 * MIB), encoded(0, 5 + 33 * MIB, 17 * MIB)]])
    sizes = [one.size_bytes for one in plan_ranges(manifest, {0, 1})]
    assert sizes == [16 * MIB, 16 * MIB, MIB, 17 * MIB]


def test_bases_come_first() -> None:
    manifest = layout([[raw(0, 0, 10)], [encoded(1, 0, 10, base=2)], [raw(2, 0, 10)]])
    assert [one.pack for one in plan_ranges(manifest, {0, 1, 2})] == [2, 0, 1]
    assert find_bases(manifest.chunks, {0, 1}) == {2}


def test_bases_that_no_file_has_need_room() -> None:
    maker = Maker()
    outside, inside = maker.chunk(b"a" * 10), maker.chunk(b"b" * 11)
    zeros = maker.chunk(bytes(12), codec="zeros")
    deltas = [maker.chunk(b"c" * n, codec="delta", base=base) for n, base in ((10, outside), (11, inside), (12, zeros))]
    maker.file("f", [inside, *deltas])
    assert count_scratch_bytes(maker.manifest) == 10
    assert count_written_bytes(maker.manifest) == 11 + 10 + 11 + 12


def test_nothing_wanted_is_nothing_fetched() -> None:
    assert plan_ranges(layout([[raw(0, 0, 10)]]), set()) == []


def test_places_are_all_places() -> None:
    maker = Maker()
    a, b = maker.chunk(b"a" * 10), maker.chunk(b"b" * 7)
    zeros = maker.chunk(bytes(5), codec="zeros")
    maker.file("x", [a, zeros, b, a])
    maker.file("y", [b])
    maker.file("empty", [])
    assert map_places(maker.manifest) == {
        a: [ChunkPlace(0, 0), ChunkPlace(0, 22)],
        b: [ChunkPlace(0, 15), ChunkPlace(1, 0)],
    }
    assert count_written_bytes(maker.manifest) == 10 + 7 + 10 + 7


class TestReadingTheManifest:
    """A worker accepts only the manifest that was committed."""

    def maker(self) -> Maker:
        maker = Maker()
        base = maker.chunk(b"abcdefgh", codec="planes", width=2)
        maker.file("model.bin", [base, maker.chunk(b"abcdefgi", codec="delta", base=base), maker.chunk(b"x" * 9)])
        return maker

    def ref(self, data: bytes) -> CheckpointRef:
        return CheckpointRef(
            step=100, epoch=1, manifest_url="", manifest_blake3=digest_bytes(data).blake3, total_bytes=1
        )

    def read(self, data: bytes) -> Manifest:
        return read_manifest(data, job_id=JOB_ID, ref=self.ref(data))

    def test_it_comes_back_as_it_was(self) -> None:
        manifest = self.maker().manifest
        assert self.read(manifest.canonical_bytes()) == manifest

    def test_other_bytes_than_the_claim_says_are_refused(self) -> None:
        data = self.maker().manifest.canonical_bytes()
        with pytest.raises(BadManifest, match="digest"):
            read_manifest(data + b" ", job_id=JOB_ID, ref=self.ref(data))

    @pytest.mark.parametrize("other", [{"step": 101}, {"epoch": 2}, {"job_id": JOB_ID.replace("1", "2")}])
    def test_another_checkpoints_manifest_is_refused(self, other: dict[str, object]) -> None:
        data = json.dumps(json.loads(self.maker().manifest.canonical_bytes()) | other).encode()
        with pytest.raises(BadManifest, match="belongs to job"):
            self.read(data)

    @pytest.mark.parametrize("version", [0, 1, 3, 99])
    def test_another_version_is_no_damage_and_says_what_can_read_it(self, version: int) -> None:
        data = json.dumps({"version": version, "layers": {}}).encode()
        with pytest.raises(UnknownVersion, match=f"version {version}; this worker reads version 2: use"):
            self.read(data)

    @pytest.mark.parametrize("version", ["3", None, True, 1.5])
    def test_a_version_that_never_was_is_damage(self, version: object) -> None:
        data = json.dumps({"version": version, "files": []}).encode()
        with pytest.raises(BadManifest):
            self.read(data)

    @pytest.mark.parametrize("data", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000])
    def test_anything_else_is_damage(self, data: bytes) -> None:
        with pytest.raises(BadManifest):
            self.read(data)

    @pytest.mark.parametrize(
        ("lie", "value"),
        [
            (("files", 0, "path"), "../../evil"),
            (("files", 0, "path"), "/etc/passwd"),
            (("files", 0, "path"), "a/../b"),
            (("files", 0, "path"), "a\x00b"),
            (("files", 0, "size_bytes"), 26),
            (("files", 0, "size_bytes"), -1),
            (("files", 0, "chunks"), [0, 1, 3]),
            (("files", 0, "chunks"), [0, 1, -1]),
            (("files", 0, "chunks"), [0, 0, 2]),
            (("files",), []),
            (("chunks", 0, "size_bytes"), 9),
            (("chunks", 0, "size_bytes"), 0),
            (("chunks", 0, "size_bytes"), 2**31),
            (("chunks", 0, "length_bytes"), 2**20),
            (("chunks", 2, "length_bytes"), 4),
            (("chunks", 2, "offset"), 10**6),
            (("chunks", 2, "offset"), -1),
            (("chunks", 2, "pack"), 1),
            (("chunks", 2, "pack"), None),
            (("chunks", 2, "codec"), "zeros"),
            (("chunks", 2, "codec"), "gzip"),
            (("chunks", 0, "width"), 3),
            (("chunks", 1, "base"), 1),
            (("chunks", 1, "base"), 2),
            (("chunks", 1, "base"), 7),
            (("chunks", 1, "base"), None),
            (("chunks", 2, "base"), 0),
            (("packs", 0, "size_bytes"), 3),
            (("packs",), []),
        ],
    )  # fmt: skip
    def test_a_manifest_that_lies_is_damage(self, lie: tuple[str | int, ...], value: object) -> None:
        found = json.loads(self.maker().manifest.canonical_bytes())
        place = found
        for key in lie[:-1]:
            place = place[key]
        place[lie[-1]] = value
        with pytest.raises(BadManifest):
            self.read(json.dumps(found).encode())
