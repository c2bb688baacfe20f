"""Where a trainer waits for its test, however late that looks: behind the step that the file $GATE names, until it
names a later one or is gone.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait(step: int, unless: Callable[[], object] = lambda: False) -> None:
    """Behind a step, `unless` something else is to be done; not at all where no test holds the trainer."""
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
