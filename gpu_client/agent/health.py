"""Check the agent's liveness: `python -m gpu_client.agent.health` exits with 0, or with 1 and a line with the reason.

The check serves a container's HEALTHCHECK or liveness probe. The agent writes a deadline into the file
`BATON_HEALTH_FILE` and renews the deadline in time, unless the agent is stuck. Neither an unreachable control plane nor
a hanging training, which has limits of its own, makes the agent unhealthy. Deadlines use the machine's monotonic clock,
which all processes of a container share, therefore a wrong wall clock changes nothing.
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
"""Seconds added to each deadline, for slow machines and for calls that wait for other calls."""


class LivenessFile:
    """Writer of the liveness file; `path` None disables the file. Raises OSError if the file cannot be created."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._path = path
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def beat(self, within_s: float) -> None:
        """Promise another beat within `within_s` seconds. The file keeps its size, because the disk may be full."""
        if self._fd is None:
            return
        try:
            os.pwrite(self._fd, b"%020.3f\n" % (self._clock() + within_s + SLACK_S), 0)
        except OSError as error:
            logger.warning("%s=%s cannot be written: %s", VARIABLE, self._path, error)

    def close(self) -> None:
        """Stop beating: the agent exits."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def find_problem(environment: Mapping[str, str], now: float) -> str | None:
    """Return the reason why the agent counts as dead at the monotonic time `now`; None if the agent lives."""
    path = environment.get(VARIABLE)
    if not path:
        return f"{VARIABLE}: is not set; name the file that the agent updates"
    try:
        text = Path(path).read_text(encoding="ascii")
        due = float(text)
    except (OSError, ValueError) as error:
        return f"{VARIABLE}={path}: no agent has written the file ({error})"
    if now > due:
        return f"{VARIABLE}={path}: the agent is silent for {now - due:.0f} s longer than announced"
    return None


def main() -> int:
    """Print the reason why the agent counts as dead. Returns the exit code."""
    problem = find_problem(os.environ, time.monotonic())
    if problem is None:
        return 0
    sys.stderr.write(f"{problem}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
