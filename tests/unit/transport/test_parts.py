"""Large files in parts: several connections at once, one file that is whole and verified or not there."""

from __future__ import annotations

import errno
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from gpu_client.transport import parts as module
from gpu_client.transport import transfer as transfer_module
from gpu_client.transport.connections import Connections
from gpu_client.transport.digests import digest_bytes
from gpu_client.transport.errors import (
    ChecksumMismatch,
    DiskFull,
    ObjectMissing,
    TransferCanceled,
    Unreachable,
    UrlExpired,
)
from gpu_client.transport.parts import PARTS_FROM_BYTES, parts_of
from gpu_client.transport.transfer import Download, Transfer
from tests.unit.transport.scripted_server import (
    Handler,
    ScriptedServer,
    reply,
    reset,
    sends,
    silent_after,
)

DATA = os.urandom(700_001)
OTHER = os.urandom(700_001)
EXPIRED = reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
MIB = 1024**2


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight parts of what is 700,001 bytes."""
    monkeypatch.setattr(transfer_module, "PARTS_FROM_BYTES", 200_000)
    monkeypatch.setattr(module, "_LEAST_PART_BYTES", 100_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def download(
    server: ScriptedServer, root: Path, path: str = "o", *, data: bytes = DATA, digest: bool = True
) -> Download:
    return Download(
        name="o",
        url=f"{server.url}/o?X-Amz-Signature=s",
        root=root,
        path=path,
        size_bytes=len(data),
        blake3=digest_bytes(data).blake3 if digest else None,
        crc64nvme=digest_bytes(data).crc64nvme if digest else None,
        fsync=digest,
    )


def left_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


def ranges(server: ScriptedServer) -> list[str | None]:
    return sorted((seen.headers.get("range") or "whole") for seen in server.seen)


ALL = sorted(f"bytes={at}-{min(at + 99_999, 700_000)}" for at in range(0, 700_001, 100_000))


@pytest.mark.parametrize("digest", [True, False])
def test_a_large_file_arrives_in_parts(server: ScriptedServer, transfer: Transfer, root: Path, digest: bool) -> None:
    server.objects = {"/o": DATA}
    steps: list[int] = []
    transfer.download([download(server, root, "sub/o", digest=digest)], progress=steps.append)
    assert (root / "sub/o").read_bytes() == DATA
    assert left_in(root) == ["o", "sub"]
    assert ranges(server) == ALL
    assert sum(steps) == len(DATA)
    counts = transfer.stats.counts
    assert (counts.downloaded_objects, counts.downloaded_bytes, counts.wasted_bytes) == (1, len(DATA), 0)


def test_the_bytes_of_parts_do_not_pass_through_this_process(
    server: ScriptedServer, transfer: Transfer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []
    write = module.PartedFile._write
    monkeypatch.setattr(
        module.PartedFile, "_write", lambda file, part, piece: (passed.append(len(piece)), write(file, part, piece))
    )
    data = os.urandom(2 * MIB)
    server.objects = {"/o": data}
    transfer.download([download(server, root, data=data)])
    assert (root / "o").read_bytes() == data
    assert sum(passed) <= 8 * 64 * 1024  # what is read with each answer's head


@pytest.mark.parametrize("where", ["system", "file"])
def test_where_the_kernel_cannot_they_do(
    server: ScriptedServer, transfer: Transfer, root: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    splice = os.splice

    def cannot(*arguments: int, **more: int) -> int:
        if more:
            raise OSError(errno.EINVAL, "cannot")
        return splice(*arguments)

    if where == "system":
        monkeypatch.delattr(os, "splice")
    else:
        monkeypatch.setattr(os, "splice", cannot)
    server.objects = {"/o": DATA}
    transfer.download([download(server, root)])
    assert (root / "o").read_bytes() == DATA
    assert transfer.stats.counts.wasted_bytes == 0


def test_parts_move_at_the_same_time(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    together = threading.Barrier(3, timeout=10)

    def meet(handler: Handler) -> None:
        together.wait()
        handler.send_object(DATA)

    server.objects = {"/o": DATA}
    server.script("GET", "/o", meet, meet, meet)
    transfer.download([download(server, root)])
    assert (root / "o").read_bytes() == DATA
    assert server.most_at_once == 3


def test_small_and_large_ones_together(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    server.objects = {"/o": DATA, "/s": b"small"}
    small = Download(name="s", url=f"{server.url}/s", root=root, path="s", size_bytes=5)
    unknown = Download(name="u", url=f"{server.url}/o", root=root, path="u")
    transfer.download([small, download(server, root), unknown, download(server, root, "p")])
    assert left_in(root) == ["o", "p", "s", "u"]
    assert all((root / name).read_bytes() == DATA for name in "opu")


@pytest.mark.parametrize("act", [reply(500), reply(503), reset], ids=["500", "503", "reset"])
def test_what_may_pass_is_tried_again_for_that_part(
    server: ScriptedServer, transfer: Transfer, root: Path, delays: list[float], act: object
) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", act)  # type: ignore[arg-type]
    transfer.download([download(server, root)])
    assert (root / "o").read_bytes() == DATA
    assert len(server.seen) == len(ALL) + 1
    assert delays == [0.5]


def test_a_part_that_breaks_off_goes_on_where_it_was(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", sends(DATA, sent=60_000))
    steps: list[int] = []
    transfer.download([download(server, root)], progress=steps.append)
    assert (root / "o").read_bytes() == DATA
    assert sum(steps) == len(DATA)
    assert transfer.stats.counts.wasted_bytes == 0
    again = set(ranges(server)) - set(ALL)
    assert len(again) == 1
    assert int(again.pop().removeprefix("bytes=").split("-")[0]) % 100_000 == 60_000  # type: ignore[union-attr]


def test_slow_to_zero_goes_on_by_another_connection(server: ScriptedServer, root: Path) -> None:
    until = threading.Event()
    server.objects = {"/o": DATA}
    server.script("GET", "/o", silent_after(DATA, 60_000, until))
    transfer = Transfer(connections=Connections(stall_timeout_s=0.3), pause=lambda *_: None)
    try:
        transfer.download([download(server, root)])
    finally:
        until.set()
        transfer.close()
    assert (root / "o").read_bytes() == DATA


def test_wrong_bytes_on_the_way_cost_one_more_fetch(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", sends(OTHER, more={"ETag": f'"{digest_bytes(DATA).blake3[:32]}"'}))
    steps: list[int] = []
    transfer.download([download(server, root)], progress=steps.append)
    assert (root / "o").read_bytes() == DATA
    assert ranges(server) == [*ALL, "whole"]
    assert sum(steps) == len(DATA)
    assert transfer.stats.counts.wasted_bytes == len(DATA)
    assert left_in(root) == ["o"]


def test_wrong_bytes_at_their_source_are_refused(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    server.objects = {"/o": OTHER}
    with pytest.raises(ChecksumMismatch, match="BLAKE3"):
        transfer.download([download(server, root)])
    assert left_in(root) == []
    assert transfer.stats.counts.downloaded_objects == 0


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x", DATA[:150_000]])
def test_an_object_of_another_size_is_refused(
    server: ScriptedServer, transfer: Transfer, root: Path, data: bytes
) -> None:
    server.objects = {"/o": data}
    with pytest.raises(ChecksumMismatch):
        transfer.download([download(server, root, digest=False)])
    assert left_in(root) == []


def test_an_object_that_is_replaced_in_the_middle_is_never_mixed(
    server: ScriptedServer, transfer: Transfer, root: Path
) -> None:
    """Inputs have no digest: only the ETag tells that the parts are of two versions."""
    server.objects = {"/o": OTHER}
    server.script("GET", "/o", sends(DATA), sends(DATA), sends(DATA))
    transfer.download([download(server, root, digest=False)])
    assert (root / "o").read_bytes() == OTHER
    assert ranges(server)[-1] == "whole"


@pytest.mark.parametrize("digest", [True, False])
def test_a_store_without_ranges_or_versions_sends_the_whole(
    server: ScriptedServer, transfer: Transfer, root: Path, digest: bool
) -> None:
    server.routes["GET", "/o"] = reply(200, DATA)
    transfer.download([download(server, root, digest=digest)])
    assert (root / "o").read_bytes() == DATA
    assert left_in(root) == ["o"]


@pytest.mark.parametrize(("digest", "asked"), [(True, ALL), (False, "whole")], ids=["digest", "nothing promised"])
def test_parts_without_a_version_need_a_digest(
    server: ScriptedServer, transfer: Transfer, root: Path, digest: bool, asked: str | list[str]
) -> None:
    """Neither ETag nor digest: nothing would tell that the parts are of two versions."""

    def nameless(handler: Handler) -> None:
        begin, _, last = handler.headers.get("Range", "bytes=0-700000").removeprefix("bytes=").partition("-")
        body = DATA[int(begin) : int(last) + 1]
        whole = len(body) == len(DATA)
        place = {} if whole else {"Content-Range": f"bytes {begin}-{last}/{len(DATA)}"}
        handler.answer(200 if whole else 206, body, place)

    server.routes["GET", "/o"] = nameless
    transfer.download([download(server, root, digest=digest)])
    assert (root / "o").read_bytes() == DATA
    assert ranges(server) == asked or ranges(server)[-1] == asked


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


@pytest.mark.parametrize("size_bytes", [1, 100_000, 100_001, 1_200_000, 1_200_001, 5 * 1024**3, 5 * 1024**3 - 1])
def test_parts_cover_the_object_exactly(size_bytes: int) -> None:
    made = parts_of(size_bytes)
    assert made[0].offset == 0
    assert made[-1].end == size_bytes
    assert all(one.end == two.offset for one, two in pairwise(made))
    assert all(part.end > part.offset for part in made)
    assert len(made) <= 12


def test_the_real_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert PARTS_FROM_BYTES == 32 * MIB
    assert [len(parts_of(size)) for size in (32 * MIB, 96 * MIB, 5 * 1024 * MIB)] == [4, 12, 12]
