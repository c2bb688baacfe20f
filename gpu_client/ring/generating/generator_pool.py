"""Run several generator processes on one machine, for a generator that does not use the GPU or a core fully.

The parent supervises the processes, reports their sum, and ends all when one fails.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.records import WRITERS, decode_record
from gpu_client.ring.generating.generation_loop import REPORT_INTERVAL_S, GenerationProgress, RingMetrics
from gpu_client.ring.generating.named_counter import counter_key, read_count

logger = logging.getLogger("baton.ring")

POLL_S = 0.1
GRACE_S = 600.0
"""Time for which a process may finish its sample after a stop request (s)."""


def split_count(count: int | None, copies: int) -> list[int | None]:
    """Split the count among the processes; omits processes with nothing to do."""
    if count is None:
        return [None] * copies
    each, more = divmod(count, copies)
    return [share for number in range(copies) if (share := each + (number < more))]


class GeneratorPool:
    """Generator processes by writer name."""

    def __init__(
        self,
        ring: Ring,
        commands: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        progress: GenerationProgress,
        *,
        count: int | None = None,
        again: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`commands`: command line by name. `count`: total, for reports. `again`: whether later processes may take the
        names; otherwise their counts are deleted at the end.
        """
        self._ring, self._commands, self._environment = ring, commands, environment
        self._progress, self._count = progress, count
        self._clock, self._pause = clock, pause
        self._metrics = RingMetrics(ring.settings.cap, clock)
        self._maintainer = Maintainer(ring, "copies")
        self._reported_at = -float("inf")
        self._again = again
        self._put = dict.fromkeys(commands, 0)
        """Last observed counts: the count of an ended process may be deleted before the others end."""

    def run(self) -> int:
        """Run until all processes end. Returns the first exit code other than 0."""
        processes: list[subprocess.Popen[bytes]] = []
        try:
            self._maintainer.start()
            for command in self._commands.values():
                processes.append(subprocess.Popen(command, env=dict(self._environment)))
            return self._supervise(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            try:
                self._maintainer.close()
            except OSError as error:
                logger.warning("the maintenance lease cannot be released now: %s", error)
            self._report(at_once=True)
            self._delete_counters()

    def _supervise(self, processes: Sequence[subprocess.Popen[bytes]]) -> int:
        stop_requested_at: float | None = None
        while any(process.poll() is None for process in processes):
            failed = self._code(processes, stopping=stop_requested_at is not None)
            if stop_requested_at is None and (failed or self._progress.should_stop):
                stop_requested_at = self._clock()
                for process in processes:
                    process.terminate()
            if stop_requested_at is not None and self._clock() - stop_requested_at > GRACE_S:
                break
            self._report()
            self._pause(POLL_S)
        return self._code(processes, stopping=stop_requested_at is not None)

    def _code(self, processes: Sequence[subprocess.Popen[bytes]], *, stopping: bool) -> int:
        """Return the first exit code that indicates a failure; 0 if there is none."""
        # The stop request is SIGTERM, which ends a process that has only just begun or is at its end.
        stopping = stopping or self._progress.should_stop
        codes = [one.returncode for one in processes if one.returncode]
        return next((code for code in codes if not (stopping and code == -signal.SIGTERM)), 0)

    def _report(self, *, at_once: bool = False) -> None:
        now = self._clock()
        if not at_once and now - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = now
        try:
            put, found = self._collect_metrics()
        except OSError as error:
            # The processes retry the store themselves, and for longer.
            logger.warning("the counts of the processes cannot be read now: %s", error)
            return
        self._progress.report(put, self._count or 0, **found)

    def _collect_metrics(self) -> tuple[int, dict[str, float]]:
        """Return the number of samples put, and metrics: the state of the ring, refusals, bytes."""
        store = self._ring.store
        writers = [decode_record(store.record(f"{WRITERS}{name}")) for name in self._commands]
        for name, before in self._put.items():
            self._put[name] = max(before, read_count(store, name, again=self._again))
        waited_s = sum(float(writer.get("waited_s", 0)) for writer in writers) / len(writers)
        counts = {
            "refused": sum(int(writer.get("refused", 0)) for writer in writers),
            "ring.put_bytes": sum(int(writer.get("bytes", 0)) for writer in writers),
        }
        return sum(self._put.values()), {**self._metrics.measure(self._maintainer, waited_s), **counts}

    def _delete_counters(self) -> None:
        if self._again:
            return
        try:
            self._ring.store.delete([counter_key(name, again=False) for name in self._commands])
        except OSError as error:
            logger.warning("the counts of the processes cannot be deleted now: %s", error)
