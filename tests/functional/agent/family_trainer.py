"""Run a trainer with a child, a grandchild and a daemon in its own session; all ignore SIGTERM, SIGINT and SIGHUP.

Arguments: a directory, in which each process writes its pid under its name; and ``stays``, or ``leaves`` if the trainer
itself exits with 0 once all have started.
"""

import os
import signal
import sys
import time
from pathlib import Path

RELATIVES = ("child", "grandchild", "daemon")


def tell(directory: Path, name: str) -> None:
    """Write the pid, atomically."""
    (directory / f"{name}.tmp").write_text(str(os.getpid()))
    (directory / f"{name}.tmp").rename(directory / name)


def stay(directory: Path, name: str) -> None:
    """Sleep until killed."""
    tell(directory, name)
    while True:
        time.sleep(60)


def main(directory: Path, leaves: bool) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        if os.fork() == 0:
            stay(directory, "grandchild")
        stay(directory, "child")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            stay(directory, "daemon")
        os._exit(0)  # The daemon has lost its parent, its group and its session.
    if not leaves:
        stay(directory, "trainer")
    tell(directory, "trainer")
    while not all((directory / name).exists() for name in RELATIVES):
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "leaves")
