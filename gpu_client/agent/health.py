"""`python -m gpu_client.agent.health`: exit code 0 while the agent beside it lives, else 1 and a line that says why.

For a container's HEALTHCHECK or liveness probe. The agent keeps a time in the file that `BATON_HEALTH_FILE` names: by
then it will have put a later one there, if it is not stuck. An unreachable control plane does not make it ill, and
neither does a training that hangs: that has limits of its own. Times are of the machine's monotonic clock, which all
processes of a container share, so a wrong wall clock changes nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

logger = logging.getLogger("baton.agent")

VARIABLE = "BATON_HEALTH_FILE"
SLACK_S = 60.0
"""Allowed on top of what was announced: for a slow machine, and for one call that waits for another."""


class LivenessFile:
    """The agent's side. `path`: None keeps no file. Raises OSError if it cannot be made."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._path = path
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def beat(self, within_s: float) -> None:
        """Promise another beat within so many seconds. It takes no more room than the first one: a disk may be full."""
        if self._fd is None:
            return
        try:
            os.pwrite(self._fd, b"%020.3f\n" % (self._clock() + within_s + SLACK_S), 0)
        except OSError as error:
            logger.warning("%s=%s cannot be written: %s", VARIABLE, self._path, error)

    def close(self) -> None:
        """No further beat: the agent leaves."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def problem_of(environment: Mapping[str, str], now: float) -> str | None:
    """Why the agent does not count as alive at the monotonic time `now`; None if it does."""
    path = environment.get(VARIABLE)
    if not path:
        return f"{VARIABLE}: is needed"
    try:
        text = Path(path).read_text(encoding="ascii")
        due = float(text)
    except (OSError, ValueError) as error:
        return f"{VARIABLE}={path}: no agent has been here ({error})"
    if now > due:
        return f"{VARIABLE}={path}: the agent is silent, {now - due:.0f} s longer than it announced"
    return None


def main() -> int:
    """Say whether the agent lives; the exit code."""
    problem = problem_of(os.environ, time.monotonic())
    if problem is None:
        return 0
    sys.stderr.write(f"{problem}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
