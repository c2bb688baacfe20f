from __future__ import annotations

import hashlib
import os
import random
import threading
from pathlib import Path

import pytest

from baton.contract.objects.parts import MAX_PARTED_BYTES, PARTS_FROM_BYTES, part_bytes_of
from baton.contract.objects.transfers import ObjectView
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.data.push import compute_etag, list_extra, list_local_files, plan_push
from gpu_client.transport.errors import TransferCanceled

HELLO_MD5 = "5d41402abc4b2a76b9719d911017c592"


def stored(key: str, size_bytes: int, etag: str) -> dict[str, ObjectView]:
    return {key: ObjectView(key=key, size_bytes=size_bytes, etag=etag, modified_at=1)}


def etag(path: Path, parts: int) -> str:
    return compute_etag(path, parts, threading.Event())


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Return one local file, `set/hello.txt`."""
    (tmp_path / "hello.txt").write_bytes(b"hello")
    return list_local_files(tmp_path, "set")


@pytest.mark.parametrize(
    ("there", "sent"),
    [
        ({}, True),
        (stored("set/hello.txt", 5, HELLO_MD5), False),
        (stored("set/hello.txt", 5, f'"{HELLO_MD5}"'), False),
        (stored("set/hello.txt", 4, HELLO_MD5), True),
        (stored("set/hello.txt", 5, "0" * 32), True),
        (stored("set/hello.txt", 5, HELLO_MD5 + "-1"), True),
        (stored("set/other.txt", 5, HELLO_MD5), True),
    ],
)
def test_only_what_is_new_is_sent(files: dict[str, Path], there: dict[str, ObjectView], sent: bool) -> None:
    plan = plan_push(files, there, etag)
    assert plan.send == (files if sent else {})
    assert plan.send_bytes == (5 if sent else 0)
    assert plan.unchanged == (0 if sent else 1)


def test_what_is_stored_beside_the_files_of_a_push(files: dict[str, Path]) -> None:
    """Manifests and objects of rings are no extra files: `--delete` deletes every extra file."""
    keys = ("set/hello.txt", "set/old.txt", "set/.baton/dataset.json", "set/in/.baton/dataset.json", "rings/a/0f/1")
    there = {key: view for name in keys for key, view in stored(name, 5, HELLO_MD5).items()}
    assert list_extra(files, there) == ["set/old.txt"]


def test_what_was_uploaded_in_parts_is_known_by_its_etag(tmp_path: Path) -> None:
    """Regression: an etag of parts said nothing, and the largest files were sent again each time."""
    data = random.Random(1).randbytes(PARTS_FROM_BYTES + 1)
    part_bytes = part_bytes_of(len(data))
    pieces = [data[offset : offset + part_bytes] for offset in range(0, len(data), part_bytes)]
    digests = b"".join(hashlib.md5(piece, usedforsecurity=False).digest() for piece in pieces)
    right = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(pieces)}"
    (tmp_path / "large").write_bytes(data)
    files = list_local_files(tmp_path, "set")
    for said, sent in ((right, 0), (f'"{right}"', 0), (f"{right[:-1]}4", 1), ("0" * 32 + f"-{len(pieces)}", 1)):
        assert len(plan_push(files, stored("set/large", len(data), said), etag).send) == sent, said
    (tmp_path / "large").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert list(plan_push(files, stored("set/large", len(data), right), etag).send) == ["set/large"]


def test_what_differs_in_size_is_not_read(files: dict[str, Path]) -> None:
    def never(path: Path, _parts: int) -> str:
        raise AssertionError(f"{path} was read")

    assert plan_push(files, stored("set/hello.txt", 4, HELLO_MD5), never).send == files


def test_hashing_stops_when_told(files: dict[str, Path]) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(TransferCanceled):
        plan_push(files, stored("set/hello.txt", 5, HELLO_MD5), lambda path, parts: compute_etag(path, parts, cancel))


def test_keys_keep_the_path_below_the_directory(tmp_path: Path) -> None:
    (tmp_path / "a b" / "ü").mkdir(parents=True)
    (tmp_path / "a b" / "ü" / "1.png").touch()
    assert list(list_local_files(tmp_path, "sets/digits/")) == ["sets/digits/a b/ü/1.png"]


@pytest.mark.parametrize("prefix", ["", "/", "../up", "a//b", "a\nb", "x" * 901])
def test_prefixes_that_are_none(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(CliError, match="prefix"):
        list_local_files(tmp_path, prefix)


def test_what_cannot_be_stored_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="is not a directory"):
        list_local_files(tmp_path / "absent", "set")
    with pytest.raises(CliError, match="has no files"):
        list_local_files(tmp_path, "set")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CliError, match="pipe is not a regular file"):
        list_local_files(tmp_path, "set")
    (tmp_path / "pipe").unlink()
    (tmp_path / "back\\slash").touch()
    with pytest.raises(CliError, match="backslash"):
        list_local_files(tmp_path, "set")
    (tmp_path / "back\\slash").unlink()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_PARTED_BYTES + 1)
    with pytest.raises(CliError, match=r"huge.*exceeds 5\.5 TB"):
        list_local_files(tmp_path, "set")
