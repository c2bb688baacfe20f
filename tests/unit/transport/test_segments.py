"""Uploads that are pieces of files, on plain HTTP and on TLS."""

from __future__ import annotations

import errno
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_client.transport.errors import FileChanged, TransferCanceled, TransferError, Unreachable
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.retry import RetryPolicy
from gpu_client.transport.transfer.manager import Segment, Transfer, Upload
from tests.unit.transport.scripted_server import ScriptedServer, reply, reset, unread

DATA = os.urandom(3_000_000)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a file é.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture(params=["http", "tls"])
def store(
    request: pytest.FixtureRequest, tls: tuple[ssl.SSLContext, ssl.SSLContext]
) -> Iterator[tuple[ScriptedServer, Transfer]]:
    """A server and a client of it."""
    secure = request.param == "tls"
    transfer = Transfer(connections=Connections(tls=tls[1]), pause=lambda *_: None)
    with ScriptedServer(tls=tls[0] if secure else None) as server:
        yield server, transfer
        transfer.close()


def pieces(path: Path, *ranges: tuple[int, int]) -> tuple[Segment, ...]:
    return tuple(Segment(path, offset, size_bytes) for offset, size_bytes in ranges)


def upload(server: ScriptedServer, segments: tuple[Segment, ...], data: bytes) -> Upload:
    headers = {"x-amz-checksum-crc64nvme": digest_bytes(data).crc64nvme, "If-None-Match": "*"}
    return Upload(name="pack", segments=segments, size_bytes=len(data), url=f"{server.url}/pack", headers=headers)


def test_segments_arrive_one_behind_the_other(store: tuple[ScriptedServer, Transfer], file: Path) -> None:
    server, transfer = store
    other = file.with_name("other")
    other.write_bytes(DATA[:1000])
    segments = (
        *pieces(file, (2_000_000, 900_000), (0, 10), (10, 600_000)),
        Segment(other, 5, 7),
        *pieces(file, (0, 10), (0, 10), (1, 1_500_000), (50, 0)),
    )
    data = b"".join(segment.path.read_bytes()[segment.offset :][: segment.size_bytes] for segment in segments)
    steps: list[int] = []
    transfer.upload([upload(server, segments, data)], progress=steps.append)
    assert server.objects == {"/pack": data}
    assert sum(steps) == len(data)
    assert server.seen[0].headers["content-length"] == str(len(data))


def test_many_small_files_are_one_body(store: tuple[ScriptedServer, Transfer], tmp_path: Path) -> None:
    server, transfer = store
    for number in range(1_000):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    segments = tuple(Segment(tmp_path / str(number), 0, len(str(number))) for number in range(1_000))
    data = b"".join(b"%d" % number for number in range(1_000))
    transfer.upload([upload(server, segments, data)])
    assert server.objects == {"/pack": data}


def test_after_a_failure_all_segments_are_sent_again(store: tuple[ScriptedServer, Transfer], file: Path) -> None:
    server, transfer = store
    segments = pieces(file, (1_000_000, 1_000_000), (0, 500_000))
    server.script("PUT", "/pack", reply(503), reset)
    transfer.upload([upload(server, segments, DATA[1_000_000:2_000_000] + DATA[:500_000])])
    assert server.objects == {"/pack": DATA[1_000_000:2_000_000] + DATA[:500_000]}


@pytest.mark.parametrize("size_bytes", [0, 1_999_999])
def test_a_file_that_shrank_is_named(store: tuple[ScriptedServer, Transfer], file: Path, size_bytes: int) -> None:
    server, transfer = store
    item = upload(server, pieces(file, (0, 1000), (1_000_000, 1_000_000)), DATA[:1000] + DATA[1_000_000:2_000_000])
    os.truncate(file, size_bytes)
    with pytest.raises(FileChanged, match=r"a file é\.bin has no longer the"):
        transfer.upload([item])
    assert server.objects == {}


def test_a_file_that_is_cut_while_it_is_sent(
    store: tuple[ScriptedServer, Transfer], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file had all its bytes when it was opened; a later read then finds no more."""
    server, transfer = store
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        if found.st_size == len(DATA):
            os.truncate(file, 1_500_000)
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(FileChanged):
        transfer.upload([upload(server, pieces(file, (0, len(DATA))), DATA)])
    assert server.objects == {}


def test_a_file_that_vanished_is_named(store: tuple[ScriptedServer, Transfer], file: Path) -> None:
    server, transfer = store
    item = upload(server, pieces(file, (0, 1000)), DATA[:1000])
    file.unlink()
    with pytest.raises(FileChanged, match=r"a file é\.bin does not exist"):
        transfer.upload([item])
    assert server.objects == {}


def test_a_file_that_grew_does_not_matter_to_a_piece(store: tuple[ScriptedServer, Transfer], file: Path) -> None:
    server, transfer = store
    with file.open("ab") as more:
        more.write(b"more")
    transfer.upload([upload(server, pieces(file, (0, len(DATA))), DATA)])
    assert server.objects == {"/pack": DATA}


def test_a_directory_is_no_network_trouble(store: tuple[ScriptedServer, Transfer], tmp_path: Path) -> None:
    server, transfer = store
    (tmp_path / "directory").mkdir()
    item = Upload.of_file(name="o", path=tmp_path / "directory", size_bytes=4096, url=server.url + "/o", headers={})
    with pytest.raises(TransferError):
        transfer.upload([item])
    assert server.objects == {}


def test_a_disk_that_cannot_be_read_is_no_network_trouble(
    server: ScriptedServer, transfer: Transfer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(TransferError, match=r"reading .*Input/output error"):
        transfer.upload([upload(server, pieces(file, (0, 10)), DATA[:10])])


def test_a_store_that_reads_nothing_is_given_up(server: ScriptedServer, tmp_path: Path) -> None:
    """Slow to zero: the stall timeout, a minute in practice, ends the try."""
    until = threading.Event()
    server.script("PUT", "/pack", unread(until))
    big = tmp_path / "big"
    big.touch()
    os.truncate(big, 50_000_000)
    delays: list[float] = []
    transfer = Transfer(
        connections=Connections(stall_timeout_s=1), pause=lambda _, delay_s: delays.append(delay_s), draw=lambda: 1.0
    )
    item = Upload.of_file(name="pack", path=big, size_bytes=50_000_000, url=f"{server.url}/pack", headers={})
    try:
        transfer.upload([item])
    finally:
        until.set()
        transfer.close()
    assert len(server.objects["/pack"]) == 50_000_000
    assert delays[0] == 0.5
    assert transfer._sending.limit.allowed <= 2, "a store that does not answer in time is one with too much to do"
    assert transfer.stats.counts.wasted_bytes > 0


def test_a_store_that_never_reads_is_unreachable(server: ScriptedServer, tmp_path: Path) -> None:
    until = threading.Event()
    server.routes["PUT", "/pack"] = unread(until)
    big = tmp_path / "big"
    big.touch()
    os.truncate(big, 50_000_000)
    policy = RetryPolicy(max_tries=2, first_delay_s=0, max_delay_s=0)
    transfer = Transfer(connections=Connections(stall_timeout_s=0.2), policy=policy)
    item = Upload.of_file(name="p", path=big, size_bytes=50_000_000, url=f"{server.url}/pack", headers={})
    try:
        with pytest.raises(Unreachable, match=r"timed out"):
            transfer.upload([item])
    finally:
        until.set()
        transfer.close()


def test_a_blocked_upload_is_canceled_at_once(server: ScriptedServer, transfer: Transfer, tmp_path: Path) -> None:
    until, cancel = threading.Event(), threading.Event()
    server.routes["PUT", "/pack"] = unread(until)
    big = tmp_path / "big"
    big.touch()
    os.truncate(big, 50_000_000)
    item = Upload.of_file(name="p", path=big, size_bytes=50_000_000, url=f"{server.url}/pack", headers={})
    canceler = threading.Timer(0.1, cancel.set)
    canceler.start()
    try:
        with pytest.raises(TransferCanceled):
            transfer.upload([item], cancel=cancel)
    finally:
        until.set()
        canceler.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer-")]


def test_segments_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pack: the segments have other than its 11 bytes"):
        Upload(name="pack", segments=pieces(tmp_path, (0, 10)), size_bytes=11, url="", headers={})


def test_a_conflict_of_two_that_create_the_same_is_tried_again(
    server: ScriptedServer, transfer: Transfer, file: Path, delays: list[float]
) -> None:
    """409 says that another upload of the object is under way; 412 that it has arrived. Neither is an overload."""
    conflict = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
    server.script("PUT", "/pack", reply(409, conflict), reply(412))
    transfer.upload([upload(server, pieces(file, (0, 1000)), DATA[:1000])])
    assert delays == [0.5]
    assert transfer.stats.counts.already_stored_objects == 1
    assert transfer._sending.limit.allowed == 3


@pytest.mark.parametrize(
    ("answer", "allowed"),
    [
        (reply(503, b"<Error><Code>SlowDown</Code></Error>"), 1),
        (reply(500), 3),
        (reply(400, b"<Error><Code>RequestTimeout</Code></Error>"), 1),
    ],
    ids=["503", "500", "timeout"],
)
def test_a_store_that_asks_to_slow_down_gets_half_the_connections(
    server: ScriptedServer, transfer: Transfer, file: Path, answer: object, allowed: int
) -> None:
    server.script("PUT", "/pack", answer)  # type: ignore[arg-type]
    transfer.upload([upload(server, pieces(file, (0, 1000)), DATA[:1000])])
    assert server.objects == {"/pack": DATA[:1000]}
    assert transfer._sending.limit.allowed == allowed
