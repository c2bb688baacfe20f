"""Several generators on one machine, each a process of its own: where one does not keep the GPU, or a core, busy.

Whoever starts them watches over them: what they have put is reported together; when one fails, all end.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from gpu_client.ring.core.maintenance import Keeper
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.records import WRITERS, content_of
from gpu_client.ring.generating.generation_loop import TELL_EVERY_S, Progress, Standing
from gpu_client.ring.generating.named_counter import put_under, tally_key

logger = logging.getLogger("baton.ring")

POLL_S = 0.1
GRACE_S = 600.0
"""For so long a copy may finish its sample after having been told to stop; whoever waits less kills the group."""


def shares(count: int | None, copies: int) -> list[int | None]:
    """How many samples each copy makes; together `count`. Copies that would make none are left out."""
    if count is None:
        return [None] * copies
    each, more = divmod(count, copies)
    return [share for number in range(copies) if (share := each + (number < more))]


class Copies:
    """Processes by the names of their writers."""

    def __init__(
        self,
        ring: Ring,
        commands: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        progress: Progress,
        *,
        count: int | None = None,
        again: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`commands`: of each the program and its arguments. `count`: of all together, for the report. `again`: whether
        anybody may come to have their names; what is noted under those that never come again goes at the end."""
        self._ring, self._commands, self._environment = ring, commands, environment
        self._progress, self._count = progress, count
        self._clock, self._pause = clock, pause
        self._standing = Standing(ring.settings.cap, clock)
        self._keeper = Keeper(ring, "copies")
        self._told_at = -float("inf")
        self._again = again
        self._put = dict.fromkeys(commands, 0)
        """As was seen last: of one that has ended it may be forgotten before the others have."""

    def run(self) -> int:
        """Until all have ended, told to or of themselves; the first exit code that is not 0."""
        processes: list[subprocess.Popen[bytes]] = []
        try:
            self._keeper.start()
            for command in self._commands.values():
                processes.append(subprocess.Popen(command, env=dict(self._environment)))
            return self._watched(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            try:
                self._keeper.close()
            except OSError as error:
                logger.warning("the ring cannot be left to others now: %s", error)
            self._tell(at_once=True)
            self._forget()

    def _watched(self, processes: Sequence[subprocess.Popen[bytes]]) -> int:
        told_at: float | None = None
        while any(process.poll() is None for process in processes):
            failed = self._code(processes, told=told_at is not None)
            if told_at is None and (failed or self._progress.should_stop):
                told_at = self._clock()
                for process in processes:
                    process.terminate()
            if told_at is not None and self._clock() - told_at > GRACE_S:
                break
            self._tell()
            self._pause(POLL_S)
        return self._code(processes, told=told_at is not None)

    def _code(self, processes: Sequence[subprocess.Popen[bytes]], *, told: bool) -> int:
        """The first exit code that says that something is wrong; 0 if there is none."""
        # SIGTERM is what they were told with: it ends one that has only just begun, or is past its end.
        stopping = told or self._progress.should_stop
        codes = [one.returncode for one in processes if one.returncode]
        return next((code for code in codes if not (stopping and code == -signal.SIGTERM)), 0)

    def _tell(self, *, at_once: bool = False) -> None:
        now = self._clock()
        if not at_once and now - self._told_at < TELL_EVERY_S:
            return
        self._told_at = now
        try:
            put, found = self._found()
        except OSError as error:
            # The copies wait for the store themselves, and for longer.
            logger.warning("what the copies have put cannot be seen now: %s", error)
            return
        self._progress.report(put, self._count or 0, **found)

    def _found(self) -> tuple[int, dict[str, float]]:
        """What all have put, and metrics: how the ring stands, what was refused, and bytes."""
        store = self._ring.store
        writers = [content_of(store.record(f"{WRITERS}{name}")) for name in self._commands]
        for name, before in self._put.items():
            self._put[name] = max(before, put_under(store, name, again=self._again))
        waited_s = sum(float(writer.get("waited_s", 0)) for writer in writers) / len(writers)
        counts = {
            "refused": sum(int(writer.get("refused", 0)) for writer in writers),
            "ring.put_bytes": sum(int(writer.get("bytes", 0)) for writer in writers),
        }
        return sum(self._put.values()), {**self._standing.at(self._keeper, waited_s), **counts}

    def _forget(self) -> None:
        if self._again:
            return
        try:
            self._ring.store.delete([tally_key(name, again=False) for name in self._commands])
        except OSError as error:
            logger.warning("what was noted of the copies is left to others: %s", error)
