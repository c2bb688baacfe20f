"""The agent's end of the channel for tests: records every message, sends messages on request."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class ListeningAgent:
    """Accepts one trainer. With `deaf`, the agent accepts and never reads."""

    def __init__(self, *, deaf: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name) / "channel")
        self.messages: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._deaf = deaf
        self._ended = False
        self._left = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._trainer: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            trainer, _ = self._listener.accept()
        except OSError:
            return
        if self._deaf:
            trainer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        with self._changed:
            if self._left:  # The test has ended meanwhile.
                trainer.close()
                return
            self._trainer = trainer
            self._changed.notify_all()
        if self._deaf:
            return
        with trainer.makefile("rb") as lines:
            try:
                for line in lines:
                    with self._changed:
                        self.messages.append(json.loads(line))
                        self._changed.notify_all()
            except OSError:
                pass
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the recorded messages of one type."""
        with self._changed:
            return [message for message in self.messages if message["type"] == kind]

    def wait_for(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until `count` messages of a type have arrived; fail after 60 s."""

        def enough() -> bool:
            return len([message for message in self.messages if message["type"] == kind]) >= count

        with self._changed:
            assert self._changed.wait_for(enough, 60), f"no {count} x {kind!r} in {self.messages}"
        return self.of(kind)

    def wait_for_end(self) -> None:
        """Wait until the trainer has disconnected."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, 60)

    def send(self, message: dict[str, Any] | bytes) -> None:
        """Send one message, or raw bytes."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._trainer is not None, 60)
        assert self._trainer is not None
        self._trainer.sendall(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    def die(self) -> None:
        """Disconnect and stop listening, like a killed agent."""
        if self._trainer is not None:
            self._trainer.shutdown(socket.SHUT_RDWR)
            self._trainer.close()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._left = True
        if self._trainer is not None:
            self._trainer.close()
        self._listener.close()
        self._folder.cleanup()
