"""Call peers through the object store, and serve the calls of peers."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from baton.contract.elastic.relay import RelayCaller, RelayRequest
from gpu_client.elastic.engines.engine import MAX_EXCHANGE_BYTES, Peer
from gpu_client.elastic.engines.relay.relay_connection import RelayCall, RelayCalls, RelayConnection
from gpu_client.elastic.engines.wire.frames import FrameError
from gpu_client.elastic.engines.wire.listener import GREETING_S, Handler
from gpu_client.elastic.errors import WorldCallError

logger = logging.getLogger(__name__)

BUSY_POLL_S, IDLE_POLL_S = 0.5, 10.0
"""Pauses between two questions for new calls: while peers are expected, and otherwise."""
MAX_SERVED = 1024
"""Calls that a node serves at the same time; more calls wait."""
EXPECTED_S = 60.0
"""Time after a sign of a peer in which more calls are expected."""


class RelayPort:
    """Relayed connections of one node. handlers: by the kind of the first frame, as for the listener."""

    def __init__(self, call: RelayCall, node: str, handlers: Mapping[int, Handler]) -> None:
        self._call = RelayCalls(call)
        self._node = node
        self._handlers = handlers
        self._changed = threading.Condition()
        self._is_closed = False
        self._busy_until = 0.0
        self._known: dict[tuple[str, str], RelayConnection] = {}
        """Connections by peer and channel, while they are open or announced as calls: the peer's first object on a
        channel that this node has opened is no call."""
        self._connections: set[RelayConnection] = set()
        threading.Thread(target=self._listen, name="relay-listen", daemon=True).start()

    def dial(self, peer: Peer) -> RelayConnection:
        """Return a new connection, whose first frame calls the peer."""
        channel = secrets.token_hex(4)
        connection = RelayConnection(self._call, self._node, peer.node, channel)
        with self._changed:
            self._known[peer.node, channel] = connection
        return connection

    def expect(self) -> None:
        """Look for calls often for a while."""
        with self._changed:
            self._busy_until = time.monotonic() + EXPECTED_S
            self._changed.notify_all()

    def close(self) -> None:
        """End all served connections, and serve no more calls."""
        with self._changed:
            self._is_closed = True
            served = [*self._connections]
            self._changed.notify_all()
        for connection in served:
            connection.interrupt()

    def _listen(self) -> None:
        while True:
            with self._changed:
                if not self._is_closed and time.monotonic() > self._busy_until:
                    self._changed.wait(IDLE_POLL_S)
                elif not self._is_closed:
                    self._changed.wait(BUSY_POLL_S)
                if self._is_closed:
                    return
            try:
                found = self._call(RelayRequest(node=self._node, calls=True)).calls
            except WorldCallError as error:
                # The node is not in the world yet or any more, or the control plane is away.
                logger.debug("no calls of peers: %s", error)
                continue
            for connection in self._accept(found):
                self.expect()
                threading.Thread(target=self._serve, args=(connection,), name="relay-serve", daemon=True).start()

    def _accept(self, found: Sequence[RelayCaller]) -> list[RelayConnection]:
        """Return a connection for each new call, and forget ended channels that no answer will announce again."""
        announced = {(one.node, one.channel) for one in found}
        with self._changed:
            self._known = {key: one for key, one in self._known.items() if key in announced or not one.is_ended}
            new = [key for key in announced if key not in self._known][: MAX_SERVED - len(self._connections)]
            accepted = {key: RelayConnection(self._call, self._node, *key) for key in new}
            self._known |= accepted
            self._connections.update(accepted.values())
        return [*accepted.values()]

    def _serve(self, connection: RelayConnection) -> None:
        try:
            frame = connection.receive(MAX_EXCHANGE_BYTES, GREETING_S)
            handler = self._handlers.get(frame.header.kind)
            if handler is not None:
                handler(connection, frame)
                connection.flush()
        except (OSError, EOFError, FrameError) as error:
            logger.info("closed a relayed connection: %s", error)
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()
