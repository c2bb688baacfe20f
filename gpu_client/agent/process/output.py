"""Turn the trainer's output into lines: the last lines, the log spool, counted texts.

All buffers are bounded, because a training script may print anything: progress bars redrawn with carriage returns,
megabytes without a newline, binary garbage. A slow or absent consumer costs the oldest lines (counted), never time.
"""

from __future__ import annotations

import codecs
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from baton.contract.rules.document.rule import Signal
from baton.contract.rules.metrics import name_in_rules
from baton.contract.worker.control import RulesInForce
from gpu_client.agent.io.log_shipper import LogSpool
from gpu_client.agent.io.metric_buffer import MetricBuffer
from gpu_client.checkpoints.local.sanitizer import MAX_METRICS

logger = logging.getLogger("baton.job")

LAST_LINES = 200
# A line of a job's log has at most 4,000 characters; the rest is for the note of the cut.
MAX_LINE_CHARS = 3900
# Scripts redraw a progress bar many times a second, therefore the log keeps one state in each interval.
REDRAW_INTERVAL_S = 10.0

# Terminal control sequences, and control characters other than the tab.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class LineAssembler:
    """Converter of a byte stream into clean lines of at most ``max_line_chars`` characters and a note of the cut."""

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
        """Add bytes and return the completed lines; ``final`` also returns the unfinished last line."""
        *whole, rest = (self._pending + self._decoder.decode(data, final)).split("\n")
        lines: list[str] = []
        for line in whole:
            lines.append(self._finish(line))
            self._cut_chars = 0
        self._pending = self._shorten(rest, lines)
        if final and self._pending:
            lines.append(self._finish(self._pending))
            self._pending, self._cut_chars = "", 0
        return lines

    def _shorten(self, rest: str, lines: list[str]) -> str:
        """Shorten an unfinished line: the last state of a redrawn line, the head of an endless one."""
        body = rest.rstrip("\r")
        tail = "\r" if len(body) < len(rest) else ""
        if "\r" in body:
            earlier, body = body.rsplit("\r", 1)
            # The cut belonged to a state that the script has overwritten.
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


class TrainerOutput:
    """Sink of one trainer: its last lines, a spool for the log, and optionally an echo.

    A separate thread with a small buffer calls ``echo`` with each line, so that a blocked terminal loses lines and does
    not delay the trainer. The supervisor calls ``feed`` and ``finish``.
    """

    def __init__(
        self,
        echo: Callable[[str], None] | None = None,
        last_lines: int = LAST_LINES,
        spool: LogSpool | None = None,
        *,
        points: MetricBuffer | None = None,
        signals: LogSignals | None = None,
    ) -> None:
        self.spool = spool or LogSpool()
        self.points = points or MetricBuffer(time.time)
        """Reported values for the shipment with the lines."""
        self.signals = signals or LogSignals()
        self._assembler = LineAssembler()
        self._lock = threading.Lock()
        self._ring: deque[str] = deque(maxlen=last_lines)
        self._write = echo
        self._echo = _Echo(echo) if echo else None
        self.fed_at = time.monotonic()
        """Time of the newest output, else of the start; monotonic seconds."""

    def successor(self) -> TrainerOutput:
        """Return the sink of the job's next process, with this log and new last lines."""
        return TrainerOutput(
            self._write, self._ring.maxlen or LAST_LINES, self.spool, points=self.points, signals=self.signals
        )

    def last_lines(self) -> list[str]:
        """Return the newest lines, oldest first."""
        with self._lock:
            return list(self._ring)

    def feed(self, data: bytes, final: bool = False) -> None:
        """Add bytes of the trainer's output."""
        self.fed_at = time.monotonic()
        lines = self._assembler.feed(data, final)
        with self._lock:
            self._ring.extend(lines)
        self.signals.count(lines)
        for line in lines:
            self.spool.append(line)
            if self._echo:
                self._echo.put(line)

    def finish(self) -> None:
        """Emit the unfinished line and end the echo after the trainer's end."""
        self.feed(b"", final=True)
        if self._echo:
            self._echo.close()


class LogSignals:
    """Counter of the lines that contain each text of the rules' `signals` (docs/rules.md).

    Without texts, a line costs nothing. The thread that reads lines calls `count`, the heartbeat thread all other
    methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._revision = 0
        self._counts: dict[Signal, int] = {}
        self._acknowledged: dict[str, float] = {}

    def count(self, lines: Sequence[str]) -> None:
        """Count the texts in new lines."""
        if not self._counts:
            return
        with self._lock:
            for signal in self._counts:
                self._counts[signal] += sum(signal.text in line for line in lines)

    def set_rules(self, rules: RulesInForce | None) -> None:
        """Apply the texts of new rules; ignore outdated and unreadable rules.

        A known signal with an unchanged text keeps its count; other counts begin at 0.
        """
        if rules is None or rules.revision <= self._revision:
            return
        self._revision = rules.revision
        wanted = _load_signals(rules)
        if wanted is not None:
            with self._lock:
                self._counts = {signal: self._counts.get(signal, 0) for signal in wanted}

    def merge_with(self, metrics: Mapping[str, float]) -> dict[str, float] | None:
        """Return the counts and as many of `metrics` as a heartbeat admits, or None."""
        counts = self._metrics()
        if not counts:
            return dict(metrics) or None
        others = [(name, value) for name, value in metrics.items() if name_in_rules(name) not in counts]
        return {**dict(others[: MAX_METRICS - len(counts)]), **counts}

    def acknowledge(self, metrics: Mapping[str, float] | None) -> None:
        """Record the metrics that the control plane has accepted."""
        if self._counts:
            self._acknowledged = dict(metrics or {})

    @property
    def has_unreported(self) -> bool:
        """Return True if a count has not reached the control plane; the count may explain the end of the training."""
        return any(self._acknowledged.get(name, 0.0) != count for name, count in self._metrics().items())

    def _metrics(self) -> dict[str, float]:
        if not self._counts:
            return {}
        with self._lock:
            return {signal.metric.name: float(count) for signal, count in self._counts.items()}


def _load_signals(rules: RulesInForce) -> Sequence[Signal] | None:
    """Return the signals of the rules; None for unreadable rules, which leave the former signals in force."""
    if "signals" not in rules.text:
        return ()
    from baton.contract.rules.document.loader import load

    try:
        document = load(rules.text).rules
    except ImportError as error:
        logger.warning("signals of the rules are not counted: %s", error)
        return ()
    return document.signals if document is not None else None


class _Echo:
    """Daemon thread that passes lines to a function that may block."""

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
                return  # The agent's own output is closed. The log does not depend on the echo.
