"""Hold a trainer behind the step that the file $GATE names, until the test writes a later step or removes the file."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait(step: int, unless: Callable[[], object] = lambda: False) -> None:
    """Wait behind a step while the gate holds it and `unless` is false; do nothing without a gate."""
    while os.environ.get("GATE") and not unless():
        try:
            if step < int(Path(os.environ["GATE"]).read_text(encoding="utf-8")):
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)


def behind_each_report(session: Any) -> None:
    """Have a class of sessions wait behind each step that is reported."""
    report = session.report

    def held(self: Any, step: int, *given: Any, **named: Any) -> None:
        report(self, step, *given, **named)
        wait(step)

    session.report = held
