"""Ranges to memory: what stores answer, what breaks on the way, and how much memory it takes."""

from __future__ import annotations

import os
import ssl
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from gpu_client.transport.errors import ChecksumMismatch, ObjectMissing, TransferCanceled, TransferError, UrlExpired
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.transfer.manager import RangeDownload, Transfer
from tests.unit.transport.scripted_server import (
    Handler,
    ScriptedServer,
    reply,
    reset,
    sends,
    silent_after,
    without_length,
)

DATA = os.urandom(1_000_000)
EXPIRED = reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")


class Sink:
    """The receiver that checks and keeps delivered bytes. `piece_bytes`: size of a delivery, None for a whole range."""

    def __init__(self, data: bytes = DATA, piece_bytes: int | None = None) -> None:
        self.data = data
        self.piece_bytes = piece_bytes
        self.found: dict[int, bytes] = {}
        self.calls: Counter[int] = Counter()
        """Number of complete deliveries of each range, by offset."""

    def want(self, server: ScriptedServer, offset: int, size_bytes: int, *, path: str = "/o") -> RangeDownload:
        come = bytearray()

        def deliver(view: memoryview) -> None:
            assert threading.current_thread().name.startswith("transfer-")
            left_bytes = size_bytes - len(come)
            assert len(view) == (left_bytes if self.piece_bytes is None else min(left_bytes, self.piece_bytes))
            come.extend(view)
            if len(come) < size_bytes:
                return
            self.calls[offset] += 1
            if come != self.data[offset : offset + size_bytes]:
                raise ChecksumMismatch(f"the chunk at {offset} has other bytes")
            self.found[offset] = bytes(come)

        return RangeDownload(
            name="o",
            url=f"{server.url}{path}?X-Amz-Signature=s",
            offset=offset,
            size_bytes=size_bytes,
            object_bytes=len(self.data),
            deliver=deliver,
            piece_bytes=self.piece_bytes,
            begin=come.clear,
        )

    def complete(self, ranges: Iterable[tuple[int, int]]) -> bool:
        return self.found == {offset: self.data[offset : offset + size_bytes] for offset, size_bytes in ranges}


@pytest.fixture(params=[None, 70_000], ids=["whole", "in pieces"])
def sink(request: pytest.FixtureRequest) -> Sink:
    return Sink(piece_bytes=request.param)


RANGES = [(0, 1), (1, 299_999), (300_000, 500_000), (800_000, 200_000)]


def test_ranges_arrive_and_are_counted(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    server.objects = {"/o": DATA}
    steps: list[int] = []
    transfer.fetch_ranges([sink.want(server, *one) for one in RANGES], progress=steps.append)
    assert sink.complete(RANGES)
    assert sum(steps) == len(DATA)
    assert sorted(seen.headers["range"] for seen in server.seen) == [
        "bytes=0-0",
        "bytes=1-299999",
        "bytes=300000-799999",
        "bytes=800000-999999",
    ]
    counts = transfer.stats.counts
    assert (counts.downloaded_ranges, counts.downloaded_bytes, counts.wasted_bytes) == (4, len(DATA), 0)
    assert transfer._buffers.allocated_bytes == 0, "memory is given back at the end"


def test_headers_go_with_each_request(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    server.objects = {"/o": DATA}
    item = replace(sink.want(server, 10, 300_000), headers={"Authorization": "Bearer t"})
    transfer.fetch_ranges([item])
    (request,) = server.seen
    assert sink.complete([(10, 300_000)])
    assert (request.headers["authorization"], request.headers["range"]) == ("Bearer t", "bytes=10-300009")
    assert "Bearer t" not in repr(item)


def test_over_tls_too(tls: tuple[ssl.SSLContext, ssl.SSLContext], sink: Sink) -> None:
    transfer = Transfer(connections=Connections(tls=tls[1]))
    with ScriptedServer(objects={"/o": DATA}, tls=tls[0]) as server:
        transfer.fetch_ranges([sink.want(server, *one) for one in RANGES])
        transfer.close()
    assert sink.complete(RANGES)


def test_a_whole_object_is_asked_for_without_a_range(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    server.objects = {"/o": DATA}
    transfer.fetch_ranges([sink.want(server, 0, len(DATA))])
    assert sink.complete([(0, len(DATA))])
    assert "range" not in server.seen[0].headers


def test_a_store_that_sends_the_whole_object_instead(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    server.routes["GET", "/o"] = reply(200, DATA)
    transfer.fetch_ranges([sink.want(server, *one) for one in RANGES])
    assert sink.complete(RANGES)


def test_a_store_that_says_200_to_a_range(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    """rclone does."""
    body, place = DATA[1:300_000], {"Content-Range": f"bytes 1-299999/{len(DATA)}"}
    server.script("GET", "/o", reply(200, body, place))
    transfer.fetch_ranges([sink.want(server, 1, 299_999)])
    assert sink.complete([(1, 299_999)])


@pytest.mark.parametrize(
    "answer",
    [
        reply(206, DATA[1:300_000], {"Content-Range": f"bytes 0-299998/{len(DATA)}"}),
        reply(206, DATA[1:300_000], {"Content-Range": f"bytes 1-299998/{len(DATA)}"}),
        reply(206, DATA[1:300_000], {"Content-Range": "bytes 1-299999/999999"}),
        reply(206, DATA[1:300_000], {"Content-Range": "chunks 1-299999/1000000"}),
        reply(206, DATA[1:300_000]),
        reply(206, DATA[1:299_999], {"Content-Range": f"bytes 1-299999/{len(DATA)}"}),
        reply(206, DATA[1:300_001], {"Content-Range": f"bytes 1-299999/{len(DATA)}"}),
        reply(200, DATA[:-1]),
        reply(200, DATA + b"x"),
        reply(416, b"<Error><Code>InvalidRange</Code></Error>"),
        sends(b"z" * len(DATA)),
    ],
    ids=[
        "begins elsewhere", "ends elsewhere", "of another size", "other unit", "no place", "short", "long",
        "object short", "object long", "object far too short", "wrong bytes",
    ],
)  # fmt: skip
def test_anything_else_is_fetched_once_more_and_then_refused(
    server: ScriptedServer, transfer: Transfer, sink: Sink, answer: object
) -> None:
    last = (1, 299_999)
    good, bad = sink, Sink(piece_bytes=sink.piece_bytes)
    server.script("GET", "/o", answer, sends(DATA))  # type: ignore[arg-type]
    steps: list[int] = []
    transfer.fetch_ranges([good.want(server, *last)], progress=steps.append)
    assert good.complete([last])
    assert sum(steps) == last[1]
    server.routes["GET", "/o"] = answer  # type: ignore[assignment]
    with pytest.raises(ChecksumMismatch):
        transfer.fetch_ranges([bad.want(server, *last)], progress=steps.append)
    assert bad.found == {}
    assert sum(steps) == last[1], "what was thrown away is no progress"
    assert len(server.seen) == 4


def test_an_object_that_is_too_long_without_a_length(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    server.routes["GET", "/o"] = without_length(DATA + b"x")
    with pytest.raises(ChecksumMismatch, match="more bytes than were asked for"):
        transfer.fetch_ranges([sink.want(server, 0, len(DATA))])
    assert sink.found == {}


def test_too_much_without_a_length_is_noticed(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    def endless(handler: Handler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 10-19/{len(DATA)}")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(DATA[10:21])
        handler.close_connection = True

    server.routes["GET", "/o"] = endless
    with pytest.raises(ChecksumMismatch, match="more bytes than were asked for"):
        transfer.fetch_ranges([sink.want(server, 10, 10)])
    assert sink.found == {}


@pytest.mark.parametrize("act", [reply(500), reply(503, b"<Error><Code>SlowDown</Code></Error>"), reset])
def test_what_may_pass_is_tried_again(
    server: ScriptedServer, transfer: Transfer, sink: Sink, delays: list[float], act: object
) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", act, act)  # type: ignore[arg-type]
    transfer.fetch_ranges([sink.want(server, 5, 500_000)])
    assert sink.complete([(5, 500_000)])
    assert delays == [0.5, 1.0]


def test_pauses_are_random(server: ScriptedServer, sink: Sink) -> None:
    """Full jitter: a fleet that was refused together does not come back together."""
    delays: list[float] = []
    draws = iter([0.25, 0.75])
    transfer = Transfer(pause=lambda _, delay_s: delays.append(delay_s), draw=lambda: next(draws))
    server.objects = {"/o": DATA}
    server.script("GET", "/o", reply(503), reply(503))
    transfer.fetch_ranges([sink.want(server, 5, 10)])
    transfer.close()
    assert delays == [0.125, 0.75]


def test_a_body_that_breaks_off_goes_on_where_it_was(
    server: ScriptedServer, transfer: Transfer, sink: Sink, delays: list[float]
) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", sends(DATA, sent=300_000), sends(DATA, sent=100_000))
    steps: list[int] = []
    transfer.fetch_ranges([sink.want(server, 10, 900_000)], progress=steps.append)
    assert sink.complete([(10, 900_000)])
    assert [seen.headers["range"] for seen in server.seen] == [
        "bytes=10-900009",
        "bytes=300010-900009",
        "bytes=400010-900009",
    ]
    assert sum(steps) == 900_000
    assert min(steps) > 0
    assert transfer.stats.counts.wasted_bytes == 0
    assert delays == [0.5, 1.0]


def test_a_whole_object_that_breaks_off_goes_on_as_a_range(
    server: ScriptedServer, transfer: Transfer, sink: Sink
) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", sends(DATA, sent=999_999))
    transfer.fetch_ranges([sink.want(server, 0, len(DATA))])
    assert sink.complete([(0, len(DATA))])
    assert [seen.headers.get("range") for seen in server.seen] == [None, "bytes=999999-999999"]


def test_slow_to_zero_goes_on_by_another_connection(server: ScriptedServer, sink: Sink) -> None:
    until = threading.Event()
    server.objects = {"/o": DATA}
    server.script("GET", "/o", silent_after(DATA, 400_000, until))
    transfer = Transfer(connections=Connections(stall_timeout_s=1), pause=lambda *_: None)
    steps: list[int] = []
    try:
        transfer.fetch_ranges([sink.want(server, 0, 500_000)], progress=steps.append)
    finally:
        until.set()
        transfer.close()
    assert sink.complete([(0, 500_000)])
    assert len(server.seen) > 1
    assert sum(steps) == 500_000
    assert min(steps) > 0, "what had arrived was kept"
    assert transfer._receiving.limit.allowed <= 2


def test_wrong_bytes_are_fetched_once_more_from_the_first_byte(
    server: ScriptedServer, transfer: Transfer, sink: Sink
) -> None:
    server.objects = {"/o": DATA}
    server.script("GET", "/o", sends(b"z" * len(DATA), sent=200_000))
    transfer.fetch_ranges([sink.want(server, 0, 500_000)])
    assert sink.complete([(0, 500_000)])
    assert sink.calls == {0: 2}
    assert [seen.headers["range"] for seen in server.seen] == [
        "bytes=0-499999",
        "bytes=200000-499999",
        "bytes=0-499999",
    ]
    assert transfer.stats.counts.wasted_bytes == 500_000


def test_a_wrong_piece_is_not_waited_behind(server: ScriptedServer, transfer: Transfer) -> None:
    """Refused at once, all comes once more, by another connection: in this one there is still the rest."""
    server.objects = {"/o": DATA}
    server.script("GET", "/o", sends(b"z" * len(DATA)))
    come = bytearray()
    begun: list[int] = []

    def deliver(view: memoryview) -> None:
        if bytes(view) != DATA[len(come) : len(come) + len(view)]:
            raise ChecksumMismatch("other bytes")
        come.extend(view)

    def begin() -> None:
        begun.append(len(come))
        come.clear()

    item = RangeDownload(
        name="o", url=server.url + "/o", offset=0, size_bytes=len(DATA), object_bytes=len(DATA),
        deliver=deliver, piece_bytes=100_000, begin=begin,
    )  # fmt: skip
    steps: list[int] = []
    transfer.fetch_ranges([item], progress=steps.append)
    assert come == DATA
    assert begun == [0, 0]
    assert sum(steps) == len(DATA)
    assert transfer.stats.counts.wasted_bytes == 100_000
    assert transfer.stats.counts.retries == 1


def test_pieces_need_no_more_memory_than_one_of_them(server: ScriptedServer) -> None:
    server.objects = {"/o": DATA}
    transfer = Transfer(workers=1)
    allocated_bytes: set[int] = set()
    sink = Sink(piece_bytes=262_144)
    item = sink.want(server, 0, len(DATA))

    def deliver(view: memoryview) -> None:
        allocated_bytes.add(transfer._buffers.allocated_bytes)
        item.deliver(view)

    transfer.fetch_ranges([RangeDownload(**{**vars(item), "deliver": deliver})])
    transfer.close()
    assert sink.complete([(0, len(DATA))])
    assert allocated_bytes == {262_144}


def test_wrong_bytes_at_their_source_stop_the_others(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    server.objects = {"/o": DATA, "/bad": b"z" * len(DATA)}
    wanted = [sink.want(server, 0, 10, path="/bad")] + [sink.want(server, 10 + at, 10) for at in range(0, 5000, 10)]
    with pytest.raises(ChecksumMismatch, match="the chunk at 0 has other bytes"):
        transfer.fetch_ranges(wanted)
    assert len(server.seen) < len(wanted)
    assert 0 not in sink.found


def test_what_deliver_raises_ends_the_batch(server: ScriptedServer, transfer: Transfer) -> None:
    server.objects = {"/o": DATA}

    def deliver(_: memoryview) -> None:
        raise OSError(28, "No space left on device")

    item = RangeDownload(
        name="o", url=server.url + "/o", offset=0, size_bytes=10, object_bytes=len(DATA), deliver=deliver
    )
    with pytest.raises(OSError, match="No space left"):
        transfer.fetch_ranges([item])
    assert len(server.seen) == 1


def test_an_expired_url_lets_the_others_finish(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    """Three are under way when the second is refused: the other two arrive."""
    together = threading.Barrier(3, timeout=60)

    def meet(handler: Handler) -> None:
        together.wait()
        handler.send_object(DATA)

    def refuse(handler: Handler) -> None:
        together.wait()
        EXPIRED(handler)

    for path, act in (("/a", meet), ("/b", refuse), ("/c", meet)):
        server.routes["GET", path] = act
    server.objects = {"/o": DATA}
    wanted = [sink.want(server, at, 100_000, path=path) for at, path in ((0, "/a"), (100_000, "/b"), (200_000, "/c"))]
    with pytest.raises(UrlExpired):
        transfer.fetch_ranges(wanted)
    assert sink.complete([(0, 100_000), (200_000, 100_000)])
    transfer.fetch_ranges([sink.want(server, 100_000, 100_000)])
    assert sink.complete([(0, 100_000), (100_000, 100_000), (200_000, 100_000)])


def test_a_url_that_expires_between_two_tries(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    server.script("GET", "/o", sends(DATA, sent=1000), EXPIRED)
    with pytest.raises(UrlExpired):
        transfer.fetch_ranges([sink.want(server, 0, 500_000)])
    assert sink.found == {}


@pytest.mark.parametrize(("status", "kind"), [(404, ObjectMissing), (403, TransferError), (307, TransferError)])
def test_what_will_not_pass_is_raised(
    server: ScriptedServer, transfer: Transfer, sink: Sink, delays: list[float], status: int, kind: type[Exception]
) -> None:
    server.routes["GET", "/o"] = reply(status)
    with pytest.raises(kind):
        transfer.fetch_ranges([sink.want(server, 0, 10)])
    assert delays == []


def test_memory_stays_within_its_budget(server: ScriptedServer) -> None:
    data = os.urandom(6_000_000)
    server.objects = {"/o": data}
    transfer = Transfer(workers=8, memory_bytes=2 * 1024**2)
    most = 0
    sink = Sink(data)

    def watched(item: RangeDownload) -> RangeDownload:
        def deliver(view: memoryview) -> None:
            nonlocal most
            most = max(most, transfer._buffers.allocated_bytes)
            item.deliver(view)

        return RangeDownload(**{**vars(item), "deliver": deliver})

    ranges = [(offset, 500_000) for offset in range(0, 6_000_000, 500_000)]
    transfer.fetch_ranges([watched(sink.want(server, *one)) for one in ranges])
    transfer.close()
    assert sink.complete(ranges)
    assert 500_000 <= most <= 2 * 1024**2


def test_a_connection_that_was_closed_between_requests_costs_no_try(
    server: ScriptedServer, transfer: Transfer, sink: Sink, delays: list[float]
) -> None:
    """A store may close an idle connection at the very moment in which it is used again."""
    server.objects = {"/o": DATA}
    transfer.fetch_ranges([sink.want(server, 0, 10)])
    server.script("GET", "/o", reset)
    transfer.fetch_ranges([sink.want(server, 10, 10)])
    assert sink.complete([(0, 10), (10, 10)])
    assert delays == []
    assert transfer.stats.counts.retries == 0


def test_canceled_in_the_middle(server: ScriptedServer, transfer: Transfer, sink: Sink) -> None:
    until, cancel = threading.Event(), threading.Event()
    server.routes["GET", "/o"] = silent_after(DATA, 1000, until)
    canceler = threading.Timer(0.1, cancel.set)
    canceler.start()
    try:
        with pytest.raises(TransferCanceled):
            transfer.fetch_ranges([sink.want(server, 0, 10_000)], cancel=cancel)
    finally:
        until.set()
        canceler.join()
    assert sink.found == {}


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 10), (0, 0), (999_999, 2)])
def test_what_is_no_range_is_refused(server: ScriptedServer, sink: Sink, offset: int, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="not a range"):
        sink.want(server, offset, size_bytes)
