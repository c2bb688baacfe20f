"""What several tests of the session need."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from baton import Session


class Counter:
    """The smallest state."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Calls:
    """A profile function that counts the calls of C functions that `counts` says yes to, and kills the process before
    call number `fatal`."""

    def __init__(self, counts: Callable[[Any], bool], fatal: int | None) -> None:
        self._counts = counts
        self._fatal = fatal
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and self._counts(function):
            self.seen += 1
            if self.seen == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def give_back(arena: Path) -> None:
    """What the agent does when it has stored what lies in the arena."""
    (arena / "checkpoint" / "baton.json").unlink()


def names(session: Session) -> list[str]:
    return sorted(path.name for path in session.output_dir.iterdir())
