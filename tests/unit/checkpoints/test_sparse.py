"""Holes of sparse files: not read on file systems that report holes reliably; the manifest is equal."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.checkpoints.manifest import Manifest
from gpu_client.checkpoints.save import source_files
from gpu_client.checkpoints.save.manifest_builder import build_manifest
from gpu_client.transport.errors import FileChanged
from tests.unit.checkpoints.fake_cloud import JOB_ID

KIB = 1024
MIB = 1024 * KIB
PAGE = 4 * KIB


class Reads:
    """Counts what is read of files, and what is asked about their holes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self.questions = 0
        read, seek = os.preadv, os.lseek

        def preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
            size = read(descriptor, views, offset)
            self.bytes += size
            return size

        def lseek(descriptor: int, offset: int, how: int) -> int:
            self.questions += how == os.SEEK_DATA
            return seek(descriptor, offset, how)

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(os, "lseek", lseek)


def build(directory: Path) -> Manifest:
    local = build_manifest(directory, job_id=JOB_ID, step=5, epoch=2)
    local.close()
    return local.manifest


def sparse(path: Path, size_bytes: int, extents: list[tuple[int, bytes]], first: bytes = b"") -> Path:
    """A file with holes wherever nothing is said."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(first)
        file.truncate(max(size_bytes, len(first)))
        for offset, data in extents:
            file.seek(len(first) + offset)
            file.write(data[: max(0, size_bytes - file.tell())])
    return path


def require_holes(path: Path) -> None:
    """Skip where the tests' directory lies on a file system that makes no holes, or that is not asked about them."""
    with path.open("rb") as file:
        if path.stat().st_blocks * 512 >= path.stat().st_size or not source_files._reports_holes(file.fileno()):
            pytest.skip("no holes here")


def test_five_gigabytes_of_nothing_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build reads no holes: five gigabytes of zeros took ten seconds of a core that the training needs."""
    data = random.Random("data").randbytes(10 * MIB)
    path = sparse(tmp_path / "c" / "memory.bin", 5 * 1024 * MIB, [(0, data), (3 * 1024 * MIB, data)])
    require_holes(path)
    reads = Reads(monkeypatch)
    manifest = build(tmp_path / "c")
    assert reads.bytes <= 2 * (len(data) + 2 * 16 * MIB), "what has data, and the rest of its chunks"
    assert manifest.total_bytes == 5 * 1024 * MIB
    assert sum(pack.size_bytes for pack in manifest.packs) <= 2 * (len(data) + 2 * 16 * MIB)
    assert "zeros" in {chunk.codec for chunk in manifest.chunks}


def test_files_without_holes_are_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model").write_bytes(random.Random("data").randbytes(3 * MIB))
    reads = Reads(monkeypatch)
    build(tmp_path / "c")
    assert (reads.bytes, reads.questions) == (3 * MIB, 0)


EXTENTS = st.lists(
    st.tuples(st.integers(0, 600), st.integers(1, 100), st.sampled_from(["data", "zeros", "mostly zeros"])), max_size=8
)
"""Page, number of pages, what is written there."""


@given(EXTENTS, st.integers(0, 700 * PAGE), st.sampled_from(["blocks", "safetensors"]), st.integers(0, PAGE - 1))
def test_the_manifest_is_that_of_reading(
    tmp_path_factory: pytest.TempPathFactory,
    extents: list[tuple[int, int, str]],
    size_bytes: int,
    kind: str,
    shift: int,
) -> None:
    """A sparse file has the manifest of a dense one, also where the file system reports no holes or calls all data."""
    place = tmp_path_factory.mktemp("holes")
    content = {
        "data": lambda size: random.Random(size).randbytes(size),
        "zeros": bytes,
        "mostly zeros": lambda size: bytes(size - 1) + b"x",
    }
    written = [(page * PAGE + shift, content[what](pages * PAGE)) for page, pages, what in extents]
    first = b""
    if kind == "safetensors":
        half = size_bytes // 2
        tensors = {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, half]},
            "b": {"dtype": "BF16", "shape": [1], "data_offsets": [half, size_bytes]},
        }
        header = json.dumps(tensors).encode()
        first = struct.pack("<Q", len(header)) + header
    path = sparse(place / "c" / "file", len(first) + size_bytes, written, first)
    (place / "c" / "other").write_bytes(b"some bytes")
    (place / "dense").mkdir()
    (place / "dense" / "file").write_bytes(path.read_bytes())
    (place / "dense" / "other").write_bytes(b"some bytes")
    told = build(place / "c")
    dense, offset = path.read_bytes(), 0
    for chunk in (told.chunks[index] for index in told.files[0].chunks):
        assert chunk.blake3 == blake3(dense[offset : offset + chunk.size_bytes]).hexdigest()
        offset += chunk.size_bytes
    assert (told.files[0].path, offset) == ("file", len(dense))
    assert told.canonical_bytes() == build(place / "dense").canonical_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_files, "_TRUSTED_WITH_HOLES", frozenset())
        assert build(place / "c").canonical_bytes() == told.canonical_bytes()
    for answer in (all_is_data, cannot_be_asked):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "lseek", answer)
            assert build(place / "c").canonical_bytes() == told.canonical_bytes()
    shutil.rmtree(place)


def all_is_data(_descriptor: int, offset: int, _how: int) -> int:
    """Answer as Linux does for a file system that does not report holes."""
    return offset


def cannot_be_asked(_descriptor: int, _offset: int, _how: int) -> int:
    """Refuse as other operating systems do."""
    raise OSError(errno.EINVAL, "Invalid argument")


def test_file_systems_that_are_not_trusted_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse(tmp_path / "c" / "file", 3 * MIB, [])
    monkeypatch.setattr(source_files, "_TRUSTED_WITH_HOLES", frozenset({0x2FC12FC1}))  # ZFS
    reads = Reads(monkeypatch)
    build(tmp_path / "c")
    assert (reads.bytes, reads.questions) == (3 * MIB, 0)


@pytest.mark.parametrize("change", ["written", "cut off", "removed"])
def test_a_hole_that_is_filled_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = sparse(tmp_path / "c" / "file", 3 * MIB, [])
    require_holes(path)
    os.utime(path, (1, 1))  # file systems tell times apart by milliseconds
    told = source_files._is_hole

    def is_hole(descriptor: int, offset: int, size_bytes: int) -> bool:
        found = told(descriptor, offset, size_bytes)
        if change == "removed":
            path.unlink(missing_ok=True)
        elif change == "cut off":
            os.truncate(path, MIB)
        else:
            with path.open("r+b") as file:
                file.write(b"late")
        return found

    monkeypatch.setattr(source_files, "_is_hole", is_hole)
    with pytest.raises(FileChanged):
        build(tmp_path / "c")
