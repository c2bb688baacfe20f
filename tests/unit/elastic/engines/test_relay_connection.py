"""A relayed connection signs, stores and fetches objects in order, and repeats what may succeed later."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from baton.contract.elastic.relay import RelayAnswer, RelayRequest, RelayTarget
from gpu_client.elastic.engines.relay import relay_connection
from gpu_client.elastic.engines.relay.relay_connection import LARGEST_BYTES, SMALLEST_BYTES, RelayConnection
from gpu_client.elastic.engines.wire import connection
from gpu_client.elastic.engines.wire.frames import Header, WireFrame
from gpu_client.elastic.errors import NotAMemberError, WorldCallError, WorldUnavailableError

OWN, PEER, CHANNEL = "0.1.0000000a", "1.1.0000000b", "9f86d081"


class Store:
    """Object store and control plane in memory. refusals: errors of the next calls; statuses: of the next requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.upload_s = 0.0
        self.objects: dict[str, bytes] = {}
        self.requests: list[RelayRequest] = []
        self.refusals: list[WorldCallError] = []
        self.statuses: list[int] = []

    def call(self, request: RelayRequest) -> RelayAnswer:
        self.requests.append(request)
        if self.refusals:
            raise self.refusals.pop(0)
        if request.upload is not None:
            target = RelayTarget(url=f"{request.upload.to}/{request.upload.number}", headers={})
            return RelayAnswer(upload=target, life_s=100)
        assert request.download is not None
        first = request.download.number
        return RelayAnswer(downloads=[f"{request.node}/{first + place}" for place in range(3)], life_s=100)

    def request(
        self, method: str, url: str, _headers: Mapping[str, str], body: bytes, _limit: int
    ) -> tuple[int, bytes]:
        if self.statuses:
            return self.statuses.pop(0), b""
        if method == "PUT":
            self.now += self.upload_s
            existed = url in self.objects
            self.objects.setdefault(url, bytes(body))
            return (412 if existed else 200), b""
        return (200, self.objects[url]) if url in self.objects else (404, b"")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()

    def pause(_: RelayConnection, seconds: float) -> None:
        store.now += seconds

    monkeypatch.setattr(relay_connection, "ObjectClient", lambda: store)
    monkeypatch.setattr(RelayConnection, "_pause", pause)
    for module in (relay_connection, connection):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: store.now))
    return store


def connect(store: Store, own: str = OWN, peer: str = PEER) -> RelayConnection:
    return RelayConnection(store.call, own, peer, CHANNEL)


def test_frames_arrive_in_order_and_read_objects_are_announced(store: Store) -> None:
    sender, receiver = connect(store), connect(store, PEER, OWN)
    frames = [WireFrame(Header(5, length=number, call=number), bytes(number)) for number in range(6)]
    for frame in frames:
        sender.send(frame.header, frame.payload)
        sender.flush()
    assert [receiver.receive(100, 5) for _ in frames] == frames
    windows = [one.download.number for one in store.requests if one.download is not None]
    assert windows == [0, 1, 4], "the first object is deleted at once, because it announces the channel"
    with pytest.raises(TimeoutError):
        receiver.receive(100, 5)
    assert 5 < store.now < 5 + 2 * relay_connection.LONGEST_POLL_S


def test_the_object_that_announces_a_channel_is_deleted_although_no_other_follows(store: Store) -> None:
    sender, receiver = connect(store), connect(store, PEER, OWN)
    sender.send(Header(5), b"x")
    sender.flush()
    assert receiver.receive(100, 5).payload == b"x"
    assert [one.download.number for one in store.requests if one.download is not None] == [0, 1]


def test_objects_grow_on_a_fast_line_and_shrink_on_a_slow_line(store: Store) -> None:
    sender = connect(store)
    sender.send(Header(5), bytes(6 * LARGEST_BYTES))
    sizes = [len(store.objects[f"{PEER}/{number}"]) for number in range(len(store.objects))]
    assert sizes[:7] == [SMALLEST_BYTES * factor for factor in (1, 2, 4, 8, 16, 32, 32)]
    store.upload_s = 10.0
    before = len(store.objects)
    sender.send(Header(5), bytes(4 * LARGEST_BYTES))
    sizes = [len(store.objects[f"{PEER}/{number}"]) for number in range(before, len(store.objects))]
    assert sizes[-1] == SMALLEST_BYTES and sorted(sizes, reverse=True) == sizes


@pytest.mark.parametrize(
    ("refusals", "statuses"), [([WorldUnavailableError("away")], []), ([], [503, 500]), ([], [403])]
)
def test_what_fails_for_a_while_is_repeated(store: Store, refusals: list[WorldCallError], statuses: list[int]) -> None:
    sender, receiver = connect(store), connect(store, PEER, OWN)
    sender.send(Header(5), b"x")
    for use in (sender.flush, lambda: receiver.receive(100, 5)):
        store.refusals, store.statuses = [*refusals], [*statuses]
        use()
        assert (store.refusals, store.statuses) == ([], [])
    assert receiver.received_bytes == sender.sent_bytes == len(store.objects[f"{PEER}/0"])


def test_an_object_that_an_earlier_try_has_stored_is_not_stored_again(store: Store) -> None:
    sender, receiver = connect(store), connect(store, PEER, OWN)
    sender.send(Header(5), b"first")
    sender.flush()
    again = connect(store)
    again.send(Header(5), b"first")
    again.flush()
    again.send(Header(5), b"second")
    again.flush()
    assert [receiver.receive(100, 5).payload for _ in range(2)] == [b"first", b"second"]


def test_a_long_failure_and_an_exclusion_end_the_connection(store: Store) -> None:
    sender = connect(store)
    store.statuses = [503] * 1000
    sender.send(Header(5), b"")
    with pytest.raises(TimeoutError, match="503"):
        sender.flush()
    assert relay_connection.RETRY_S < store.now < relay_connection.RETRY_S + 2
    store.statuses, store.refusals = [], [NotAMemberError("node 0.1.0000000a is no member")]
    with pytest.raises(OSError, match="no member") as caught:
        sender.flush()
    assert not isinstance(caught.value, TimeoutError)
