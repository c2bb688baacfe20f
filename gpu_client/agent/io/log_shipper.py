"""Spool the trainer's output and send the lines to the job's log in the background, with the reported values.

The spool drops lines rather than delay the training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.contract.worker.output import LogChunk, ReportedPoint, log_wait_s
from gpu_client.agent.io.metric_buffer import MetricBuffer
from gpu_client.transport.errors import BatonError, InvalidRequest, LeaseLost

logger = logging.getLogger("baton.logs")

SHIP_EVERY_S = 5.0
"""Interval of the sends in seconds: all lines in the first minutes, later full chunks only (`log_wait_s`).
Each chunk is an API call and a PUT; one every 5 s would cost twenty times as much as all heartbeats (docs/costs.md)."""
# Limits of a chunk (the content of one call) and of the spool.
CHUNK_BYTES = 64 * 1024
CHUNK_LINES = 500
SPOOL_BYTES = 4 * 1024 * 1024

MAX_LINE_CHARS = 4000
MAX_CALLS = 4
"""Calls in one round. If a script prints faster, the spool drops and counts the oldest lines."""

MAX_FAREWELL_CALLS = 20
MAX_SHIP_S = 20.0
"""Seconds after which no further call begins, so that a slow control plane does not delay the final report."""


@dataclass(frozen=True, slots=True)
class SpooledChunk:
    """Chunk of log lines. ``sequence`` counts from 0 without gaps; ``dropped_bytes`` were lost before this chunk."""

    sequence: int
    data: bytes
    dropped_bytes: int


class LogSpool:
    """Queue of lines before their upload, in chunks of at most ``max_bytes`` in total.

    A full spool drops the oldest lines and counts the dropped bytes. One consumer takes, sends and acknowledges chunks;
    the spool returns an unacknowledged chunk again.
    """

    def __init__(self, max_bytes: int = SPOOL_BYTES, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._sealed: deque[bytes] = deque()
        self._open = bytearray()
        self._open_lines = 0
        self._size_bytes = 0  # Bytes of sealed and open chunks; the chunk in flight belongs to the consumer.
        self._in_flight: SpooledChunk | None = None
        self._next_sequence = 0
        self._dropped_bytes = 0
        self._dropped_total_bytes = 0

    @property
    def dropped_total_bytes(self) -> int:
        """Return the number of bytes ever dropped."""
        return self._dropped_total_bytes

    def append(self, line: str) -> None:
        """Add one line. Never waits for the consumer."""
        data = line.encode("utf-8", "replace") + b"\n"
        with self._lock:
            full = self._open_lines >= CHUNK_LINES or len(self._open) + len(data) > self._chunk_bytes
            if self._open and full:
                self._seal()
            self._open += data
            self._open_lines += 1
            self._size_bytes += len(data)
            while self._size_bytes > self._max_bytes and (self._sealed or self._open):
                if not self._sealed:
                    self._seal()
                lost_bytes = len(self._sealed.popleft())
                self._size_bytes -= lost_bytes
                self._dropped_bytes += lost_bytes
                self._dropped_total_bytes += lost_bytes

    def next_chunk(self, flush: bool = False) -> SpooledChunk | None:
        """Return the oldest full chunk (with ``flush`` also a partial chunk), or None.

        Returns the same chunk until ``ack``.
        """
        with self._lock:
            if self._in_flight is None:
                if not self._sealed and flush and self._open:
                    self._seal()
                if not self._sealed:
                    return None
                data = self._sealed.popleft()
                self._size_bytes -= len(data)
                self._in_flight = SpooledChunk(self._next_sequence, data, self._dropped_bytes)
                self._next_sequence += 1
                self._dropped_bytes = 0
            return self._in_flight

    def ack(self, sequence: int) -> None:
        """Remove the stored chunk `sequence`. Raises ValueError for any other number."""
        with self._lock:
            if self._in_flight is None or self._in_flight.sequence != sequence:
                raise ValueError(f"log chunk {sequence} is not the one in flight")
            self._in_flight = None

    def _seal(self) -> None:
        self._sealed.append(bytes(self._open))
        self._open.clear()
        self._open_lines = 0


class _Parcel(NamedTuple):
    """Content of one call. `sequence`: number of the chunk; None without lines."""

    sequence: int | None
    lines: list[str]
    dropped_bytes: int
    points: list[ReportedPoint]


class LogShipper:
    """A thread that sends the spooled lines, every few seconds and later less often, until closed.

    Each call carries one chunk and the waiting points, so that the reports of a printing training cost no calls. Points
    without lines cause a call only when a partial chunk would be due. A job takes no lines after its attempt has ended,
    therefore call `flush` just before the final report.
    """

    def __init__(
        self,
        spool: LogSpool,
        send: Callable[[LogChunk], object],
        *,
        points: MetricBuffer | None = None,
        every_s: float = SHIP_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._points = points
        self._send = send
        self._every_s = every_s
        self._clock = clock
        self._next_line = 0
        self._next_point = 0
        self._in_flight: _Parcel | None = None
        self._lost = False
        self._shipping = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-shipper", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Send the remaining lines, up to 20 chunks or 20 s, until a call fails."""
        self._ship(max_calls=MAX_FAREWELL_CALLS, unfull=True, farewell=True)

    def close(self) -> None:
        """End the thread. A later `flush` still sends the remaining lines."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        began_at = swept_at = self._clock()
        while not self._closing.wait(self._every_s):
            now = self._clock()
            unfull = now - swept_at >= log_wait_s(now - began_at)
            swept_at = now if unfull else swept_at
            try:
                self._ship(max_calls=MAX_CALLS, unfull=unfull)
            except Exception:
                # Catch all: a bug must not silently end the job's log. The chunk stays in the spool for the next try.
                logger.exception("log lines could not be sent")

    def _ship(self, *, max_calls: int, unfull: bool, farewell: bool = False) -> None:
        """Send full chunks (with `unfull` also the partial chunk), or points alone.

        Stops at the first failure, after `max_calls`, or without more chunks; a later round sends a failed chunk again.
        Points that arrive during a round wait for the next round; `farewell` marks the last round.
        """
        with self._shipping:
            until = self._clock() + MAX_SHIP_S
            for call in range(max_calls):
                parcel = None if self._lost else self._next_parcel(unfull, alone=unfull and (farewell or call == 0))
                if parcel is None or self._clock() >= until:
                    return
                try:
                    self._deliver(parcel)
                except LeaseLost:
                    self._lost = True
                    return
                except BatonError as error:
                    logger.warning("log lines are kept for later: %s", error)
                    return
                self._in_flight = None
                self._next_line += len(parcel.lines)
                if parcel.sequence is not None:
                    self._spool.ack(parcel.sequence)

    def _next_parcel(self, unfull: bool, *, alone: bool) -> _Parcel | None:
        """Return the content of the next call. `alone`: return points even without lines.

        Returns the same parcel until its delivery, so that a retry after a lost answer is idempotent.
        """
        if self._in_flight is None:
            chunk = self._spool.next_chunk(flush=unfull)
            points = self._points.take() if self._points is not None and (chunk is not None or alone) else []
            if chunk is not None:
                lines = chunk.data.decode("utf-8", "replace").removesuffix("\n").split("\n")
                short = [line[:MAX_LINE_CHARS] for line in lines]
                self._in_flight = _Parcel(chunk.sequence, short, chunk.dropped_bytes, points)
            elif points:
                self._in_flight = _Parcel(None, [], 0, points)
        return self._in_flight

    def _deliver(self, parcel: _Parcel) -> None:
        """Send a parcel; drop refused content, which would otherwise block all later content forever."""
        fields: dict[str, Any] = {
            "first_line": self._next_line,
            "lines": parcel.lines,
            "dropped_bytes": parcel.dropped_bytes,
            "first_point": self._next_point,
        }
        if parcel.points:
            try:
                self._send(LogChunk(**fields, points=parcel.points))
                self._next_point += len(parcel.points)
                return
            except InvalidRequest as error:
                logger.warning("reported values are dropped: %s", error)
                self._points, parcel.points[:] = None, []
        if parcel.lines:
            try:
                self._send(LogChunk(**fields))
            except InvalidRequest as error:
                logger.warning("%d log lines are dropped: %s", len(parcel.lines), error)
