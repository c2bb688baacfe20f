"""Cause faults of one node from inside its process: signals at exact points, and connections that are cut or slow."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_client.elastic.codecs import CODECS, Codec
from gpu_client.elastic.engines.engine import Bucket, EpochGroup, Peer
from gpu_client.elastic.engines.wire.connection import SocketConnection
from gpu_client.elastic.engines.wire.wire_engine import WireEngine
from gpu_client.elastic.recovery.state_transfer import PartRequest
from gpu_client.elastic.recovery.wire_transfer import WireTransfer

POINTS = ("step", "open", "fetch", "reduce", "encode", "accumulate", "decode", "vote", "commit", "committed")
"""In the order of a round: `encode` to `decode` are inside the reduce; at `vote` the node has all averages."""
LINK_POLL_S = 0.05


class FaultPoints:
    """Points at which the file `fault` (`{"point", "skip", "signal"}`) lets the process send itself a signal.

    skip: crossings of the point that pass before.
    """

    def __init__(self, folder: Path, write: Callable[..., None]) -> None:
        self._path, self._write = folder / "fault", write
        self._lock = threading.Lock()
        self._fault: dict[str, Any] = {}

    def cross(self, point: str) -> None:
        """Pass the point, or end or stop here."""
        if not self._fault and not self._path.exists():
            return
        with self._lock:
            if not self._fault:
                if not self._path.exists():
                    return
                self._fault = json.loads(self._path.read_text())
            if self._fault["point"] != point:
                return
            self._fault["skip"] -= 1
            if self._fault["skip"] >= 0:
                return
            signal_number, self._fault = self._fault["signal"], {}
            self._path.unlink()
            self._write("fault", point=point, signal=signal_number)
            os.kill(os.getpid(), signal_number)


class Throttle:
    """Rate of all connections of the process, from the file `link`: bytes per second, 0 for a cut."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "link"
        self._rate: float | None = None
        threading.Thread(target=self._poll, name="bench-link", daemon=True).start()

    def wait(self, connection: SocketConnection, count: int, deadline: float | None) -> None:
        """Wait until `count` bytes may pass. Raises OSError if the connection is closed meanwhile, TimeoutError."""
        while (rate := self._rate) is not None:
            if getattr(connection, "is_interrupted", False):
                raise OSError("the connection is closed")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("the link is cut")
            if rate:
                time.sleep(count / rate)
                return
            time.sleep(LINK_POLL_S)

    def install(self) -> None:
        """Let all connections pass through the throttle."""
        send, receive, interrupt = SocketConnection._send_all, SocketConnection._receive_all, SocketConnection.interrupt

        def _send_all(connection: SocketConnection, data: memoryview, deadline: float | None) -> None:
            self.wait(connection, len(data), deadline)
            send(connection, data, deadline)

        def _receive_all(connection: SocketConnection, out: memoryview, deadline: float | None) -> None:
            self.wait(connection, 0, deadline)
            receive(connection, out, deadline)

        def _interrupt(connection: SocketConnection) -> None:
            connection.is_interrupted = True  # type: ignore[attr-defined]
            interrupt(connection)

        SocketConnection._send_all = _send_all  # type: ignore[method-assign]
        SocketConnection._receive_all = _receive_all  # type: ignore[method-assign]
        SocketConnection.interrupt = _interrupt  # type: ignore[method-assign]

    def _poll(self) -> None:
        while True:
            try:
                self._rate = float(self._path.read_text())
            except (FileNotFoundError, ValueError):
                self._rate = None
            time.sleep(LINK_POLL_S)


class PointedCodec:
    """Codec that crosses points."""

    def __init__(self, codec: Codec, points: FaultPoints) -> None:
        self._codec, self._points = codec, points
        self.name, self.encoded_bytes = codec.name, codec.encoded_bytes

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self._points.cross("encode")
        self._codec.encode(values, out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._points.cross("decode")
        self._codec.decode(data, out)

    def accumulate(self, data: torch.Tensor, weight: float, out: torch.Tensor) -> None:
        self._points.cross("accumulate")
        self._codec.accumulate(data, weight, out)


def install_points(points: FaultPoints, module: Any) -> None:
    """Let codecs, engine and transfer of `gpu_client.elastic.node` cross points."""
    for name, codec in CODECS.items():
        CODECS[name] = PointedCodec(codec, points)

    class PointedEngine(WireEngine):
        def open(self, group: EpochGroup, timeout_s: float) -> None:
            points.cross("open")
            super().open(group, timeout_s)

        def reduce(
            self,
            round_number: int,
            buckets: Sequence[Bucket],
            weights: Sequence[float],
            timeout_s: float,
            completed: Callable[[int], None],
        ) -> None:
            points.cross("reduce")
            super().reduce(round_number, buckets, weights, timeout_s, completed)
            points.cross("vote")

    class PointedTransfer(WireTransfer):
        def read(self, peer: Peer, request: PartRequest) -> torch.Tensor:
            points.cross("fetch")
            return super().read(peer, request)

    module.WireEngine, module.WireTransfer = PointedEngine, PointedTransfer
