"""Serve the agent's end of the channel to the training process: JSON lines on a Unix socket.

``gpu_client/training/protocol.py`` defines the format. The other side is a user's program and is not trusted: the
server survives every input, keeps valid messages, and counts invalid messages. Callers poll the server (``progress``,
``take_...``, ``wait``); the server has no callbacks.
"""

import contextlib
import json
import logging
import selectors
import socket
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
from gpu_client.agent.control.socket_directory import SocketDirectory
from gpu_client.training.protocol import MAX_LINE_BYTES

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_WAITING_CHECKPOINTS = 1024
MAX_WAITING_ARTIFACTS = 1024
MAX_WAITING_STEERING = 2048
MAX_WAITING_REPORTS = 1024
MAX_WAITING_POINTS = 2048
SETTLE_S = 5.0
# Protocol errors logged per server; all are counted.
LOGGED_ERRORS = 20

StopReason = Literal["cancel", "pause", "release", "lease_lost"]


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    skipping: bool = False  # Inside an oversized line.


class ChannelServer:
    """Server of one training process group, from construction to ``close``. Thread-safe.

    The server refuses checkpoints outside ``output_dir`` and ``arena``. ``clock``: monotonic seconds.
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
        self._phase: tuple[str, int] | None = None  # The last reported phase.
        self._sent_steering: list[
            tuple[float, dict[str, Any]]
        ] = []  # Time and message, for processes that connect later.
        self._settling: list[threading.Event] = []
        self._advanced_at: float | None = None
        self._errors: Counter[str] = Counter()
        self._pending_stop: bytes | None = None  # The last stop request; processes that connect later receive it.
        self._closing = False
        self._directory = SocketDirectory()
        try:
            self.path = self._directory.path / "channel"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self.path))
            self._listener.listen(MAX_CONNECTIONS)
            self._listener.setblocking(False)
        except OSError:
            self._directory.remove()
            raise
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="channel", daemon=True)
        self._thread.start()

    # Received

    def hellos(self) -> list[Hello]:
        """Return the hello messages of the connected processes."""
        with self._lock:
            return list(self._hellos.values())

    def progress(self) -> TrainingProgress | None:
        """Return the newest progress of any rank."""
        with self._lock:
            return self._progress

    def advanced_at(self) -> float | None:
        """Return the time (by ``clock``) of the last progress, also between steps; None before the first."""
        with self._lock:
            return self._advanced_at

    def take_checkpoints(self) -> list[CheckpointNotice]:
        """Return the checkpoint notices since the last call."""
        with self._lock:
            taken = list(self._checkpoints)
            self._checkpoints.clear()
            return taken

    def take_artifacts(self) -> list[Path]:
        """Return the finished files since the last call, all below the output directory."""
        with self._lock:
            taken = list(self._artifacts)
            self._artifacts.clear()
            return taken

    def take_steering(self) -> list[dict[str, Any]]:
        """Return the messages on rules and commands since the last call."""
        with self._lock:
            taken = list(self._steering)
            self._steering.clear()
            return taken

    def take_reports(self) -> list[tuple[float, TrainingProgress | CheckpointNotice]]:
        """Return the progress and checkpoint messages since the last call, each with its arrival time by ``clock``."""
        with self._lock:
            taken = list(self._reports)
            self._reports.clear()
            return taken

    def take_points(self) -> list[Point]:
        """Return the values reported since the last call, step by step."""
        with self._lock:
            taken = list(self._points)
            self._points.clear()
            return taken

    def has_steered_peer(self) -> bool:
        """Return True if a connected process follows rules and commands."""
        with self._lock:
            return any(hello.steering for hello in self._hellos.values())

    def errors(self) -> dict[str, int]:
        """Return the counts of refusals by kind: malformed, oversized, invalid, connections, unread."""
        with self._lock:
            return dict(self._errors)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message since the last ``wait``; returns False after `timeout_s` seconds without a message."""
        arrived = self._news.wait(timeout_s)
        self._news.clear()
        return arrived

    # Sent

    def request_checkpoint(self) -> int:
        """Ask every connected process for a checkpoint. Returns the number of processes reached."""
        return self._broadcast({"type": "directive", "directive": "checkpoint"}, replayed=False)

    def request_stacks(self) -> int:
        """Ask every connected process to print the stacks of its threads. Returns the number of processes reached."""
        return self._broadcast({"type": "directive", "directive": "stacks"}, replayed=False)

    def request_stop(self, reason: StopReason, checkpoint: bool, grace_s: float | None = None) -> int:
        """Ask all processes, including later processes, to stop. Returns the number of reached processes.

        grace_s: seconds until the agent kills the processes.
        """
        message = {"type": "directive", "directive": "stop", "reason": reason, "checkpoint": checkpoint}
        if grace_s is not None:
            message["grace_s"] = grace_s
        return self._broadcast(message, replayed=True)

    def send_steering(self, message: dict[str, Any]) -> int:
        """Send rules or a command to all steered processes, including later ones. Returns the number of recipients.

        `expires_in_s` counts from this call.
        """
        now = self._clock()
        with self._lock:
            if message["type"] == "rules":
                self._sent_steering = [one for one in self._sent_steering if one[1]["type"] != "rules"]
            self._sent_steering.append((now, message))
            line = _encode_steering(message, 0.0)
            steered = [peer for fd, peer in self._peers.items() if fd in self._hellos and self._hellos[fd].steering]
            return sum(self._send(peer, line) for peer in steered)

    def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Wait until the server has read every message of the ended processes."""
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
        self._directory.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # Event loop

    def _broadcast(self, message: dict[str, object], replayed: bool) -> int:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if replayed:
                self._pending_stop = line
            return sum(self._send(peer, line) for peer in list(self._peers.values()))

    def _send(self, peer: _Peer, line: bytes) -> bool:
        """Send without waiting; drop the message if the peer's buffer is full. Lock held."""
        try:
            sent = peer.connection.send(line)
        except BlockingIOError:
            self._errors["unread"] += 1
            return False
        except OSError:
            return False  # The peer has disconnected; the reader removes it.
        if sent < len(line):
            # The peer has received half a line and could not parse a later message.
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
            return  # The connection was closed before the call.
        except OSError as error:
            with self._lock:
                self._refuse("connections", f"accept: {error}")
            time.sleep(0.1)  # Out of descriptors: the socket stays readable, therefore do not spin.
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
            if self._pending_stop:
                self._send(peer, self._pending_stop)

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
                for sent_at, sent in self._sent_steering:
                    self._send(peer, _encode_steering(sent, now - sent_at))
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


def _encode_steering(message: dict[str, Any], age_s: float) -> bytes:
    if "expires_in_s" in message:
        message = {**message, "expires_in_s": message["expires_in_s"] - age_s}
    return json.dumps(message, ensure_ascii=False).encode() + b"\n"
