"""The demo's error and its interruption by signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoError(Exception):
    """The demo cannot go on, or a claim does not hold. The last lines of the file `log` explain the error."""

    def __init__(self, sentence: str, log: Path | None = None) -> None:
        super().__init__(sentence)
        self.log = log


class Interrupts:
    """Turns Ctrl-C, SIGTERM and SIGHUP into KeyboardInterrupt, but never inside `held` sections."""

    def __init__(self) -> None:
        self._holders = 0
        self._pending = False

    def install(self) -> None:
        """Register the signal handlers. Main thread only."""
        for number in SIGNALS:
            signal.signal(number, self._arrived)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay an interruption to the end of the section."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
        if self._pending and not self._holders:
            self._pending = False
            raise KeyboardInterrupt

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._holders:
            self._pending = True
        else:
            raise KeyboardInterrupt


def log_tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log; "" if the file is missing."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
