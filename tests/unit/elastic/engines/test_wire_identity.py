"""A node prepares its TLS settings once for each peer, because an epoch opens several connections to every peer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.wire import identity
from gpu_client.elastic.engines.wire.connection import dial
from gpu_client.elastic.engines.wire.frames import FrameKind, Header
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from gpu_client.elastic.engines.wire.listener import Listener
from gpu_client.elastic.errors import PeerLostError
from tests.kits.waiting import until


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Return the keys that TLS settings have loaded."""
    found: list[bytes] = []
    open_key = identity._open_key

    def noted(pem: bytes) -> AbstractContextManager[str]:
        found.append(pem)
        return open_key(pem)

    monkeypatch.setattr(identity, "_open_key", noted)
    yield found


def test_later_connections_to_a_peer_load_no_key(loads: list[bytes]) -> None:
    ours, theirs, others = NodeIdentity(), NodeIdentity(), NodeIdentity()
    greeted: list[str] = []
    handlers = {FrameKind.PING: lambda connection, _: greeted.append(connection.certificate)}
    listener = Listener(theirs, handlers, lambda: [ours.certificate, others.certificate], host="127.0.0.1")
    peer = Peer("1.1.00000001", (f"127.0.0.1:{listener.port}",), theirs.certificate)
    loaded = []
    try:
        for caller in (ours, ours, ours, others):
            _ping(peer, caller)
            until(lambda: len(greeted) == len(loaded) + 1, what="a greeting")
            loaded.append(len(loads))
    finally:
        listener.close()
    assert greeted == [*[ours.certificate] * 3, others.certificate]
    assert loaded[0] == loaded[1] == loaded[2] == loaded[3] - 2, "one load for each end of a new pair"


def test_settings_pin_one_peer(loads: list[bytes]) -> None:
    ours, theirs, others = NodeIdentity(), NodeIdentity(), NodeIdentity()
    listener = Listener(theirs, {}, lambda: [ours.certificate], host="127.0.0.1")
    addresses = (f"127.0.0.1:{listener.port}",)
    try:
        dial(Peer("1.1.00000001", addresses, theirs.certificate), ours, 60).close()
        for certificate, caller in ((others.certificate, ours), (theirs.certificate, others)):
            with pytest.raises(PeerLostError):
                dial(Peer("1.1.00000001", addresses, certificate), caller, 0.5)
    finally:
        listener.close()


def _ping(peer: Peer, caller: NodeIdentity) -> None:
    connection = dial(peer, caller, 60)
    connection.send(Header(FrameKind.PING))
    connection.close()
