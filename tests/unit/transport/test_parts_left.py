"""Test the remains of a large fetch that was cut off, met a full disk, or found another file in its place."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from gpu_client.transport.errors import (
    ChecksumMismatch,
    DiskFull,
    ObjectMissing,
    TransferCanceled,
    Unreachable,
    UrlExpired,
)
from gpu_client.transport.transfer.manager import Transfer
from tests.unit.transport.parts_kit import DATA, EXPIRED, OTHER, download, left_in, make_parts_small, ranges
from tests.unit.transport.scripted_server import (
    ScriptedServer,
    reply,
    sends,
    silent_after,
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    make_parts_small(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def test_urls_that_run_out_do_not_cost_what_has_arrived(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", *[sends(DATA)] * 3, sends(DATA, sent=50_000))
    server.routes["GET", "/o"] = EXPIRED
    steps: list[int] = []
    with pytest.raises(UrlExpired):
        transfer.download([download(server, root)], progress=steps.append)
    assert not (root / "o").exists()
    arrived_bytes = sum(steps)
    assert arrived_bytes == 350_000
    first = len(server.seen)
    server.routes.clear()
    transfer.download([download(server, root)], progress=steps.append)
    assert (root / "o").read_bytes() == DATA
    assert left_in(root) == ["o"]
    assert sum(steps) == len(DATA)
    asked = [seen.headers["range"].removeprefix("bytes=").split("-") for seen in server.seen[first:]]
    assert sum(int(end) - int(begin) + 1 for begin, end in asked) == len(DATA) - arrived_bytes


def test_what_has_arrived_of_another_object_is_not_used(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", sends(DATA))
    server.routes["GET", "/o"] = EXPIRED
    with pytest.raises(UrlExpired):
        transfer.download([download(server, root)])
    server.routes.clear()
    server.objects = {"/o": OTHER}
    transfer.download([download(server, root, data=OTHER)])
    assert (root / "o").read_bytes() == OTHER
    assert left_in(root) == ["o"]
    assert "whole" not in ranges(server), "it began anew, instead of finding out at the end"


def test_what_has_arrived_may_be_gone(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", sends(DATA))
    server.routes["GET", "/o"] = EXPIRED
    with pytest.raises(UrlExpired):
        transfer.download([download(server, root)])
    for path in root.iterdir():
        path.unlink()
    server.routes.clear()
    transfer.download([download(server, root)])
    assert (root / "o").read_bytes() == DATA


def test_what_nobody_asks_for_again_is_removed_at_the_end(
    server: ScriptedServer, transfer: Transfer, root: Path
) -> None:
    server.script("GET", "/o", sends(DATA))
    server.routes["GET", "/o"] = EXPIRED
    with pytest.raises(UrlExpired):
        transfer.download([download(server, root)])
    assert len(left_in(root)) == 1
    transfer.close()
    assert left_in(root) == []


@pytest.mark.parametrize(
    ("act", "kind"), [(reply(404), ObjectMissing), (reply(500), Unreachable)], ids=["missing", "unreachable"]
)
def test_a_failure_leaves_nothing(
    server: ScriptedServer, transfer: Transfer, root: Path, act: object, kind: type[Exception]
) -> None:
    server.script("GET", "/o", sends(DATA), sends(DATA))
    server.routes["GET", "/o"] = act  # type: ignore[assignment]
    with pytest.raises(kind):
        transfer.download([download(server, root)])
    assert left_in(root) == []


def test_canceled_in_the_middle_leaves_nothing(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    until, cancel = threading.Event(), threading.Event()
    server.script("GET", "/o", sends(DATA), sends(DATA))
    server.routes["GET", "/o"] = silent_after(DATA, 10_000, until)
    canceler = threading.Timer(0.1, cancel.set)
    canceler.start()
    try:
        with pytest.raises(TransferCanceled):
            transfer.download([download(server, root)], cancel=cancel)
    finally:
        until.set()
        canceler.join()
    assert left_in(root) == []


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    server: ScriptedServer, transfer: Transfer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    server.objects = {"/o": DATA}
    with pytest.raises(DiskFull):
        transfer.download([download(server, root)])
    assert server.seen == []
    assert left_in(root) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_take_space_in_advance(
    server: ScriptedServer, transfer: Transfer, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def cannot(*_: int) -> None:
        raise OSError(code, "cannot")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    server.objects = {"/o": DATA}
    transfer.download([download(server, root)])
    assert (root / "o").read_bytes() == DATA


def test_an_existing_file_stays_until_the_new_one_is_whole(
    server: ScriptedServer, transfer: Transfer, root: Path
) -> None:
    root.mkdir()
    (root / "o").write_bytes(b"old")
    server.objects = {"/o": OTHER}
    with pytest.raises(ChecksumMismatch):
        transfer.download([download(server, root)])
    assert (root / "o").read_bytes() == b"old"
    server.objects = {"/o": DATA}
    transfer.download([download(server, root)])
    assert (root / "o").read_bytes() == DATA


def test_many_large_files_are_not_open_at_once(
    server: ScriptedServer, transfer: Transfer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    real = os.posix_fallocate

    def allocate(descriptor: int, offset: int, size_bytes: int) -> None:
        nonlocal most
        most = max(most, len(list(root.glob(".*.part"))))
        real(descriptor, offset, size_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    server.objects = {"/o": DATA}
    transfer.download([download(server, root, f"o{number}") for number in range(12)])
    assert all((root / f"o{number}").read_bytes() == DATA for number in range(12))
    assert 1 <= most <= 4
