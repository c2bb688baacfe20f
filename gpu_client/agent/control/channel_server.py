"""The agent's end of the channel to the training process: JSON lines on a Unix socket.

The format belongs to ``gpu_client/training/protocol.py``.

The other side is a user's program and is not trusted: whatever it sends or does, the server lives on, keeps what makes
sense, and counts the rest. It is asked (``progress``, ``take_...``, ``wait``) and calls
nobody back.
"""

import contextlib
import json
import logging
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from gpu_client.agent.control.channel_messages import (
    ArtifactNotice,
    CheckpointNotice,
    Hello,
    Point,
    ProtocolError,
    SteeringNotice,
    TrainingProgress,
    parse,
)
from gpu_client.training.protocol import MAX_LINE_BYTES

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_WAITING_CHECKPOINTS = 1024
MAX_WAITING_ARTIFACTS = 1024
MAX_WAITING_STEERING = 2048
MAX_WAITING_REPORTS = 1024
MAX_WAITING_POINTS = 2048
SETTLE_S = 5.0
# The kernel's limit is 108 bytes (104 on macOS), the terminating zero included.
MAX_SOCKET_PATH_BYTES = 100
# A protocol error is logged this often per server; all are counted.
LOGGED_ERRORS = 20

StopReason = Literal["cancel", "pause", "release", "lease_lost"]


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    skipping: bool = False  # Inside a line that is too long.


class ChannelServer:
    """Listens from construction to ``close``. All methods may be called from any thread.

    ``output_dir``, ``arena``: checkpoints outside both are refused. ``clock``: monotonic seconds.
    """

    def __init__(
        self, output_dir: Path, clock: Callable[[], float] = time.monotonic, *, arena: Path | None = None
    ) -> None:
        self._places = [place.resolve() for place in (output_dir, arena) if place is not None]
        self._clock = clock
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._peers: dict[int, _Peer] = {}
        self._hellos: dict[int, Hello] = {}
        self._progress: TrainingProgress | None = None
        self._checkpoints: deque[CheckpointNotice] = deque(maxlen=MAX_WAITING_CHECKPOINTS)
        self._artifacts: deque[Path] = deque(maxlen=MAX_WAITING_ARTIFACTS)
        self._steering: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING_STEERING)
        self._reports: deque[tuple[float, TrainingProgress | CheckpointNotice]] = deque(maxlen=MAX_WAITING_REPORTS)
        self._points: deque[Point] = deque(maxlen=MAX_WAITING_POINTS)
        self._phase: tuple[str, int] | None = None  # The last one that was told.
        self._sent_steering: list[tuple[float, dict[str, Any]]] = []  # When, and what: for those that connect later.
        self._settling: list[threading.Event] = []
        self._advanced_at: float | None = None
        self._errors: Counter[str] = Counter()
        self._active: bytes | None = None  # The last stop: also for processes that connect later.
        self._closing = False
        self._directory = _private_directory()
        try:
            self.path = self._directory / "channel"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self.path))
            self._listener.listen(MAX_CONNECTIONS)
            self._listener.setblocking(False)
        except OSError:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="channel", daemon=True)
        self._thread.start()

    # What came in

    def hellos(self) -> list[Hello]:
        """The processes that are connected and have introduced themselves."""
        with self._lock:
            return list(self._hellos.values())

    def progress(self) -> TrainingProgress | None:
        """The newest progress, from whichever rank."""
        with self._lock:
            return self._progress

    def advanced_at(self) -> float | None:
        """When (by ``clock``) the step last changed, or how far something between two steps is; None before the first
        progress. For the no-progress watch."""
        with self._lock:
            return self._advanced_at

    def take_checkpoints(self) -> list[CheckpointNotice]:
        """The notices since the last call."""
        with self._lock:
            taken = list(self._checkpoints)
            self._checkpoints.clear()
            return taken

    def take_artifacts(self) -> list[Path]:
        """The files that were finished since the last call, all below the output directory."""
        with self._lock:
            taken = list(self._artifacts)
            self._artifacts.clear()
            return taken

    def take_steering(self) -> list[dict[str, Any]]:
        """What was said of rules and commands since the last call."""
        with self._lock:
            taken = list(self._steering)
            self._steering.clear()
            return taken

    def take_reports(self) -> list[tuple[float, TrainingProgress | CheckpointNotice]]:
        """How far the training has been since the last call, each with when it came, by ``clock``."""
        with self._lock:
            taken = list(self._reports)
            self._reports.clear()
            return taken

    def take_points(self) -> list[Point]:
        """What was reported since the last call, step by step."""
        with self._lock:
            taken = list(self._points)
            self._points.clear()
            return taken

    def has_steered_peer(self) -> bool:
        """Whether a process is connected that goes by rules and commands."""
        with self._lock:
            return any(hello.steering for hello in self._hellos.values())

    def errors(self) -> dict[str, int]:
        """How often what was refused: malformed, oversized, invalid, connections, unread."""
        with self._lock:
            return dict(self._errors)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something new has come in since the last ``wait``; False if nothing has in that time."""
        arrived = self._news.wait(timeout_s)
        self._news.clear()
        return arrived

    # What goes out

    def request_checkpoint(self) -> int:
        """Ask every connected process for a checkpoint; gives how many were reached."""
        return self._broadcast({"type": "directive", "directive": "checkpoint"}, standing=False)

    def request_stop(self, reason: StopReason, checkpoint: bool) -> int:
        """Ask every connected process (and any that connects later) to leave; gives how many were reached now."""
        message = {"type": "directive", "directive": "stop", "reason": reason, "checkpoint": checkpoint}
        return self._broadcast(message, standing=True)

    def send_steering(self, message: dict[str, Any]) -> int:
        """Rules or a command, for every process that goes by them, now or later; gives how many were reached.

        `expires_in_s` is counted from this call on.
        """
        now = self._clock()
        with self._lock:
            if message["type"] == "rules":
                self._sent_steering = [one for one in self._sent_steering if one[1]["type"] != "rules"]
            self._sent_steering.append((now, message))
            line = _steering_line(message, 0.0)
            steered = [peer for fd, peer in self._peers.items() if fd in self._hellos and self._hellos[fd].steering]
            return sum(self._send(peer, line) for peer in steered)

    def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Wait until all that was sent so far has been read, as it is from a process that has ended."""
        settled = threading.Event()
        with self._lock:
            self._settling.append(settled)
        self._waker.send(b"s")
        return settled.wait(timeout_s)

    def close(self) -> None:
        """End all connections and remove the socket. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._waker.send(b"x")
        self._thread.join()
        with self._lock:
            for peer in list(self._peers.values()):
                self._drop(peer)
        self._selector.close()
        for end in (self._listener, self._wake, self._waker):
            end.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # Inside

    def _broadcast(self, message: dict[str, object], standing: bool) -> int:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if standing:
                self._active = line
            return sum(self._send(peer, line) for peer in list(self._peers.values()))

    def _send(self, peer: _Peer, line: bytes) -> bool:
        """Send without waiting. Lock held. What a peer does not read is not kept for it."""
        try:
            sent = peer.connection.send(line)
        except BlockingIOError:
            self._errors["unread"] += 1
            return False
        except OSError:
            return False  # It has gone; the reading side notices.
        if sent < len(line):
            # Half a line went out: whatever followed would be garbage to it.
            self._errors["unread"] += 1
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
            return False
        return True

    def _serve(self) -> None:
        while not self._closing:
            ready = self._selector.select(0 if self._settling else None)
            if not ready:
                with self._lock:
                    settled, self._settling = self._settling, []
                for one in settled:
                    one.set()
            for key, _events in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake:
                    self._wake.recv(64)
                elif isinstance(key.data, _Peer):
                    self._receive(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return  # It went away before we looked.
        except OSError as error:
            with self._lock:
                self._refuse("connections", f"accept: {error}")
            time.sleep(0.1)  # Out of descriptors: it stays readable, do not spin.
            return
        with self._lock:
            if len(self._peers) >= MAX_CONNECTIONS:
                self._refuse("connections", f"more than {MAX_CONNECTIONS} connections")
                connection.close()
                return
            connection.setblocking(False)
            peer = _Peer(connection)
            self._peers[connection.fileno()] = peer
            self._selector.register(connection, selectors.EVENT_READ, peer)
            if self._active:
                self._send(peer, self._active)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        with self._lock:
            if not data:
                self._drop(peer)
                return
            peer.buffer += data
            while (end := peer.buffer.find(b"\n")) >= 0:
                line = bytes(peer.buffer[:end])
                del peer.buffer[: end + 1]
                if peer.skipping or len(line) >= MAX_LINE_BYTES:
                    self._refuse("oversized", f"a line longer than {MAX_LINE_BYTES} bytes")
                    peer.skipping = False
                elif line.strip():
                    self._take(peer, line)
            if len(peer.buffer) >= MAX_LINE_BYTES:
                peer.skipping = True
                peer.buffer.clear()

    def _drop(self, peer: _Peer) -> None:
        fd = peer.connection.fileno()
        self._peers.pop(fd, None)
        self._hellos.pop(fd, None)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def _refuse(self, kind: str, text: str) -> None:
        self._errors[kind] += 1
        if self._errors.total() <= LOGGED_ERRORS:
            _log.warning("training channel: %s", text[:300])

    def _take(self, peer: _Peer, line: bytes) -> None:
        try:
            message = parse(line, self._places)
        except ProtocolError as error:
            self._refuse(error.kind, str(error))
            return
        if isinstance(message, Hello):
            fd = peer.connection.fileno()
            greeted, self._hellos[fd] = fd in self._hellos, message
            if message.steering and not greeted:
                now = self._clock()
                for sent_at, told in self._sent_steering:
                    self._send(peer, _steering_line(told, now - sent_at))
        elif isinstance(message, TrainingProgress):
            moved = self._progress is None or message.step != self._progress.step
            if moved or message.phase not in (None, self._phase):
                self._advanced_at = self._clock()
            self._progress, self._phase = message, message.phase or self._phase
            self._reports.append((self._clock(), message))
            self._points.extend(message.points)
        elif isinstance(message, ArtifactNotice):
            self._artifacts.append(message.path)
        elif isinstance(message, SteeringNotice):
            self._steering.append(message.message)
        else:
            self._checkpoints.append(message)
            self._reports.append((self._clock(), message))
        self._news.set()


def _private_directory() -> Path:
    """A new directory that only we may enter, with a path short enough for a socket."""
    for parent in (tempfile.gettempdir(), "/tmp"):  # noqa: S108 (mkdtemp makes a private directory in it)
        if len(os.fsencode(parent)) + len("/baton-xxxxxxxx/channel") <= MAX_SOCKET_PATH_BYTES:
            return Path(tempfile.mkdtemp(prefix="baton-", dir=parent))
    raise OSError(f"the temporary directory's path is too long for a socket: {tempfile.gettempdir()}")


def _steering_line(message: dict[str, Any], age_s: float) -> bytes:
    if "expires_in_s" in message:
        message = {**message, "expires_in_s": message["expires_in_s"] - age_s}
    return json.dumps(message, ensure_ascii=False).encode() + b"\n"
