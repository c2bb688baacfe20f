"""Connect a node to its peers, and remember which peers the node reaches."""

from __future__ import annotations

import time

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.relay.relay_port import RelayPort
from gpu_client.elastic.engines.wire.connection import CONNECT_S, Connection, SocketConnection, dial
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from gpu_client.elastic.errors import PeerLostError

PROBE_S = 3.0
"""Time for an address to answer a first call, before the node uses the relay."""
RETEST_S = 600.0
"""Time after a failed call in which the node uses the relay at once."""


class Dialer:
    """Calls of one node to its peers; any thread may call. A peer is one process, whose addresses stay.

    relay: the way to peers that the node does not reach; None for no such way.
    """

    def __init__(self, identity: NodeIdentity | None) -> None:
        self.relay: RelayPort | None = None
        self._identity = identity
        self._reached: set[str] = set()
        self._callers: set[str] = set()
        self._led: set[str] = set()
        self._failures: dict[str, tuple[float, PeerLostError]] = {}

    def dial(self, peer: Peer, timeout_s: float) -> SocketConnection:
        """Connect to a peer by TCP. Raises PeerLostError."""
        failed_at, failure = self._failures.get(peer.node, (-RETEST_S, None))
        if self.relay is not None and failure is not None and time.monotonic() < failed_at + RETEST_S:
            raise failure
        is_probe = self.relay is not None and peer.node not in self._reached
        try:
            connection = dial(peer, self._identity, timeout_s, PROBE_S if is_probe else CONNECT_S)
        except PeerLostError as error:
            if is_probe:
                self._failures[peer.node] = (time.monotonic(), error)
            raise
        self._reached.add(peer.node)
        return connection

    def dial_or_relay(self, peer: Peer, timeout_s: float) -> Connection:
        """Connect to a peer by TCP or, if TCP does not reach the peer, by relay. Raises PeerLostError."""
        try:
            return self.dial(peer, timeout_s)
        except PeerLostError:
            if self.relay is None or not self.is_relayed(peer):
                raise
            return self.relay.dial(peer)

    def is_relayed(self, peer: Peer) -> bool:
        """Return whether the peer is called by relay."""
        return self.relay is not None and peer.node in self._failures and not self.has_reached(peer)

    def has_reached(self, peer: Peer) -> bool:
        """Return whether an earlier call has reached the peer: a refusal then proves the end of the peer."""
        return peer.node in self._reached

    def note_caller(self, peer: Peer) -> None:
        """Remember that the peer has reached this node by TCP."""
        self._callers.add(peer.node)

    def has_met(self, peer: Peer) -> bool:
        """Return whether TCP has connected this node and the peer, whoever called."""
        return peer.node in self._callers or self.has_reached(peer)

    def lead(self, peer: Peer) -> None:
        """Remember that this node had to call a later member."""
        self._led.add(peer.node)

    def leads(self, peer: Peer) -> bool:
        """Return whether this node had to call the later member before."""
        return peer.node in self._led
