"""The bandwidth cap, and how many connections are open, on a real server; time is the fake clock's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from baton.contract.admin.keys import KeyCreate
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.transfer.manager import Download, RangeDownload, Transfer, Upload
from tests.kits.clock import Clock
from tests.kits.waiting import until
from tests.unit.transport.scripted_server import Handler, ScriptedServer, reply

DATA = os.urandom(2_000_000)
RATE = 500_000.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def capped(clock: Clock) -> Transfer:
    return Transfer(
        connections=Connections(stall_timeout_s=5),
        max_upload_bytes_per_s=RATE,
        max_download_bytes_per_s=RATE,
        pause=lambda _, delay_s: clock.advance(delay_s),
        clock=clock,
    )


def upload(server: ScriptedServer, path: Path, name: str = "o") -> Upload:
    size_bytes = path.stat().st_size
    return Upload.of_file(name=name, path=path, size_bytes=size_bytes, url=f"{server.url}/{name}", headers={})


def paced(clock: Clock, began: float, *, moved_bytes: int, burst_bytes: float) -> bool:
    """Return whether at least the time of `moved_bytes` at the cap has passed, and not much more."""
    passed_s = clock.now - began
    return (moved_bytes - 3 * burst_bytes) / RATE <= passed_s <= moved_bytes / RATE * 1.2


@pytest.mark.parametrize("many", [1, 4])
def test_uploads_move_no_faster_than_the_cap(
    server: ScriptedServer, capped: Transfer, clock: Clock, tmp_path: Path, many: int
) -> None:
    path = tmp_path / "o"
    path.write_bytes(DATA)
    began = clock.now
    capped.upload([upload(server, path, f"o{number}") for number in range(many)])
    capped.close()
    assert server.objects == {f"/o{number}": DATA for number in range(many)}
    assert paced(clock, began, moved_bytes=many * len(DATA), burst_bytes=64 * 1024)
    found = capped.speed.upload_bytes_per_s()
    assert found == pytest.approx(RATE, rel=0.2)
    assert capped.speed.download_bytes_per_s() is None


def test_a_line_that_is_not_measured_yet_is_taken_to_be_as_slow_as_its_cap(capped: Transfer) -> None:
    """An unmeasured line counts as fast as its cap, so that codecs encode the first checkpoint over a slow line too."""
    assert capped.speed.upload_bytes_per_s() == RATE
    free = Transfer()
    assert free.speed.upload_bytes_per_s() is None
    free.close()


def test_downloads_move_no_faster_than_the_cap(
    server: ScriptedServer, capped: Transfer, clock: Clock, tmp_path: Path
) -> None:
    server.objects = {"/o": DATA}
    began = clock.now
    capped.download([Download(name="o", url=f"{server.url}/o", root=tmp_path, path="in")])
    found: list[bytes] = []
    item = RangeDownload(
        name="o",
        url=f"{server.url}/o",
        offset=1_000_000,
        size_bytes=1_000_000,
        object_bytes=len(DATA),
        deliver=lambda view: found.append(bytes(view)),
    )
    capped.fetch_ranges([item])
    capped.close()
    assert (tmp_path / "in").read_bytes() == DATA
    assert found == [DATA[1_000_000:]]
    assert paced(clock, began, moved_bytes=3_000_000, burst_bytes=64 * 1024)
    assert capped.speed.download_bytes_per_s() == pytest.approx(RATE, rel=0.2)


def test_calls_of_the_api_count_and_do_not_wait(
    server: ScriptedServer, capped: Transfer, clock: Clock, tmp_path: Path
) -> None:
    path = tmp_path / "o"
    path.write_bytes(b"x" * 100_000)
    server.routes["POST", "/jobs/batch"] = reply(200, {})
    began = clock.now
    with BatonClient(server.url, "key", transfer=capped) as client:
        client._http._sent(2_000_000)  # as if a call had carried so much
        assert clock.now == began
        client.transfer.upload([upload(server, path)])
    assert 3.5 <= clock.now - began <= 5


def test_bodies_of_calls_are_counted(server: ScriptedServer, capped: Transfer) -> None:
    counted: list[int] = []
    capped.count_upload = counted.append  # type: ignore[method-assign]
    server.routes["POST", "/keys"] = reply(500)
    with BatonClient(server.url, "key", transfer=capped) as client, pytest.raises(Exception, match="no usable answer"):
        client.create_key(KeyCreate(name="n", scopes=["worker"]))
    assert counted == [len(server.seen[0].body)]


def test_without_a_cap_nothing_waits(
    server: ScriptedServer, transfer: Transfer, delays: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "o"
    path.write_bytes(DATA)
    transfer.count_upload(10**9)
    transfer.upload([upload(server, path)])
    assert server.objects == {"/o": DATA}
    assert delays == []


def test_connections_are_shared_by_all_batches(server: ScriptedServer, tmp_path: Path) -> None:
    """Two concurrent batches, for example a checkpoint and artifacts, share the connections of one transfer."""
    path = tmp_path / "o"
    path.write_bytes(b"x")
    full = threading.Barrier(3, timeout=60)

    def meet(handler: Handler) -> None:
        full.wait()
        handler.answer(200)

    for number in range(12):
        server.routes["PUT", f"/o{number}"] = meet
    transfer = Transfer(workers=3)
    batches = [
        threading.Thread(target=transfer.upload, args=([upload(server, path, f"o{number}") for number in numbers],))
        for numbers in (range(6), range(6, 12))
    ]
    for batch in batches:
        batch.start()
    for batch in batches:
        batch.join(60)
        assert not batch.is_alive()
    transfer.close()
    assert server.most_at_once == 3
    assert len(server.seen) == 12


def test_a_connection_that_gets_free_goes_to_whoever_waited_longest(server: ScriptedServer, tmp_path: Path) -> None:
    """Artifacts do not wait for the end of a checkpoint."""
    path = tmp_path / "o"
    path.write_bytes(b"x")
    transfer = Transfer(workers=1)
    began, go_on = threading.Event(), threading.Event()

    def hold(handler: Handler) -> None:
        began.set()
        go_on.wait(60)
        handler.answer(200)

    server.routes["PUT", "/a0"] = hold
    checkpoint = threading.Thread(
        target=transfer.upload, args=([upload(server, path, f"a{number}") for number in range(4)],)
    )
    artifact = threading.Thread(target=transfer.upload, args=([upload(server, path, "b")],))
    checkpoint.start()
    assert began.wait(60)
    artifact.start()
    until(lambda: len(transfer._sending._queue) == 1)
    go_on.set()
    for batch in (checkpoint, artifact):
        batch.join(60)
    transfer.close()
    assert server.paths("PUT") == ["/a0", "/b", "/a1", "/a2", "/a3"]


def test_a_batch_with_nothing_left_to_begin_does_not_wait_for_others(server: ScriptedServer, tmp_path: Path) -> None:
    """A batch that has nothing left to begin ends, although slow uploads of other batches hold all connections."""
    path = tmp_path / "o"
    path.write_bytes(b"x")
    began = threading.Semaphore(0)
    go_on = {name: threading.Event() for name in ("slow0", "slow1", "a")}

    def hold(handler: Handler) -> None:
        began.release()
        go_on[handler.path[1:]].wait(60)
        handler.answer(200)

    for name in go_on:
        server.routes["PUT", f"/{name}"] = hold
    transfer = Transfer(workers=2)

    def batch(*names: str) -> threading.Thread:
        thread = threading.Thread(target=transfer.upload, args=([upload(server, path, name) for name in names],))
        thread.start()
        return thread

    slow = [batch("slow0")]
    assert began.acquire(timeout=60)
    quick = batch("a", "b")
    assert began.acquire(timeout=60)
    until(lambda: len(transfer._sending._queue) == 1)
    slow.append(batch("slow1"))
    until(lambda: len(transfer._sending._queue) == 2)
    go_on["a"].set()
    quick.join(60)
    assert not quick.is_alive()
    assert all(thread.is_alive() for thread in slow)
    for event in go_on.values():
        event.set()
    for thread in slow:
        thread.join(60)
    transfer.close()
    assert server.objects == {"/b": b"x"}
