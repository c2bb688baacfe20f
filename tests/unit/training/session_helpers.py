"""Helpers of the session's tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from baton import Session


class Counter:
    """A state that consists of one number."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Calls:
    """A profile function that counts the C calls selected by `counts`, and kills the process before call `fatal`."""

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
    """Remove the marker, as the agent does after storing the checkpoint."""
    (arena / "checkpoint" / "baton.json").unlink()


def names(session: Session) -> list[str]:
    return sorted(path.name for path in session.output_dir.iterdir())
