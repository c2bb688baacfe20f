"""Assembly of files from chunks in any order; unverified bytes never count."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.contract.checkpoints.manifest import Codec
from gpu_client.checkpoints.restore import restore_plan
from gpu_client.checkpoints.restore.file_assembler import FileAssembler, RawStream, can_stream
from gpu_client.checkpoints.restore.restore_plan import PackRange, plan_ranges
from gpu_client.transport.errors import ChecksumMismatch, TransferCanceled, UnsafePath
from gpu_client.transport.transfer.transfer_requests import Segment
from tests.kits.files.directories import files_below
from tests.unit.checkpoints.made_checkpoints import Maker


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class Site:
    """An assembly of `maker`'s checkpoint in an empty directory."""

    def __init__(self, maker: Maker, directory: Path, cancel: threading.Event | None = None) -> None:
        self.maker = maker
        self.manifest = maker.manifest
        self.content = directory / "content"
        self.objects = maker.objects
        self.assembly = FileAssembler(self.manifest, self.content, directory / "scratch", cancel=cancel)

    def plan(self) -> list[PackRange]:
        return plan_ranges(self.manifest, self.assembly.missing() | self.assembly.missing_bases())

    def data(self, found: PackRange) -> bytes:
        return self.objects[self.manifest.packs[found.pack].blake3][found.offset :][: found.size_bytes]

    def bring(self, found: PackRange, data: bytes | None = None) -> None:
        self.assembly.deliver(found, memoryview(self.data(found) if data is None else data))

    def stream(self, found: PackRange, data: bytes | None = None, *, piece_bytes: int) -> None:
        """Bring a range in pieces whose memory is overwritten afterwards, or whole if the range cannot stream."""
        if not can_stream(found, self.manifest.chunks):
            self.bring(found, data)
            return
        data = self.data(found) if data is None else data
        stream = RawStream(found, self.manifest.chunks, self.assembly)
        for start in range(0, len(data), piece_bytes):
            assert not stream.complete
            piece = bytearray(data[start : start + piece_bytes])
            stream.take(memoryview(piece))
            piece[:] = bytes(len(piece))
        assert stream.complete

    def bring_all(self) -> None:
        for found in self.plan():
            self.bring(found)
        self.assembly.decode_waiting()

    def assert_whole(self) -> None:
        self.assembly.finish()
        assert files_below(self.content) == self.maker.contents


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw chunks of more than 100 bytes come in parts."""
    monkeypatch.setattr(restore_plan, "MAX_RANGE_BYTES", 100)
    monkeypatch.setattr(restore_plan, "MAX_GAP_BYTES", 10)


@st.composite
def makers(draw: st.DrawFn) -> Maker:
    maker = Maker()
    made: dict[bytes, int] = {}
    plain: dict[int, list[int]] = {}
    for number in range(draw(st.integers(1, 12))):
        size_bytes = draw(st.sampled_from([1, 7, 64, 99, 100, 101, 250, 1000]))
        codec: Codec = draw(st.sampled_from(["raw", "raw", "zeros", "planes", "delta"]))
        if codec == "delta" and not plain.get(size_bytes):
            codec = "planes"
        raw = bytes(size_bytes) if codec == "zeros" else random.Random(number).randbytes(size_bytes)
        if raw in made:
            continue
        base = draw(st.sampled_from(plain[size_bytes])) if codec == "delta" else None
        index = maker.chunk(
            raw, codec=codec, base=base, pack=draw(st.integers(0, 2)), gap=draw(st.sampled_from([0, 0, 3, 40])),
            width=draw(st.sampled_from([1, 2, 4, 8])),
        )  # fmt: skip
        made[raw] = index
        if codec != "delta":
            plain.setdefault(size_bytes, []).append(index)
    # Every chunk somewhere, some several times; a base need not be in any file.
    bases = {chunk.base for chunk in maker.chunks}
    order = [index for index in range(len(maker.chunks)) if index not in bases or draw(st.booleans())]
    order += draw(st.lists(st.sampled_from(order), max_size=5))
    order = draw(st.permutations(order))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
    for number, (begin, stop) in enumerate(zip([0, *cuts], [*cuts, len(order)], strict=True)):
        maker.file(f"d{number % 2}/f {number} ü", order[begin:stop])
    used = sorted({chunk.pack for chunk in maker.chunks} - {None})
    for index, chunk in enumerate(maker.chunks):
        pack = None if chunk.pack is None else used.index(chunk.pack)
        maker.chunks[index] = chunk.model_copy(update={"pack": pack})
    maker.bodies = [maker.bodies[pack] for pack in used]
    return maker


PIECES = st.none() | st.integers(1, 1200)
"""Number of bytes that come at a time; None: a whole range."""


@settings(deadline=None, max_examples=60)
@given(makers(), st.randoms(use_true_random=False), st.integers(1, 4), PIECES)
def test_chunks_in_any_order_become_the_files(
    maker: Maker, chance: random.Random, threads: int, piece_bytes: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(restore_plan, "MAX_RANGE_BYTES", 100)
        patch.setattr(restore_plan, "MAX_GAP_BYTES", 10)
        site = Site(maker, Path(place))
        ranges = site.plan()
        chance.shuffle(ranges)
        bring = site.bring if piece_bytes is None else partial(site.stream, piece_bytes=piece_bytes)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(bring, ranges))
        site.assembly.decode_waiting()
        assert site.assembly.take_mismatched() == set()
        site.assert_whole()


@settings(deadline=None, max_examples=60)
@given(makers(), st.randoms(use_true_random=False), PIECES)
def test_altered_bytes_are_noticed_and_brought_again(
    maker: Maker, chance: random.Random, piece_bytes: int | None
) -> None:
    """The assembler notices one altered byte in any range, and the files are whole once the range comes again."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(restore_plan, "MAX_RANGE_BYTES", 100)
        patch.setattr(restore_plan, "MAX_GAP_BYTES", 10)
        site = Site(maker, Path(place))
        ranges = site.plan()
        chance.shuffle(ranges)
        bring = site.bring if piece_bytes is None else partial(site.stream, piece_bytes=piece_bytes)
        for found in ranges:
            part = chance.choice(found.parts)
            data = bytearray(site.data(found))
            data[part.offset - found.offset + chance.randrange(part.size_bytes)] ^= 1 << chance.randrange(8)
            try:
                bring(found, bytes(data))
            except ChecksumMismatch:
                bring(found)
        site.assembly.decode_waiting()
        # A damaged delta may be noticed only once its base is there.
        while ranges := plan_ranges(site.manifest, site.assembly.take_mismatched()):
            for found in ranges:
                site.bring(found)
            site.assembly.decode_waiting()
        site.assert_whole()


@pytest.mark.parametrize("codec", ["raw", "planes", "delta"])
def test_what_never_verifies_is_said_to_be_damaged(tmp_path: Path, codec: Codec) -> None:
    maker = Maker()
    base = maker.chunk(b"base" * 5)
    index = maker.chunk(b"file" * 5, codec=codec, base=base if codec == "delta" else None)
    maker.file("f", [base, index])
    site = Site(maker, tmp_path)
    (found,) = site.plan()
    data = bytearray(site.data(found))
    data[-1] ^= 1
    for _ in range(2):
        with pytest.raises(
            ChecksumMismatch, match=f"chunk {maker.chunks[index].blake3} in pack {maker.packs[0].blake3}"
        ):
            site.bring(found, bytes(data))
    assert site.assembly.missing() == {index}
    with pytest.raises(ChecksumMismatch, match="is missing after all ranges"):
        site.assembly.finish()


@pytest.mark.usefixtures("small_ranges")
def test_a_large_chunk_that_does_not_verify_is_fetched_once_more_and_then_damaged(tmp_path: Path) -> None:
    maker = Maker()
    maker.file("f", [maker.chunk(random.Random(1).randbytes(250))])
    site = Site(maker, tmp_path)
    for attempt in (1, 2):
        for found in site.plan():
            data = bytearray(site.data(found))
            data[0] ^= found.offset == 100
            site.bring(found, bytes(data))
        assert site.assembly.missing() == {0}, "altered bytes do not count as the chunk"
        if attempt == 1:
            assert site.assembly.take_mismatched() == {0}
    with pytest.raises(ChecksumMismatch):
        site.assembly.take_mismatched()


def spoiled_delta(tmp_path: Path) -> tuple[Site, PackRange, bytes]:
    """A delta that came before its base, and did not verify; its range, and the bytes that came."""
    maker = Maker()
    base = maker.chunk(b"base" * 5, pack=1)
    maker.file("f", [maker.chunk(b"file" * 5, codec="delta", base=base)])
    site = Site(maker, tmp_path)
    of_base, of_delta = site.plan()
    data = bytearray(site.data(of_delta))
    data[-1] ^= 1
    site.bring(of_delta, bytes(data))
    site.bring(of_base)
    site.assembly.decode_waiting()
    assert site.assembly.take_mismatched() == {1}
    return site, of_delta, bytes(data)


def test_a_delta_that_came_before_its_base_and_does_not_verify_is_fetched_once_more(tmp_path: Path) -> None:
    site, of_delta, _ = spoiled_delta(tmp_path)
    site.bring(of_delta)
    assert site.assembly.take_mismatched() == set()
    site.assert_whole()
    assert files_below(tmp_path / "content") == {"f": b"file" * 5}, "a base that no file has is not left in one"


def test_a_delta_that_was_fetched_again_is_not_fetched_a_third_time(tmp_path: Path) -> None:
    """Raised while it is delivered, its mismatch would make its range be fetched once more."""
    site, of_delta, spoiled = spoiled_delta(tmp_path)
    site.bring(of_delta, spoiled)
    site.assembly.decode_waiting()
    assert site.assembly.missing() == {1}
    with pytest.raises(ChecksumMismatch, match=site.maker.chunks[1].blake3):
        site.assembly.take_mismatched()


def test_a_delta_of_zeros_needs_no_base_to_be_fetched(tmp_path: Path) -> None:
    maker = Maker()
    zeros = maker.chunk(bytes(20), codec="zeros")
    maker.file("f", [maker.chunk(b"file" * 5, codec="delta", base=zeros)])
    site = Site(maker, tmp_path)
    site.bring_all()
    site.assert_whole()


def test_zeros_are_not_written(tmp_path: Path) -> None:
    maker = Maker()
    zeros = maker.chunk(bytes(8 * 1024 * 1024), codec="zeros")
    maker.file("f", [zeros, maker.chunk(b"x" * 5), zeros, zeros])
    site = Site(maker, tmp_path)
    site.bring_all()
    site.assert_whole()
    assert (site.content / "f").stat().st_blocks * 512 < 1024 * 1024


def test_zeros_that_are_none_are_damage(tmp_path: Path) -> None:
    maker = Maker()
    maker.file("f", [maker.chunk(bytes(20), codec="zeros")])
    maker.chunks[0] = maker.chunks[0].model_copy(update={"blake3": "0" * 64})
    with pytest.raises(ChecksumMismatch, match="20 zeros"):
        Site(maker, tmp_path)


@pytest.mark.parametrize(
    ("said", "stored"),
    [({"size_bytes": 8}, b"x" * 9), ({"codec": "planes", "length_bytes": 9}, b"x" * 9)],
    ids=["a raw chunk that is cut", "no frame"],
)
def test_stored_bytes_that_are_not_what_they_should_be_are_damage(
    tmp_path: Path, said: dict[str, Any], stored: bytes
) -> None:
    maker = Maker()
    maker.file("f", [maker.chunk(stored)])
    maker.chunks[0] = maker.chunks[0].model_copy(update=said)
    maker.raw[0] = maker.raw[0][: said.get("size_bytes", 9)]
    site = Site(maker, tmp_path)
    (found,) = site.plan()
    with pytest.raises(ChecksumMismatch):
        site.bring(found)


def test_a_frame_that_unpacks_to_more_than_it_says_is_damage(tmp_path: Path) -> None:
    maker = Maker()
    maker.file("f", [maker.chunk(bytes(10_000_000) + b"x", codec="planes")])
    maker.chunks[0] = maker.chunks[0].model_copy(update={"size_bytes": 1000})
    maker.raw[0] = maker.raw[0][:1000]
    site = Site(maker, tmp_path)
    (found,) = site.plan()
    with pytest.raises(ChecksumMismatch):
        site.bring(found)


@pytest.mark.parametrize("path", ["../evil", "a/../../evil", "/evil"])
def test_a_path_that_escapes_is_refused_even_if_the_manifest_was_believed(tmp_path: Path, path: str) -> None:
    maker = Maker()
    maker.file("f", [maker.chunk(b"x")])
    manifest = maker.manifest
    manifest.files[0] = manifest.files[0].model_copy(update={"path": path})
    with pytest.raises(UnsafePath):
        FileAssembler(
            manifest,
            tmp_path / "content",
            tmp_path / "scratch",
            cancel=None,
        )
    assert not list(tmp_path.parent.rglob("evil"))


class TestCopying:
    """The assembler copies chunks from files of this machine, and checks their bytes."""

    def site(self, tmp_path: Path, raw: bytes = b"0123456789") -> tuple[Site, Path]:
        maker = Maker()
        maker.file("f", [maker.chunk(raw)])
        maker.file("g", [0])
        here = tmp_path / "here"
        here.write_bytes(b"--" + raw + b"--")
        return Site(maker, tmp_path), here

    def test_the_same_bytes_are_taken(self, tmp_path: Path) -> None:
        site, here = self.site(tmp_path, os.urandom(9 * 1024 * 1024))
        assert site.assembly.copy(0, Segment(here, 2, 9 * 1024 * 1024))
        assert site.plan() == []
        site.assert_whole()

    @pytest.mark.parametrize("harm", ["altered", "short", "gone", "a directory", "a pipe", "a link"])
    def test_other_bytes_are_not(self, tmp_path: Path, harm: str) -> None:
        site, here = self.site(tmp_path)
        if harm == "altered":
            here.write_bytes(b"--0123456780--")
        elif harm == "short":
            os.truncate(here, 11)
        else:
            here.rename(tmp_path / "moved")
            if harm == "a directory":
                here.mkdir()
            elif harm == "a pipe":
                os.mkfifo(here)
            elif harm == "a link":
                here.symlink_to(tmp_path / "moved")
        assert not site.assembly.copy(0, Segment(here, 2, 10))
        assert len(site.plan()) == 1
        site.bring_all()
        site.assert_whole()


def test_nothing_is_written_after_a_cancel(tmp_path: Path) -> None:
    cancel = threading.Event()
    maker = Maker()
    maker.file("f", [maker.chunk(b"x" * 10)])
    site = Site(maker, tmp_path, cancel)
    cancel.set()
    with pytest.raises(TransferCanceled):
        site.bring_all()
    assert (site.content / "f").read_bytes() == bytes(10)


@pytest.fixture(autouse=True)
def _no_descriptors_are_left_open() -> Iterator[None]:
    before = descriptors()
    yield
    assert len(descriptors() - before) <= 1


def test_many_files_are_not_all_kept_open(tmp_path: Path) -> None:
    maker = Maker()
    for number in range(300):
        maker.file(f"{number}", [maker.chunk(b"%d" % number)])
    site = Site(maker, tmp_path)
    before = descriptors()
    site.bring_all()
    assert len(descriptors() - before) <= 130
    site.assert_whole()
