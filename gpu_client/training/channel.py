"""Provide the trainer's end of the channel to the agent; `protocol.py` defines the format. Standard library only.

Training never waits for the agent, because one background thread owns the socket. The newest progress report replaces
an unsent report; checkpoint messages are queued and delivered in order. Without an agent, or after the agent's death,
every call is a no-op after one warning.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_client.training.protocol import (
    MAX_LINE_BYTES,
    MAX_RULES_LINE_BYTES,
    PROTOCOL,
    STEERING_TYPES,
    TrainerDirective,
    encode,
    parse_directive,
    parse_message,
)

STDERR_FD = 2
MAX_CARRIED = 64
"""Limit of the metrics that wait for the next report; further metrics are dropped."""

Warn = Callable[[str], None]


def read_numbers(metrics: Mapping[str, object], warn: Warn) -> dict[str, float]:
    """Return the numbers in `metrics`, including NaN, infinities, and tensors and numpy scalars of one element.

    warn: receives a text for each dropped metric and for each NaN or infinity.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            plain = value.item() if hasattr(value, "item") else value
            number: float = int(plain) if isinstance(plain, int) else float(plain)  # type: ignore[arg-type]
            is_finite = math.isfinite(number)
        except (TypeError, ValueError, RuntimeError):
            warn(f"metric {name!r} is not a number ({type(value).__name__}): left out")
            continue
        except OverflowError:
            warn(f"metric {name!r} is beyond what a float can hold: left out of reports while it is")
            continue
        numbers[name] = number
        if not is_finite:
            warn(f"metric {name!r} became {number}: left out of checkpoints' metrics while it is")
    return numbers


def keep_finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the finite numbers."""
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def encode_number(number: float) -> float | str:
    """Encode a number for JSON; NaN and infinities become text."""
    return number if math.isfinite(number) else str(float(number))


class UnsentMetrics:
    """Newest value of each metric that no report has sent, with its step."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, object]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, step: int, metrics: Mapping[str, object], *, but: Mapping[str, object] | None = None) -> None:
        """Add metrics, except the metrics in `but`. `take` reads the values, because reading waits for the GPU."""
        for name, value in metrics.items():
            if (but is None or name not in but) and (name in self._values or len(self._values) < MAX_CARRIED):
                self._values[name] = step, value

    def take(self, warn: Warn) -> dict[int, dict[str, float]]:
        """Remove and return all metrics by step, as numbers."""
        values, self._values = self._values, {}
        by_step: dict[int, dict[str, object]] = {}
        for name, (step, value) in values.items():
            by_step.setdefault(step, {})[name] = value
        return {step: read_numbers(found, warn) for step, found in by_step.items()}


def group_by_step(
    carried: Mapping[int, Mapping[str, float]], step: int, own: Mapping[str, float]
) -> list[dict[str, Any]]:
    """List the new metrics of a report of `step`, by step."""
    by_step = {of_step: dict(found) for of_step, found in carried.items()}
    if own:
        by_step.setdefault(step, {}).update(own)
    return [
        {"step": of_step, "metrics": {name: encode_number(number) for name, number in found.items()}}
        for of_step, found in sorted(by_step.items())
    ]


PROGRESS_INTERVAL_S = 0.2
CHECKPOINT_DELIVERY_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 1.0
MAX_QUEUED_ARTIFACTS = 1000
"""Limit of the unread artifact messages; further messages are dropped."""
MAX_QUEUED_STEERING = 1000
"""Limit of the unread rule messages; further messages are dropped."""

log = logging.getLogger("baton.training")

_Phase = tuple[str, int, int]
"""Name of the phase, finished units, total units."""
_Report = tuple[int, int, Mapping[str, object], _Phase | None, Mapping[str, object]]
"""Step, total, displayed metrics, phase, and the metrics of the step."""


@dataclass
class _Message:
    """Outgoing line. `done` is set when the kernel has taken the line (`sent` is True) or never will."""

    line: bytes
    step: int | None = None
    points: bool = False
    """True if the line contains metrics that no later message repeats."""
    sent: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class AgentChannel:
    """Connection to the agent that never blocks training and never raises because of the agent.

    Call every method from the training loop's thread, except `announce_checkpoint`, which is thread-safe.
    `on_directive` runs in the background thread and must return at once. In a forked child (a DataLoader worker) every
    call is a no-op.
    """

    def __init__(
        self,
        path: str | None,
        on_directive: Callable[[TrainerDirective], None],
        *,
        on_steering: Callable[[Mapping[str, Any]], None] = lambda message: None,
        signals: Callable[[int], Mapping[str, float]] = lambda step: {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to the socket at `path` and send hello. `path` None means no agent.

        `on_steering` receives rules and commands in the background thread; `signals` runs in the loop's thread.
        """
        self._on_directive = on_directive
        self._on_steering, self._signals = on_steering, signals
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[_Message] = deque()
        self._progress: _Message | None = None  # The newest report replaces an unsent report.
        self._pending: _Report | None = None  # The report that the interval delays.
        self._carried = UnsentMetrics()  # Metrics of dropped reports that the newest report lacks.
        self._last_sent: tuple[int, int, Mapping[str, object], _Phase | None] | None = None  # The last sent report.
        self._reported_at: float = -math.inf  # Seconds of self._clock.
        self._undelivered: set[int] = set()
        self._warned: set[str] = set()
        self._connected = False
        self._closing = False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        if not path:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            log.warning("no connection to the agent at %s (%s): training continues without the agent", path, error)
            return
        connection.setblocking(False)
        self._socket = connection
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._connected = True
        self._enqueue(_Message(encode({"type": "hello", "pid": self._pid, "protocol": PROTOCOL, "steering": True})))
        self._thread = threading.Thread(target=self._run, name="baton-channel", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Return True while the connection to an agent exists."""
        return self._connected and os.getpid() == self._pid

    def report(
        self,
        step: int,
        total: int,
        metrics: Mapping[str, object],
        phase: _Phase | None = None,
        new: Mapping[str, object] | None = None,
    ) -> None:
        """Report progress. Sends at most one report per `PROGRESS_INTERVAL_S`, and always the last step.

        total: 0 if unknown. new: the metrics of this step, if `metrics` also has older metrics. The next report repeats
            metrics of a dropped report under their own step.
        """
        if not self.connected:
            return
        fresh = metrics if new is None else new
        if self._pending is not None and not self._pending[4].keys() <= fresh.keys():
            self._carried.add(self._pending[0], self._pending[4], but=fresh)
        now = self._clock()
        if (step < total or phase or not total) and now - self._reported_at < PROGRESS_INTERVAL_S:
            self._pending = (step, total, metrics, phase, fresh)
            return
        self._reported_at = now
        self._queue_progress(step, total, metrics, phase, fresh)

    def add_metrics(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add metrics from outside the reports, such as an evaluation's, to the next report."""
        if self.connected:
            self._carried.add(step, metrics)

    def flush(self) -> None:
        """Send the progress that the interval delayed."""
        if not self.connected:
            return
        if self._pending is None and self._carried and self._last_sent is not None:
            self._pending = (*self._last_sent, {})
        if self._pending is not None:
            self._queue_progress(*self._pending)

    def checkpoint_written(
        self,
        step: int,
        path: str,
        metrics: Mapping[str, object],
        timeout_s: float = CHECKPOINT_DELIVERY_TIMEOUT_S,
    ) -> bool:
        """Report the complete directory `path` to the agent. Returns True if the kernel has taken the message.

        Waits at most `timeout_s` seconds; afterwards the message stays queued, with a warning.
        """
        self.flush()
        message = self.announce_checkpoint(step, path, metrics)
        if message is None:
            return False
        if not message.done.wait(timeout_s):
            log.warning("the agent has not taken the message about checkpoint-%d in %.1f s", step, timeout_s)
        return message.sent

    def announce_checkpoint(
        self, step: int, path: str, metrics: Mapping[str, object], stall_s: float | None = None
    ) -> _Message | None:
        """Report a complete checkpoint without waiting. Thread-safe. Returns None without an agent."""
        if not self.connected:
            return None
        body: dict[str, Any] = {"type": "checkpoint", "step": step, "path": path}
        if stall_s is not None:
            body["stall_s"] = round(stall_s, 4)
        message = _Message(self._line(body, self.clean_metrics(metrics)), step)
        with self._lock:
            if self._progress is not None:  # Progress precedes its step's checkpoint.
                self._queue.append(self._progress)
                self._progress = None
            self._undelivered.add(step)
        self._enqueue(message)
        return message

    def artifact_written(self, path: str) -> None:
        """Report a finished file to the agent without waiting. Call from the training loop's thread."""
        if not self.connected:
            return
        if len(self._queue) >= MAX_QUEUED_ARTIFACTS:
            self._warn_once("the agent does not read: artifacts are published at the end only")
            return
        line = encode({"type": "artifact", "path": path})
        if len(line) <= MAX_LINE_BYTES:
            self._enqueue(_Message(line))

    def send_steering(self, message: Mapping[str, Any]) -> None:
        """Send a message of the controller without waiting. Call from the training loop's thread."""
        if not self.connected:
            return
        # The exit decides the fate of the job and is sent once, therefore the limit does not apply.
        if len(self._queue) >= MAX_QUEUED_STEERING and message["type"] != "leaving":
            self._warn_once("the agent does not read: decisions of rules are in this log only")
            return
        try:
            line = encode(message)
        except (TypeError, ValueError) as error:
            self._warn_once(f"a message about rules cannot be encoded ({error}): dropped")
            return
        if len(line) <= MAX_LINE_BYTES:
            self._enqueue(_Message(line))
        else:
            self._warn_once(f"a message about rules of more than {MAX_LINE_BYTES} bytes is dropped")

    def is_delivered(self, step: int) -> bool:
        """Return True if no message about checkpoint `step` waits for a living agent."""
        with self._lock:
            return step not in self._undelivered

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Deliver the queue within `timeout_s` seconds, and disconnect. May be called twice."""
        if os.getpid() != self._pid or self._thread is None:
            return
        self.flush()
        self._closing = True
        self._wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._break("closed before the agent had taken everything")
            self._thread.join(timeout_s)
        self._thread = None

    def clean_metrics(self, metrics: Mapping[str, object]) -> dict[str, float]:
        """Return the finite numbers in `metrics`, including tensors and numpy scalars of one element."""
        return keep_finite(read_numbers(metrics, self._warn_once))

    # --- sending, from the training thread -------------------------------------------------------------------------

    def _queue_progress(
        self,
        step: int,
        total: int,
        metrics: Mapping[str, object],
        phase: _Phase | None,
        fresh: Mapping[str, object],
    ) -> None:
        self._pending = None
        self._last_sent = step, total, metrics, phase
        numbers = read_numbers(metrics, self._warn_once)
        carried = self._carried.take(self._warn_once)
        body: dict[str, Any] = {"type": "progress", "step": step, "total": total or None}
        if phase:
            body |= {"phase": dict(zip(("name", "done", "total"), phase, strict=True))}
        body |= {"signals": measured} if (measured := self._signals(step)) else {}
        if carried or fresh is not metrics:
            if fresh is not metrics:
                read = {name: numbers[name] for name in fresh if fresh[name] is metrics.get(name) and name in numbers}
                others = {name: fresh[name] for name in fresh if name not in read}
                own = {**read, **read_numbers(others, self._warn_once)}
            else:
                own = numbers
            points = group_by_step(carried, step, own)
            body |= {"points": points} if points or not phase else {}
        message = _Message(self._line(body, numbers), points=bool(carried))
        with self._lock:
            if self._progress is not None and self._progress.points and len(self._queue) < MAX_QUEUED_STEERING:
                self._queue.append(self._progress)
            self._progress = message
        self._wake()

    def _line(self, body: dict[str, Any], numbers: Mapping[str, float]) -> bytes:
        odd = {name: encode_number(number) for name, number in numbers.items() if not math.isfinite(number)}
        line = encode({**body, "metrics": keep_finite(numbers), **({"nonfinite": odd} if odd else {})})
        if len(line) <= MAX_LINE_BYTES:
            return line
        self._warn_once(f"metrics of more than {MAX_LINE_BYTES} bytes do not fit into a message: left out")
        body.pop("points", None)
        return encode({**body, "metrics": {}})

    def _enqueue(self, message: _Message) -> None:
        with self._lock:
            self._queue.append(message)
            if not self._connected:
                message.done.set()
        self._wake()

    def _wake(self) -> None:
        # A full pipe means that a wake-up is pending; a closed pipe means that the thread has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"w")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    # --- the background thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._socket is not None
        received, current, unsent = b"", None, b""
        with self._socket, self._wake_read, self._wake_write, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while self._connected:
                if current is None:
                    current = self._next_message()
                    unsent = current.line if current is not None else b""
                if current is None and self._closing:
                    self._connected = False
                    return
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.modify(self._socket, wanted)
                ready = {key.fileobj: events for key, events in selector.select()}
                if self._wake_read in ready:
                    self._wake_read.recv(4096)
                try:
                    events = ready.get(self._socket, 0)
                    if current is not None and events & selectors.EVENT_WRITE:
                        unsent = unsent[self._socket.send(unsent) :]
                        if not unsent:
                            self._mark_sent(current)
                            current = None
                    if events & selectors.EVENT_READ:
                        received = self._receive(self._socket, received)
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._break(str(error))
            if current is not None:
                current.done.set()

    def _next_message(self) -> _Message | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            message, self._progress = self._progress, None
            return message

    def _mark_sent(self, message: _Message) -> None:
        with self._lock:
            if message.step is not None:
                self._undelivered.discard(message.step)
        message.sent = True
        message.done.set()

    def _receive(self, connection: socket.socket, received: bytes) -> bytes:
        """Read the available bytes, process complete lines, and return the rest."""
        data = connection.recv(MAX_LINE_BYTES)
        if not data:
            self._break("the agent disconnected")
            return b""
        *lines, rest = (received + data).split(b"\n")
        if any(len(line) > MAX_RULES_LINE_BYTES for line in (*lines, rest)):
            self._break(f"the agent sent a line longer than {MAX_RULES_LINE_BYTES} bytes")
            return b""
        for line in lines:
            try:
                message = parse_message(line)
                directive = parse_directive(message)
            except (ValueError, RecursionError) as error:
                log.warning("ignored a malformed message of the agent (%s): %r", error, line[:200])
                continue
            if directive is not None and directive.kind == "stacks":
                # This thread runs while the training hangs, unless the hanging call holds the interpreter lock.
                faulthandler.dump_traceback(STDERR_FD)
            elif directive is not None:
                self._on_directive(directive)
            elif message["type"] in STEERING_TYPES:
                self._on_steering(message)
        return rest

    def _break(self, why: str) -> None:
        """Record the loss of the agent, release the waiting callers, and warn once."""
        with self._lock:
            # The training loop may close the channel because of the loss, which must not suppress the warning,
            # therefore this read comes before the loop can detect the loss.
            closing = self._closing
            was_connected, self._connected = self._connected, False
            abandoned = [*self._queue]
            self._queue.clear()
            self._progress = None
            self._undelivered.clear()  # No agent is left.
        for message in abandoned:
            message.done.set()
        self._wake()
        if was_connected and not (closing and not abandoned):
            log.warning("the channel to the agent is broken (%s): training continues without the agent", why)
