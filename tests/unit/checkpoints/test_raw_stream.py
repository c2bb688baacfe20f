"""Streaming of raw chunks: verified chunks stay, mismatched chunks are fetched once more."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from gpu_client.checkpoints.restore import restore_plan
from gpu_client.checkpoints.restore.file_assembler import RawStream, can_stream
from gpu_client.checkpoints.restore.restore_plan import PackRange
from gpu_client.transport.errors import ChecksumMismatch, TransferCanceled
from tests.kits.files.directories import files_below
from tests.unit.checkpoints.made_checkpoints import Maker
from tests.unit.checkpoints.test_file_assembler import Site

FIRST, SECOND = random.Random(1).randbytes(90), random.Random(2).randbytes(60)


def two_chunks(tmp_path: Path, cancel: threading.Event | None = None) -> tuple[Site, PackRange, RawStream]:
    """Make a range of two chunks with a gap between them, the second one in two files."""
    maker = Maker()
    maker.file("f", [maker.chunk(FIRST), maker.chunk(SECOND, gap=5)])
    maker.file("g", [1])
    site = Site(maker, tmp_path, cancel)
    (found,) = site.plan()
    return site, found, RawStream(found, site.manifest.chunks, site.assembly)


def test_a_chunk_counts_with_its_last_byte(tmp_path: Path) -> None:
    site, found, stream = two_chunks(tmp_path)
    data = memoryview(site.data(found))
    stream.take(data[:89])
    assert (tmp_path / "content" / "f").read_bytes()[:89] == FIRST[:89], "it is written before it is verified"
    assert site.assembly.missing() == {0, 1}
    stream.take(data[89:92])
    assert site.assembly.missing() == {1}
    stream.take(data[92:])
    assert stream.complete
    site.assert_whole()


def test_once_more_leaves_alone_what_was_verified(tmp_path: Path) -> None:
    """Altered the second time, the first chunk is right all the same: it is not written again."""
    site, found, stream = two_chunks(tmp_path)
    data = bytearray(site.data(found))
    data[-1] ^= 1
    with pytest.raises(ChecksumMismatch, match=site.maker.chunks[1].blake3):
        stream.take(memoryview(data))
    assert site.assembly.missing() == {1}
    data[-1] ^= 1
    data[0] ^= 1
    stream.begin()
    stream.take(memoryview(data))
    assert stream.complete
    site.assert_whole()


def test_begun_again_in_the_middle_of_a_chunk(tmp_path: Path) -> None:
    site, found, stream = two_chunks(tmp_path)
    stream.take(memoryview(b"\0" * 50))
    stream.begin()
    for byte in site.data(found):
        stream.take(memoryview(bytes([byte])))
    site.assert_whole()


def test_nothing_is_written_after_a_cancel(tmp_path: Path) -> None:
    cancel = threading.Event()
    site, found, stream = two_chunks(tmp_path, cancel)
    cancel.set()
    with pytest.raises(TransferCanceled):
        stream.take(memoryview(site.data(found)))
    assert not any((tmp_path / "content" / "f").read_bytes())


def test_a_large_chunk_that_was_fetched_again_is_not_fetched_a_third_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_plan, "MAX_RANGE_BYTES", 100)
    maker = Maker()
    maker.file("f", [maker.chunk(random.Random(1).randbytes(250))])
    site = Site(maker, tmp_path)
    for spoiled in ({0}, set[int]()):
        for found in site.plan():
            data = bytearray(site.data(found))
            data[0] ^= found.offset == 100 and bool(spoiled)
            site.stream(found, bytes(data), piece_bytes=30)
        assert site.assembly.take_mismatched() == spoiled
        assert site.assembly.missing() == spoiled
    site.assert_whole()
    assert files_below(tmp_path / "content") == maker.contents


def test_what_is_encoded_or_overlaps_comes_as_a_whole(tmp_path: Path) -> None:
    maker = Maker()
    maker.file("f", [maker.chunk(FIRST), maker.chunk(SECOND, codec="planes")])
    (found,) = Site(maker, tmp_path).plan()
    assert not can_stream(found, maker.chunks)

    maker = Maker()
    maker.file("f", [maker.chunk(FIRST), maker.chunk(FIRST[80:] + SECOND)])
    maker.chunks[1] = maker.chunks[1].model_copy(update={"offset": 80})
    maker.bodies[0] = bytearray(FIRST + SECOND)
    (tmp_path / "second").mkdir()
    site = Site(maker, tmp_path / "second")
    (found,) = site.plan()
    assert not can_stream(found, maker.chunks)
    site.bring(found)
    site.assert_whole()
