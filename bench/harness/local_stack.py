"""Local stack as a process, started as users start it, and clients for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpu_client.transport.api.client import BatonClient

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
ANNOUNCEMENT = b'{"url"'
FOREIGN = ("BATON_", "SALAD_", "AWS_")
"""Variables of the person who measures: they must not reach what is measured."""


@dataclass(frozen=True)
class RunningStack:
    """URLs of a stack and of its emulated cloud, and its keys by name (`submit`, `worker`, `admin`)."""

    url: str
    cloud_url: str
    keys: dict[str, str]
    pid: int

    def client(self, key: str) -> BatonClient:
        """Make a client with that key."""
        return BatonClient(self.url, self.keys[key])


@contextmanager
def running_stack(log: Path, *, cpus: Sequence[int] = ()) -> Iterator[RunningStack]:
    """`python -m functions.local --forget` on the processors `cpus` (any, if empty): nothing is written to disk.

    `log` receives what it says. Raises RuntimeError with that if it does not start.
    """
    command = [sys.executable, "-m", "functions.local", "--forget", "--json", "--port", "0"]
    # A file, not a pipe: the handlers log there, and would wait for a reader once a pipe is full.
    with log.open("wb") as output:
        process = subprocess.Popen(
            pinned(command, cpus), env=clean_environment(), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield _announced(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _announced(process: subprocess.Popen[bytes], log: Path) -> RunningStack:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_bytes().splitlines(keepends=True):
            if line.startswith(ANNOUNCEMENT) and line.endswith(b"\n"):
                return RunningStack(**json.loads(line), pid=process.pid)
        time.sleep(POLL_S)
    raise RuntimeError(f"the local stack did not start: {log.read_text(errors='replace')[-2000:]}")


def clean_environment() -> dict[str, str]:
    """Copy the environment without the settings of a deployment or a worker."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}


def pinned(command: Sequence[str], cpus: Sequence[int]) -> list[str]:
    """Pin a command and its children to these processors; unpinned if there are none."""
    if not cpus:
        return list(command)
    program = f"import os, sys; os.sched_setaffinity(0, {set(cpus)!r}); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", program, *command]
