"""Large files in parts: several connections at once, one file that is whole and verified or not there."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest

from gpu_client.transport.errors import (
    ChecksumMismatch,
)
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.download_parts import PARTS_FROM_BYTES, parts_of
from gpu_client.transport.transfer.manager import Download, Transfer
from tests.unit.transport.parts_kit import ALL, DATA, MIB, OTHER, download, left_in, make_parts_small, ranges
from tests.unit.transport.scripted_server import (
    Handler,
    ScriptedServer,
    reply,
    reset,
    sends,
    silent_after,
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    make_parts_small(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


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


def test_parts_move_at_the_same_time(server: ScriptedServer, transfer: Transfer, root: Path) -> None:
    together = threading.Barrier(3, timeout=60)

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
    transfer = Transfer(connections=Connections(stall_timeout_s=1), pause=lambda *_: None)
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
    with pytest.raises(ChecksumMismatch, match="CRC-64/NVME"):
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
    """A fetch in parts needs an ETag or a digest: without both, parts of two versions would pass unnoticed."""

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
