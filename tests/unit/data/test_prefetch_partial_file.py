"""Test the units of a partial file: what a later process keeps, and what it must not trust."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from gpu_client.datasets.prefetch.partial_file import (
    RANGE_UNITS,
    UNIT_BYTES,
    PartialFile,
    is_complete,
    partial_path,
)
from gpu_client.datasets.prefetch.selection import FileLink, ListedFile
from gpu_client.transport.errors import ChecksumMismatch, DiskFull, TransferCanceled, TransferError
from gpu_client.transport.net.files import TEMPORARY_NAME

DATA = random.Random(1).randbytes(3 * UNIT_BYTES + 5)
NEVER = threading.Event()


def described(data: bytes, path: str = "a/b") -> ListedFile:
    return ListedFile(path=path, size_bytes=len(data), checksum=f"blake3:{blake3(data).hexdigest()}")


def left_in(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()]


def deliver(part: PartialFile, unit: int, data: bytes = DATA) -> None:
    """Deliver one unit as a transfer does."""
    piece = data[unit * UNIT_BYTES : (unit + 1) * UNIT_BYTES]
    request = part.request(FileLink("http://host/x"), unit * UNIT_BYTES, len(piece))
    request.begin()
    request.deliver(memoryview(piece))


def test_a_later_process_keeps_the_units(tmp_path: Path) -> None:
    place, file = tmp_path / "b", described(DATA)
    with PartialFile(place, file) as part:
        assert part.missing() == [(0, len(DATA))]
        deliver(part, 1)
    assert TEMPORARY_NAME.fullmatch(partial_path(place, file).name)
    with PartialFile(place, file) as part:
        assert part.missing() == [(0, UNIT_BYTES), (2 * UNIT_BYTES, UNIT_BYTES + 5)]
        assert part.arrived_bytes == UNIT_BYTES
        for unit in (0, 2, 3):
            deliver(part, unit)
        assert part.missing() == []
        part.commit(NEVER)
    assert place.read_bytes() == DATA
    assert left_in(tmp_path) == ["b"]
    with pytest.raises(TransferCanceled):
        deliver(part, 0)


def test_a_request_begins_again_at_its_first_byte(tmp_path: Path) -> None:
    with PartialFile(tmp_path / "b", described(DATA)) as part:
        request = part.request(FileLink("http://host/x"), UNIT_BYTES, 2 * UNIT_BYTES)
        for data in (bytes(UNIT_BYTES), DATA[UNIT_BYTES : 2 * UNIT_BYTES]):
            request.begin()
            request.deliver(memoryview(data))
        request.deliver(memoryview(DATA[2 * UNIT_BYTES : 3 * UNIT_BYTES]))
        deliver(part, 0)
        deliver(part, 3)
        part.commit(NEVER)
    assert (tmp_path / "b").read_bytes() == DATA


def test_ranges_of_a_large_file_are_limited(tmp_path: Path) -> None:
    size_bytes = (2 * RANGE_UNITS + 1) * UNIT_BYTES - 7
    with PartialFile(tmp_path / "b", ListedFile(path="b", size_bytes=size_bytes, checksum="sha256:0")) as part:
        sizes = [size_bytes for _, size_bytes in part.missing()]
    assert sizes == [RANGE_UNITS * UNIT_BYTES, RANGE_UNITS * UNIT_BYTES, UNIT_BYTES - 7]


def test_another_version_of_the_file_keeps_nothing(tmp_path: Path) -> None:
    other = DATA[:-1] + b"x"
    with PartialFile(tmp_path / "b", described(DATA)) as part:
        deliver(part, 0)
    with PartialFile(tmp_path / "b", described(other)) as part:
        assert part.arrived_bytes == 0


@pytest.mark.parametrize("left", ["unallocated", "renamed next"])
def test_a_process_that_ended_between_two_steps(tmp_path: Path, left: str) -> None:
    place, file = tmp_path / "b", described(DATA)
    partial_path(place, file).write_bytes(DATA[:-1] if left == "unallocated" else DATA)
    with PartialFile(place, file) as part:
        assert part.arrived_bytes == (0 if left == "unallocated" else len(DATA))
        for unit in range(4 if left == "unallocated" else 0):
            deliver(part, unit)
        part.commit(NEVER)
    assert place.read_bytes() == DATA


def test_a_wrong_byte_removes_the_partial_file(tmp_path: Path) -> None:
    place, file = tmp_path / "b", described(DATA)
    with PartialFile(place, file) as part:
        for unit in range(4):
            deliver(part, unit, DATA[:-1] + b"x")
        with pytest.raises(ChecksumMismatch, match=f"a/b: the bytes differ from {file.checksum}"):
            part.commit(NEVER)
    assert left_in(tmp_path) == []


def test_an_empty_file(tmp_path: Path) -> None:
    with PartialFile(tmp_path / "b", described(b"")) as part:
        assert part.missing() == []
        part.commit(NEVER)
    assert (tmp_path / "b").read_bytes() == b""


@pytest.mark.parametrize(
    "checksum",
    [
        f"sha256:{hashlib.sha256(DATA).hexdigest()}",
        f"blake3:{blake3(DATA).hexdigest()}",
        f"git-blob:{hashlib.sha1(b'blob %d' % len(DATA) + bytes(1) + DATA).hexdigest()}",
    ],
)
def test_each_checksum_is_compared(tmp_path: Path, checksum: str) -> None:
    place, file = tmp_path / "b", ListedFile(path="b", size_bytes=len(DATA), checksum=checksum)
    assert not is_complete(place, file, NEVER)
    place.write_bytes(DATA)
    assert is_complete(place, file, NEVER)
    place.write_bytes(DATA[:-1] + b"x")
    assert not is_complete(place, file, NEVER)
    place.write_bytes(DATA + b"x")
    assert not is_complete(place, file, NEVER)


def test_an_unknown_checksum_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"x")
    with pytest.raises(TransferError, match="'md4' is no known checksum"):
        is_complete(tmp_path / "b", ListedFile(path="b", size_bytes=1, checksum="md4:0"), NEVER)


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull):
        PartialFile(tmp_path / "b", described(DATA))
    assert left_in(tmp_path) == []
