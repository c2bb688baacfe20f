"""A real pseudo-terminal with a program on it, as a person sees and uses it."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tests.kits.waiting import PATIENCE_S

CTRL_C = "\x03"


class Terminal:
    """Terminal of `rows` and `columns` whose foreground process is `command`. text: all output so far."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, rows: int, columns: int) -> None:
        self._screen, self._line = os.openpty()
        self.resize(rows, columns)
        self.before = self.attributes()
        self.text = ""
        # The leader of a session without a terminal controls the first terminal that it opens.
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" < "$0" > "$0" 2>&1', os.ttyname(self._line), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def attributes(self) -> list[Any]:
        """Return the terminal's settings: a raw terminal has others than one for lines."""
        return termios.tcgetattr(self._line)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def read_until(self, wanted: str) -> str:
        """Return the output since the last call, up to the first `wanted`."""
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in self.text:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {wanted!r} in {self.text!r}"
            self.text += os.read(self._screen, 65_536).decode(errors="replace")
        found, _, self.text = self.text.partition(wanted)
        return found

    def finish(self) -> tuple[int, str]:
        """Wait for the end of the program; return its exit code and the output since the last read."""
        code = self.process.wait(PATIENCE_S)
        while select.select([self._screen], [], [], 0)[0]:
            self.text += os.read(self._screen, 65_536).decode(errors="replace")
        return code, self.text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._line)
        os.close(self._screen)
