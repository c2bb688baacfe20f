"""Reduce deltas between machines on the internet: TCP, mutual TLS, quantized values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from gpu_client.elastic.codecs import CODECS, DEFAULT_CODEC, Codec, check_finite
from gpu_client.elastic.engines.engine import MAX_EXCHANGE_BYTES, Bucket, EngineTraffic, EpochGroup, named_in_errors
from gpu_client.elastic.engines.wire.connection import Connection
from gpu_client.elastic.engines.wire.dialer import Dialer
from gpu_client.elastic.engines.wire.frames import FrameKind, Header, WireFrame
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from gpu_client.elastic.engines.wire.listener import Handler
from gpu_client.elastic.engines.wire.mesh import Mesh
from gpu_client.elastic.engines.wire.reduction import Reduction, Window
from gpu_client.elastic.errors import GroupAbortedError, NotFiniteError

SOCKETS = 2
"""Connections for data in each direction between two members."""
HOLD_S = 60.0
"""Time that a caller of a later epoch waits until this node opens the epoch."""


class WireEngine:
    """Engine of one node. The owner of the node's listener passes connections that begin with HELLO to `greet`.

    identity: None only for members that are all on one machine.
    """

    def __init__(self, identity: NodeIdentity | None, codec: Codec = CODECS[DEFAULT_CODEC]) -> None:
        self.dialer = Dialer(identity)
        self._codec = codec
        self._changed = threading.Condition()
        self._mesh: Mesh | None = None
        self._epoch = 0
        self._reductions = 0
        self._window: Window | None = None
        self._closed_traffic = (0, 0)

    @property
    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of this engine for the node's listener."""
        return {FrameKind.HELLO: self.greet}

    def open(self, group: EpochGroup, timeout_s: float) -> None:
        """Connect to all members. Raises PeerLostError, with the cause `stale_epoch` if a peer is in a later epoch."""
        mesh = Mesh(group, SOCKETS, self.dialer)
        with self._changed:
            older, self._mesh, self._epoch, self._reductions = self._mesh, mesh, group.epoch, 0
            self._changed.notify_all()
        self._leave(older)
        mesh.connect(timeout_s)

    def exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Send the payload to each member, and return all payloads."""
        if len(payload) > MAX_EXCHANGE_BYTES:
            raise ValueError(f"the payload has {len(payload)} bytes, at most {MAX_EXCHANGE_BYTES} are allowed")
        return self._opened().exchange(payload, timeout_s)

    def reduce(
        self,
        round_number: int,
        buckets: Sequence[Bucket],
        weights: Sequence[float],
        timeout_s: float,
        completed: Callable[[int], None],
    ) -> None:
        """Reduce the buckets. A member whose values are not finite leaves the group."""
        mesh = self._opened()
        if mesh.group.size == 1:
            for bucket in buckets:
                with named_in_errors(bucket, round_number):
                    check_finite(bucket.values)
                bucket.average.copy_(bucket.values)
                completed(bucket.index)
            return
        with mesh.changed:
            reduction = Reduction(
                mesh,
                self._codec,
                number=self._reductions,
                round_number=round_number,
                buckets=buckets,
                weights=weights,
                timeout_s=timeout_s,
            )
            if self._window is None or self._window.shape != reduction.shape:
                self._window = Window(*reduction.shape)
            reduction.window = self._window
            self._reductions += 1
            mesh.reduction = reduction
            mesh.changed.notify_all()
        try:
            reduction.run(completed)
        except NotFiniteError:
            mesh.close(goodbye=True)
            raise

    def abort(self) -> None:
        """Fail the present call and all calls until the next `open`, and close all connections."""
        mesh = self._mesh
        if mesh is not None:
            mesh.fail(GroupAbortedError("another thread has aborted the group"))
            mesh.close(goodbye=False)

    def close(self) -> None:
        """Leave the epoch in order."""
        with self._changed:
            older, self._mesh = self._mesh, None
        self._leave(older)

    def _leave(self, mesh: Mesh | None) -> None:
        if mesh is not None:
            mesh.close(goodbye=True)
            mesh.join()
            with self._changed:
                sent, received = mesh.traffic
                self._closed_traffic = (self._closed_traffic[0] + sent, self._closed_traffic[1] + received)

    @property
    def traffic(self) -> EngineTraffic:
        """Return the bytes of all frames moved since the start, without those of TLS and TCP."""
        with self._changed:
            sent, received = self._mesh.traffic if self._mesh is not None else (0, 0)
            return EngineTraffic(self._closed_traffic[0] + sent, self._closed_traffic[1] + received)

    def greet(self, connection: Connection, hello: WireFrame) -> None:
        """Serve a lane of the present epoch; callers of later epochs wait, callers of earlier epochs are refused."""
        epoch = hello.header.epoch
        with self._changed:
            self._changed.wait_for(
                lambda: self._epoch >= epoch and (self._mesh is not None or self._epoch > epoch), HOLD_S
            )
            mesh = self._mesh
            reason = b"stale_epoch" if self._epoch > epoch else b"not_opened" if self._epoch < epoch else b""
        if reason or mesh is None:
            connection.send(Header(FrameKind.REFUSED, epoch=self._epoch), reason or b"closed")
        else:
            mesh.serve(connection, hello)

    def _opened(self) -> Mesh:
        if self._mesh is None:
            raise GroupAbortedError("the group is closed")
        with self._mesh.changed:
            self._mesh.check()
        return self._mesh
