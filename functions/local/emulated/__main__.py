"""Serve ministack on a listening socket handed down by the parent, until SIGTERM, SIGINT or the parent's end.

Environment, set by `functions.local.emulator.Emulator`: BATON_EMULATOR_FD (the bound socket), BATON_EMULATOR_PARENT
(process id; standard input is a pipe it holds), BATON_EMULATOR_STATE (a directory, or absent for memory only), besides
ministack's own settings. Exit status 0 after a clean end, 73 when the directory is in use, 65 when it is damaged,
74 when a write could not be saved.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

# hypercorn comes with ministack; the environment in which types are checked has neither.
from hypercorn.asyncio import serve  # type: ignore[import-not-found]
from hypercorn.config import Config  # type: ignore[import-not-found]

from . import checksums
from .indexes import OrderedIndexes
from .journal import Journal, JournalDamagedError
from .objects import Objects, finish_intents
from .tables import Tables

logger = logging.getLogger("baton.emulator")

EXIT_DIRECTORY_IN_USE = 73  # EX_CANTCREAT
EXIT_DIRECTORY_DAMAGED = 65  # EX_DATAERR
PARENT_CHECK_S = 1.0
GRACE_S = 2.0
SAVE_DEADLINE_S = 30.0
LOCK_PATIENCE_S = 5.0
"""Time for an emulator whose parent was killed to notice that and to save: it holds the directory meanwhile."""
LOCK_CHECK_S = 0.1


def main() -> int:
    """Run until told to stop; the exit status."""
    # Lambda functions that the emulator starts must find their own code, not ours.
    os.environ.pop("PYTHONPATH", None)
    state = os.environ.get("BATON_EMULATOR_STATE")
    directory = Path(state) if state else None
    if directory is not None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not lock(directory):
            print(f"{directory} is in use by another emulator", file=sys.stderr)
            return EXIT_DIRECTORY_IN_USE
        finish_intents(directory / "s3-intents")

    from ministack import app as gateway
    from ministack.core import persistence
    from ministack.services import dynamodb, s3

    journal = Journal(directory / "dynamodb") if directory is not None else None
    tables = Tables(dynamodb, journal)
    OrderedIndexes(dynamodb).install()
    try:
        tables.install()
    except JournalDamagedError as error:
        print(f"cannot continue from {directory}: {error}", file=sys.stderr)
        return EXIT_DIRECTORY_DAMAGED
    # Ours alone: ministack would save it at a graceful end and load that older copy over the journal's.
    gateway._state_map.pop("dynamodb", None)
    if directory is not None:
        Objects(s3, persistence, directory / "s3-intents").install()
    checksums.install(s3)
    asyncio.run(serve_until_stopped(gateway.app))
    tables.close()
    return 0


def lock(directory: Path) -> bool:
    """Claim the directory for the life of this process; False when another process keeps it."""
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(file)
                return False
            time.sleep(LOCK_CHECK_S)
        else:
            return True


async def serve_until_stopped(app: Any) -> None:
    """Serve until a signal comes or the parent is gone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watch = threading.Thread(
        target=wait_for_parent,
        args=(int(os.environ["BATON_EMULATOR_PARENT"]), lambda: loop.call_soon_threadsafe(stop.set)),
        name="parent-watch",
        daemon=True,
    )
    watch.start()
    config = Config()
    config.bind = [f"fd://{os.environ['BATON_EMULATOR_FD']}"]
    config.keep_alive_timeout = 75
    config.graceful_timeout = GRACE_S
    config.loglevel = os.environ.get("LOG_LEVEL", "WARNING")
    await serve(app, config, shutdown_trigger=stop.wait)


def wait_for_parent(parent: int, stop: Any) -> None:
    """Ask for the end when the parent's pipe closes or this process has another parent; force it if that hangs.

    Both signs are needed: a forked sibling may hold the pipe open, and a parent may die before this is first asked.
    """
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], PARENT_CHECK_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    logger.warning("the parent is gone; stopping")
    stop()
    threading.Event().wait(SAVE_DEADLINE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
