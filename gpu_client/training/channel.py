"""The trainer's end of the channel to the agent; `protocol.py` has the format. Needs the standard library only.

Training never waits for the agent: one background thread owns the socket. Progress is a slot in which the newest
report wins; checkpoint messages are queued and delivered in order. Without an agent, or when it dies, everything here
turns into a no-op after one warning.
"""

from __future__ import annotations

import contextlib
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
    Directive,
    directive_of,
    encode,
    parse_message,
)

MAX_CARRIED = 64
"""Metrics that wait for the next report; more are left out."""

Warn = Callable[[str], None]


def numbers_of(metrics: Mapping[str, object], warn: Warn) -> dict[str, float]:
    """The numbers among `metrics`, NaN and infinity too; tensors and numpy scalars of one element are read.

    warn: is told what is left out, and what is not finite.
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


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Those that are finite."""
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def said(number: float) -> float | str:
    """As JSON can say it: NaN and infinity are words."""
    return number if math.isfinite(number) else str(float(number))


class Carried:
    """Metrics that the agent has not been told, each with its step: the newest of each name."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, object]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, step: int, metrics: Mapping[str, object], *, but: Mapping[str, object] | None = None) -> None:
        """Keep these; `but` names what comes anew. Nothing is read yet: that would wait for the GPU."""
        for name, value in metrics.items():
            if (but is None or name not in but) and (name in self._values or len(self._values) < MAX_CARRIED):
                self._values[name] = step, value

    def take(self, warn: Warn) -> dict[int, dict[str, float]]:
        """All of them, read, by steps; they are forgotten."""
        values, self._values = self._values, {}
        by_step: dict[int, dict[str, object]] = {}
        for name, (step, value) in values.items():
            by_step.setdefault(step, {})[name] = value
        return {step: numbers_of(found, warn) for step, found in by_step.items()}


def points_of(carried: Mapping[int, Mapping[str, float]], step: int, own: Mapping[str, float]) -> list[dict[str, Any]]:
    """What is new in a report of `step`, step by step."""
    by_step = {of_step: dict(found) for of_step, found in carried.items()}
    if own:
        by_step.setdefault(step, {}).update(own)
    return [
        {"step": of_step, "metrics": {name: said(number) for name, number in found.items()}}
        for of_step, found in sorted(by_step.items())
    ]


PROGRESS_INTERVAL_S = 0.2
CHECKPOINT_DELIVERY_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 1.0
MAX_WAITING_ARTIFACTS = 1000
"""Messages about artifacts that wait for an agent which does not read; more are left out."""
MAX_WAITING_TELLINGS = 1000
"""The same of what rules decided."""

log = logging.getLogger("baton.training")

_Phase = tuple[str, int, int]
"""Its name, how much of it is done, and of how much."""
_Report = tuple[int, int, Mapping[str, object], _Phase | None, Mapping[str, object]]
"""Step, total, what is shown, the phase, and what of the metrics is of this step."""


@dataclass
class _Message:
    """One line on its way out. `done` is set when the kernel has taken it, or when it never will (`sent` tells)."""

    line: bytes
    step: int | None = None
    points: bool = False
    """It has what no later message says."""
    sent: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Channel:
    """A connection to the agent that never blocks training and never raises because of the agent.

    Call everything from one thread (the training loop's), but `announce_checkpoint` from any; `on_directive` is called
    from the background thread and must return at once. In a forked child (a DataLoader worker) every call is a no-op.
    """

    def __init__(
        self,
        path: str | None,
        on_directive: Callable[[Directive], None],
        *,
        on_steering: Callable[[Mapping[str, Any]], None] = lambda message: None,
        signals: Callable[[int], Mapping[str, float]] = lambda step: {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to the socket at `path` and say hello. None or "" means: there is no agent.

        `on_steering` is called as `on_directive` is, with rules and commands; `signals` in the loop's thread.
        """
        self._on_directive = on_directive
        self._on_steering, self._signals = on_steering, signals
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[_Message] = deque()
        self._progress: _Message | None = None  # newest wins
        self._held: _Report | None = None  # reported within the interval, not sent yet
        self._carried = Carried()  # what reports that were passed over alone had
        self._told: tuple[int, int, Mapping[str, object], _Phase | None] | None = None  # the last one sent
        self._reported_at: float = -math.inf  # by self._clock, seconds
        self._untold: set[int] = set()
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
            log.warning("no connection to the agent at %s (%s): training goes on without it", path, error)
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
        """Whether an agent is listening as far as is known."""
        return self._connected and os.getpid() == self._pid

    def report(
        self,
        step: int,
        total: int,
        metrics: Mapping[str, object],
        phase: _Phase | None = None,
        new: Mapping[str, object] | None = None,
    ) -> None:
        """Offer progress. At most one report per `PROGRESS_INTERVAL_S` is sent; the last step always is.

        total: 0 before it is known. new: the metrics that are of this step, where `metrics` has others too. What only a
            report had that is passed over for a newer one travels with that one, under its own step.
        """
        if not self.connected:
            return
        fresh = metrics if new is None else new
        if self._held is not None and not self._held[4].keys() <= fresh.keys():
            self._carried.add(self._held[0], self._held[4], but=fresh)
        now = self._clock()
        if (step < total or phase or not total) and now - self._reported_at < PROGRESS_INTERVAL_S:
            self._held = (step, total, metrics, phase, fresh)
            return
        self._reported_at = now
        self._offer_progress(step, total, metrics, phase, fresh)

    def note(self, step: int, metrics: Mapping[str, object]) -> None:
        """Metrics that come beside the reports, as an evaluation's: told with the next report, at no further cost."""
        if self.connected:
            self._carried.add(step, metrics)

    def flush(self) -> None:
        """Send the progress that was held back because the one before it had just been sent."""
        if not self.connected:
            return
        if self._held is None and self._carried and self._told is not None:
            self._held = (*self._told, {})
        if self._held is not None:
            self._offer_progress(*self._held)

    def checkpoint_written(
        self,
        step: int,
        path: str,
        metrics: Mapping[str, object],
        timeout_s: float = CHECKPOINT_DELIVERY_TIMEOUT_S,
    ) -> bool:
        """Tell the agent that the directory `path` is complete. True when the message is on its way.

        Waits at most `timeout_s`; an agent that is slower is warned about, and the message stays queued.
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
        """The same without waiting, from any thread. None when there is nobody to tell."""
        if not self.connected:
            return None
        body: dict[str, Any] = {"type": "checkpoint", "step": step, "path": path}
        if stall_s is not None:
            body["stall_s"] = round(stall_s, 4)
        message = _Message(self._line(body, self.clean_metrics(metrics)), step)
        with self._lock:
            if self._progress is not None:  # keep the order: progress of this step before its checkpoint
                self._queue.append(self._progress)
                self._progress = None
            self._untold.add(step)
        self._enqueue(message)
        return message

    def artifact_written(self, path: str) -> None:
        """Tell the agent of a finished file, without waiting; from the training loop's thread."""
        if not self.connected:
            return
        if len(self._queue) >= MAX_WAITING_ARTIFACTS:
            self._warn_once("the agent does not read: artifacts are shown at the end only")
            return
        line = encode({"type": "artifact", "path": path})
        if len(line) <= MAX_LINE_BYTES:
            self._enqueue(_Message(line))

    def tell(self, message: Mapping[str, Any]) -> None:
        """What the controller has to say, without waiting; from the training loop's thread."""
        if not self.connected:
            return
        # How the training ends decides what becomes of the job: that is said in any case, and only once.
        if len(self._queue) >= MAX_WAITING_TELLINGS and message["type"] != "leaving":
            self._warn_once("the agent does not read: what rules decide is only in this log")
            return
        try:
            line = encode(message)
        except (TypeError, ValueError) as error:
            self._warn_once(f"a message about rules cannot be said ({error}): it is left out")
            return
        if len(line) <= MAX_LINE_BYTES:
            self._enqueue(_Message(line))
        else:
            self._warn_once(f"a message about rules of more than {MAX_LINE_BYTES} bytes is left out")

    def told(self, step: int) -> bool:
        """Whether nothing about checkpoint `step` is still waiting to be delivered to a living agent."""
        with self._lock:
            return step not in self._untold

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Deliver what is queued, waiting at most `timeout_s`, and hang up. May be called twice."""
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
        """The finite numbers among `metrics` (tensors and numpy scalars of one element included)."""
        return finite(numbers_of(metrics, self._warn_once))

    # --- sending, from the training thread -------------------------------------------------------------------------

    def _offer_progress(
        self,
        step: int,
        total: int,
        metrics: Mapping[str, object],
        phase: _Phase | None,
        fresh: Mapping[str, object],
    ) -> None:
        self._held = None
        self._told = step, total, metrics, phase
        numbers = numbers_of(metrics, self._warn_once)
        carried = self._carried.take(self._warn_once)
        body: dict[str, Any] = {"type": "progress", "step": step, "total": total or None}
        if phase:
            body |= {"phase": dict(zip(("name", "done", "total"), phase, strict=True))}
        body |= {"signals": measured} if (measured := self._signals(step)) else {}
        if carried or fresh is not metrics:
            if fresh is not metrics:
                read = {name: numbers[name] for name in fresh if fresh[name] is metrics.get(name) and name in numbers}
                others = {name: fresh[name] for name in fresh if name not in read}
                own = {**read, **numbers_of(others, self._warn_once)}
            else:
                own = numbers
            points = points_of(carried, step, own)
            body |= {"points": points} if points or not phase else {}
        message = _Message(self._line(body, numbers), points=bool(carried))
        with self._lock:
            if self._progress is not None and self._progress.points and len(self._queue) < MAX_WAITING_TELLINGS:
                self._queue.append(self._progress)
            self._progress = message
        self._wake()

    def _line(self, body: dict[str, Any], numbers: Mapping[str, float]) -> bytes:
        odd = {name: said(number) for name, number in numbers.items() if not math.isfinite(number)}
        line = encode({**body, "metrics": finite(numbers), **({"nonfinite": odd} if odd else {})})
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
        # A full pipe means that a wake-up is already pending; a closed one that nobody is there to wake.
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
                self._untold.discard(message.step)
        message.sent = True
        message.done.set()

    def _receive(self, connection: socket.socket, received: bytes) -> bytes:
        """Read what is there, act on whole lines, return the rest."""
        data = connection.recv(MAX_LINE_BYTES)
        if not data:
            self._break("the agent hung up")
            return b""
        *lines, rest = (received + data).split(b"\n")
        if any(len(line) > MAX_RULES_LINE_BYTES for line in (*lines, rest)):
            self._break(f"the agent sent a line longer than {MAX_RULES_LINE_BYTES} bytes")
            return b""
        for line in lines:
            try:
                message = parse_message(line)
                directive = directive_of(message)
            except (ValueError, RecursionError) as error:
                log.warning("ignored a malformed message of the agent (%s): %r", error, line[:200])
                continue
            if directive is not None:
                self._on_directive(directive)
            elif message["type"] in STEERING_TYPES:
                self._on_steering(message)
        return rest

    def _break(self, why: str) -> None:
        """The agent is gone: release whoever waits, say so once, go on without it."""
        with self._lock:
            # Read before the loop can see that the agent is gone, and close: that would be no reason to be silent.
            closing = self._closing
            was_connected, self._connected = self._connected, False
            abandoned = [*self._queue]
            self._queue.clear()
            self._progress = None
            self._untold.clear()  # nobody is left to tell
        for message in abandoned:
            message.done.set()
        self._wake()
        if was_connected and not (closing and not abandoned):
            log.warning("the channel to the agent is broken (%s): training goes on without it", why)
