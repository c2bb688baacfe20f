"""Serve ministack on a socket inherited from the parent, until SIGTERM, SIGINT or the parent's end.

`functions.local.emulator.Emulator` sets the environment: BATON_EMULATOR_FD (the bound socket), BATON_EMULATOR_PARENT
(the parent's process id; standard input is a pipe from the parent), BATON_EMULATOR_STATE (the state directory; absent
for memory only), BATON_EMULATOR_SCRATCH (the directory for temporary files, which the parent removes unless the parent
was killed), and the settings of ministack. Exit status 0 after a clean end, 73 if the directory is in use, 65 if
the directory is damaged, 74 if a write could not be saved.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

# hypercorn comes with ministack; the environment of the type checker has neither.
from hypercorn.asyncio import serve  # type: ignore[import-not-found]
from hypercorn.config import Config  # type: ignore[import-not-found]

from . import checksums
from .indexes import OrderedIndexes
from .journal import Journal, JournalDamagedError
from .objects import DurableObjects, finish_intents
from .tables import DurableTables

logger = logging.getLogger("baton.emulator")

EXIT_DIRECTORY_IN_USE = 73  # EX_CANTCREAT
EXIT_DIRECTORY_DAMAGED = 65  # EX_DATAERR
PARENT_CHECK_S = 1.0
GRACE_S = 2.0
SAVE_DEADLINE_S = 30.0
LOCK_PATIENCE_S = 5.0
"""Limit in seconds of the wait for the lock. An emulator whose parent was killed keeps the lock until its save ends."""
LOCK_CHECK_S = 0.1


def main() -> int:
    """Run until stopped; return the exit status."""
    # Lambda functions that the emulator starts must import their own code, not this checkout.
    os.environ.pop("PYTHONPATH", None)
    state = os.environ.get("BATON_EMULATOR_STATE")
    directory = Path(state) if state else None
    if directory is not None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not lock(directory):
            owner = (directory / "lock").read_text()
            print(f"{directory} is in use by another emulator, of the control plane {owner}", file=sys.stderr)
            return EXIT_DIRECTORY_IN_USE
        finish_intents(directory / "s3-intents")

    from ministack import app as gateway
    from ministack.core import persistence
    from ministack.services import dynamodb, s3

    journal = Journal(directory / "dynamodb") if directory is not None else None
    tables = DurableTables(dynamodb, journal)
    OrderedIndexes(dynamodb).install()
    try:
        tables.install()
    except JournalDamagedError as error:
        print(f"cannot continue from {directory}: {error}", file=sys.stderr)
        return EXIT_DIRECTORY_DAMAGED
    # The journal replaces ministack's persistence of DynamoDB. Otherwise ministack would load its copy of the last
    # graceful end over the newer state of the journal.
    gateway._state_map.pop("dynamodb", None)
    if directory is not None:
        DurableObjects(s3, persistence, directory / "s3-intents").install()
    checksums.install(s3)
    asyncio.run(serve_until_stopped(gateway.app))
    tables.close()
    if os.getppid() != int(os.environ["BATON_EMULATOR_PARENT"]):
        shutil.rmtree(os.environ["BATON_EMULATOR_SCRATCH"], ignore_errors=True)
    return 0


def lock(directory: Path) -> bool:
    """Lock the directory for the life of this process; False if another process keeps the lock."""
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
            os.ftruncate(file, 0)
            os.write(file, f"with the process id {os.environ['BATON_EMULATOR_PARENT']}".encode())
            return True


async def serve_until_stopped(app: Any) -> None:
    """Serve until a signal or the end of the parent."""
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
    """Call `stop` when the parent's pipe closes or the parent process changes; exit if the stop takes too long.

    Both checks are needed: a forked sibling can keep the pipe open, and the parent can die before the first check.
    """
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], PARENT_CHECK_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    logger.warning("the parent has ended; stopping")
    stop()
    threading.Event().wait(SAVE_DEADLINE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
