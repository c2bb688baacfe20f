"""What the trainer prints: cut into lines, remembered for a failure report, spooled for shipping.

Everything here is bounded, because a training script may print anything: progress bars redrawn with carriage returns,
megabytes without a newline, binary garbage. A slow or absent consumer costs the oldest lines (counted), never time.
"""

from __future__ import annotations

import codecs
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gpu_client.agent.log_signals import LogSignals
from gpu_client.agent.point_spool import PointSpool

LAST_LINES = 200
# With the note of what was cut it fits into the 4,000 characters that a job's log takes.
MAX_LINE_CHARS = 3900
# A progress bar is redrawn many times a second: one state of it per this many seconds is kept.
REDRAW_INTERVAL_S = 10.0
# A chunk is sent by one call.
CHUNK_BYTES = 64 * 1024
CHUNK_LINES = 500
SPOOL_BYTES = 4 * 1024 * 1024

# Terminal control sequences, and control characters other than the tab.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class LineAssembler:
    """Turns the byte stream into clean lines of at most ``max_line_chars`` characters (and a note of what was cut)."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_line_chars: int = MAX_LINE_CHARS,
        redraw_interval_s: float = REDRAW_INTERVAL_S,
    ) -> None:
        self._clock = clock
        self._max_line_chars = max_line_chars
        self._redraw_interval_s = redraw_interval_s
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._cut_chars = 0
        self._redrawn_at = float("-inf")

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """Take bytes, give the lines that they complete; ``final`` also gives the unfinished last one."""
        *whole, rest = (self._pending + self._decoder.decode(data, final)).split("\n")
        lines: list[str] = []
        for line in whole:
            lines.append(self._finish(line))
            self._cut_chars = 0
        self._pending = self._hold(rest, lines)
        if final and self._pending:
            lines.append(self._finish(self._pending))
            self._pending, self._cut_chars = "", 0
        return lines

    def _hold(self, rest: str, lines: list[str]) -> str:
        """Shorten an unfinished line: only the last state of a redrawn one, only the head of an endless one."""
        body = rest.rstrip("\r")
        tail = "\r" if len(body) < len(rest) else ""
        if "\r" in body:
            earlier, body = body.rsplit("\r", 1)
            # What was cut belonged to a state that has been drawn over.
            superseded_cut, self._cut_chars = self._cut_chars, 0
            now = self._clock()
            if now - self._redrawn_at >= self._redraw_interval_s:
                self._redrawn_at = now
                lines.append(self._finish(earlier, superseded_cut))
        if len(body) > self._max_line_chars:
            self._cut_chars += len(body) - self._max_line_chars
            body = body[: self._max_line_chars]
        return body + tail

    def _finish(self, line: str, cut_chars: int | None = None) -> str:
        cut = self._cut_chars if cut_chars is None else cut_chars
        line = line.rstrip("\r")
        if "\r" in line:
            line = line.rsplit("\r", 1)[1]
            cut = 0
        line = _CONTROL.sub("", line)
        cut += max(0, len(line) - self._max_line_chars)
        return f"{line[: self._max_line_chars]} ...[{cut} characters cut]" if cut else line


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Some lines of the log. ``sequence`` counts from 0 without gaps; ``dropped_bytes`` were lost just before this."""

    sequence: int
    data: bytes
    dropped_bytes: int


class LogSpool:
    """Lines waiting to be shipped, in chunks, at most ``max_bytes`` of them: the oldest go first, and are counted.

    One consumer takes a chunk, ships it, and acknowledges it; an unacknowledged chunk is given again.
    """

    def __init__(
        self, max_bytes: int = SPOOL_BYTES, chunk_bytes: int = CHUNK_BYTES, chunk_lines: int = CHUNK_LINES
    ) -> None:
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        self._chunk_lines = chunk_lines
        self._lock = threading.Lock()
        self._sealed: deque[bytes] = deque()
        self._open = bytearray()
        self._open_lines = 0
        self._size_bytes = 0  # Of sealed and open; the chunk in flight is the consumer's.
        self._in_flight: LogChunk | None = None
        self._next_sequence = 0
        self._dropped_bytes = 0
        self._dropped_total_bytes = 0

    @property
    def dropped_total_bytes(self) -> int:
        """All that was ever dropped here."""
        return self._dropped_total_bytes

    def append(self, line: str) -> None:
        """Add one line. Never blocks on the consumer."""
        data = line.encode("utf-8", "replace") + b"\n"
        with self._lock:
            full = self._open_lines >= self._chunk_lines or len(self._open) + len(data) > self._chunk_bytes
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

    def next_chunk(self, flush: bool = False) -> LogChunk | None:
        """The oldest full chunk, with ``flush`` also an unfull one; None if there is none. The same until ``ack``."""
        with self._lock:
            if self._in_flight is None:
                if not self._sealed and flush and self._open:
                    self._seal()
                if not self._sealed:
                    return None
                data = self._sealed.popleft()
                self._size_bytes -= len(data)
                self._in_flight = LogChunk(self._next_sequence, data, self._dropped_bytes)
                self._next_sequence += 1
                self._dropped_bytes = 0
            return self._in_flight

    def ack(self, sequence: int) -> None:
        """The chunk with this number is stored: forget it. Another number is a caller's mistake: ValueError."""
        with self._lock:
            if self._in_flight is None or self._in_flight.sequence != sequence:
                raise ValueError(f"log chunk {sequence} is not the one in flight")
            self._in_flight = None

    def _seal(self) -> None:
        self._sealed.append(bytes(self._open))
        self._open.clear()
        self._open_lines = 0


class TrainerOutput:
    """The sink of one trainer: a ring of its last lines, a spool for shipping, and optionally an echo.

    ``echo`` is called with each line on a thread of its own, behind a small spool: a blocked terminal loses lines, it
    does not hold up the trainer. ``feed`` and ``finish`` are for the supervisor.
    """

    def __init__(
        self,
        echo: Callable[[str], None] | None = None,
        last_lines: int = LAST_LINES,
        spool: LogSpool | None = None,
        assembler: LineAssembler | None = None,
        *,
        points: PointSpool | None = None,
        signals: LogSignals | None = None,
    ) -> None:
        self.spool = spool or LogSpool()
        self.points = points or PointSpool(time.time)
        """What it reports, to be shipped with its lines."""
        self.signals = signals or LogSignals()
        self._assembler = assembler or LineAssembler()
        self._lock = threading.Lock()
        self._ring: deque[str] = deque(maxlen=last_lines)
        self._write = echo
        self._echo = _Echo(echo) if echo else None

    def followed(self) -> TrainerOutput:
        """The sink of the next process of the same job: the same log, its own last lines."""
        return TrainerOutput(
            self._write, self._ring.maxlen or LAST_LINES, self.spool, points=self.points, signals=self.signals
        )

    def last_lines(self, limit: int | None = None) -> list[str]:
        """The newest lines, oldest first."""
        with self._lock:
            lines = list(self._ring)
        return lines if limit is None else lines[max(0, len(lines) - limit) :]

    def feed(self, data: bytes, final: bool = False) -> None:
        """Take what the trainer wrote."""
        lines = self._assembler.feed(data, final)
        with self._lock:
            self._ring.extend(lines)
        self.signals.count(lines)
        for line in lines:
            self.spool.append(line)
            if self._echo:
                self._echo.put(line)

    def finish(self) -> None:
        """The trainer is gone: give out the unfinished line and let the echo end."""
        self.feed(b"", final=True)
        if self._echo:
            self._echo.close()


class _Echo:
    """A daemon thread that hands lines to a function that may block."""

    MAX_WAITING = 1000

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: deque[str] = deque(maxlen=self.MAX_WAITING)
        self._news = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="trainer-echo", daemon=True).start()

    def put(self, line: str) -> None:
        with self._news:
            self._lines.append(line)
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                line = self._lines.popleft()
            try:
                self._write(line)
            except (OSError, ValueError):
                return  # The agent's own output is closed: nothing is left to echo to, the log is still spooled.
