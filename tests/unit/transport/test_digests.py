"""Digests of files, and files that change while they are read."""

from __future__ import annotations

import base64
import os
import random
from pathlib import Path

import pytest

from gpu_client.transport.errors import FileChanged, TransferCanceled, TransferError
from gpu_client.transport.net import digests
from gpu_client.transport.net.digests import Digester, digest_bytes, hash_file
from tests.kits.files.declared_files import PART, checksum, large, pieces


class Event:
    def __init__(self, after: int) -> None:
        self.left = after

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_known_values() -> None:
    found = digest_bytes(b"123456789")
    assert found.size_bytes == 9
    assert found.crc64nvme == base64.b64encode((0xAE8B14860A799888).to_bytes(8, "big")).decode()
    assert digest_bytes(b"").blake3 == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest_bytes(b"").crc64nvme == "AAAAAAAAAAA="


@pytest.mark.parametrize("size", [0, 1, digests.READ_BYTES - 1, digests.READ_BYTES, 2 * digests.READ_BYTES + 3])
def test_a_file_in_pieces_is_the_same_as_at_once(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    assert hash_file(tmp_path / "f") == digest_bytes(data)


def test_pieces_of_any_size() -> None:
    digester = Digester()
    for piece in (b"12", b"", b"3456", b"789"):
        digester.update(piece)
    assert digester.digest == digest_bytes(b"123456789")


@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite", "replace", "remove"])
def test_a_file_that_changes_while_it_is_hashed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a" * 1000)
    os.utime(path, ns=(0, 0))
    original = digests._hash_open_file

    def meddle(descriptor: int, cancel: object) -> digests.FileDigest:
        found = original(descriptor, None)
        if change == "grow":
            path.write_bytes(b"a" * 1001)
        elif change == "shrink":
            os.truncate(path, 10)
        elif change == "rewrite":
            path.write_bytes(b"b" * 1000)
        elif change == "replace":
            (tmp_path / "g").write_bytes(b"a" * 1000)
            os.utime(tmp_path / "g", ns=(0, 0))
            (tmp_path / "g").replace(path)
        else:
            path.unlink()
        return found

    monkeypatch.setattr(digests, "_hash_open_file", meddle)
    with pytest.raises(FileChanged):
        hash_file(path)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(TransferError, match="not a regular file"):
        hash_file(tmp_path / "fifo")
    with pytest.raises(FileChanged, match="does not exist"):
        hash_file(tmp_path / "absent")


def test_hashing_stops_when_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (digests.READ_BYTES * 3))
    with pytest.raises(TransferCanceled):
        hash_file(tmp_path / "f", cancel=Event(1))


@pytest.mark.parametrize("step", [1, 7, 999, 1000, 1001, 2500, 10_000])
def test_checksums_of_parts_make_that_of_the_whole(step: int) -> None:
    data = random.Random(5).randbytes(3 * 1000 + 17)
    digester = Digester(part_bytes=1000)  # smaller than may be sent
    for offset in range(0, len(data), step):
        digester.update(data[offset : offset + step])
    whole_parts = [(digests.checksums.crc64nvme(data[offset : offset + 1000]), 1000) for offset in (0, 1000, 2000)]
    assert digester._parts == whole_parts
    digester._part_bytes = None
    assert digester.digest == digest_bytes(data)


def test_a_large_file_is_cut_and_a_small_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PARTS_FROM_BYTES", PART)
    monkeypatch.setattr(digests, "part_bytes_of", lambda _: PART)
    data = large(4)
    (tmp_path / "f").write_bytes(data)
    found = hash_file(tmp_path / "f")
    assert found.parts is not None
    assert (found.parts.part_bytes, found.parts.crc64nvme) == (PART, [checksum(piece) for piece in pieces(data)])
    assert found == digest_bytes(data), "the same bytes, cut or not"
    for size_bytes in (PART - 1, PART):
        (tmp_path / "f").write_bytes(data[:size_bytes])
        assert hash_file(tmp_path / "f").parts is None, "one part is no parts"
