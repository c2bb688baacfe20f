"""Stopwatch for the training loop of a script, a session without effect, and the process with both.

Scripts run unchanged, in one of three ways:

    agent     as a job's command: the real session, connected to the agent
    session   the real session without an agent: checkpoints are written, nothing is reported
    bare      the session's calls do nothing: the loop alone

Before the loop begins the process stops itself (SIGSTOP) until somebody lets it go on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from baton import Session

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""


class Stopwatch:
    """Begin and end of the loop and of each checkpoint by `time.monotonic`; the loop's CPU time.

    `on_begin` is called just before the loop is timed, `on_end` just after.
    """

    def __init__(self, on_begin: Callable[[], None] = lambda: None, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._began_at: float | None = None
        self.loop = (0.0, 0.0)
        self.cpu_s = 0.0
        self.waited_s = 0.0
        self.checkpoints: list[tuple[float, float]] = []
        self.checkpoints_waited_s = 0.0
        self.peak_bytes = 0

    def begin(self) -> None:
        """Begin the loop; only the first call counts."""
        if self._began_at is None:
            self._on_begin()
            forget_peak_memory()
            self.cpu_s = -time.process_time()
            self.waited_s = -waited_for_processor_s()
            self._began_at = time.monotonic()

    def end(self) -> None:
        """End the loop."""
        assert self._began_at is not None, "the loop ended before it began"
        self.loop = (self._began_at, time.monotonic())
        self.cpu_s += time.process_time()
        self.waited_s += waited_for_processor_s()
        self.peak_bytes = peak_memory_bytes()
        self._on_end()

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Time one checkpoint."""
        waited_s, began_at = waited_for_processor_s(), time.monotonic()
        yield
        self.checkpoints.append((began_at, time.monotonic()))
        self.checkpoints_waited_s += waited_for_processor_s() - waited_s

    def result(self) -> dict[str, Any]:
        """Return all times, with the CPU seconds of the process so far."""
        return {
            "loop": self.loop,
            "cpu_s": self.cpu_s,
            "waited_s": self.waited_s,
            "checkpoints": self.checkpoints,
            "checkpoints_waited_s": self.checkpoints_waited_s,
            "process_cpu_s": time.process_time(),
            "peak_bytes": self.peak_bytes,
        }


def waited_for_processor_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Read the seconds since the start in which this thread was ready but others ran; 0 if the system has no count."""
    if not schedstat.exists():
        return 0.0
    return int(schedstat.read_text(encoding="ascii").split()[1]) / 1e9


def forget_peak_memory(clear_refs: Path = Path("/proc/self/clear_refs")) -> None:
    """Reset the peak to the current size; without such a file the peak of the whole process counts."""
    if clear_refs.exists():
        clear_refs.write_text("5", encoding="ascii")


def peak_memory_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Read the largest resident size of this process in bytes, shared memory included; 0 if unknown."""
    if not status.exists():
        return 0
    lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


class NoSteering:
    """Steering without effect."""

    def offer(self, **_: Any) -> None:
        """Ignore a knob."""


class NoSession:
    """Session without effect for a loop."""

    job_id = ""
    should_stop = False
    finishing = False
    resume_from = None
    steering = NoSteering()

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.params: dict[str, Any] = json.loads(Path(variables["BATON_PARAMS"]).read_text(encoding="utf-8"))
        self.data_dir = Path(variables["BATON_DATA_DIR"])
        self.output_dir = Path(variables["BATON_OUTPUT_DIR"])
        self.output_dir.mkdir(parents=True, exist_ok=True)

    @classmethod
    def start(cls, **_: Any) -> Self:
        return cls(os.environ)

    def resume(self, **_: Any) -> int:
        return 0

    def report(self, step: int, total: int, **_: Any) -> None:
        """Ignore the report."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Ignore the report."""

    def checkpoint_due(self, step: int, every: int | None = None) -> bool:
        return False

    def checkpoint(self, step: int, **_: Any) -> None:
        """Write nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close nothing."""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory; no effect without glibc.

    How often a run of the example has memory taken from it and asks for it again is a matter of luck, decided by how
    its heap happens to lie: from 20,000 to 270,000 page faults in 300 steps, or 8 % of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 2**30)


def session_of(mode: str, watch: Stopwatch) -> Any:
    """Choose the class that replaces `Session` in a script."""

    class TimedSession(Session):
        def checkpoint(self, *arguments: Any, **states: Any) -> Path | None:
            with watch.checkpoint():
                return super().checkpoint(*arguments, **states)

    return NoSession if mode == "bare" else TimedSession


def run(instrument: Callable[[Stopwatch, str], None], train: Callable[[], object]) -> None:
    """Train once and write the times to a file. The command line has the mode and the places of marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("agent", "session", "bare"), required=True)
    parser.add_argument("--times", type=Path, required=True, help="where the result goes, JSON")
    parser.add_argument(
        "--ready", type=Path, required=True, help="gets its pid before the loop begins, when it stops itself"
    )
    parser.add_argument("--ended", type=Path, required=True, help="made when the loop has ended")
    parser.add_argument("--cpu", type=int, help="the only processor to use")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    if (options.mode == "agent") != bool(os.environ.get("BATON_CHANNEL")):
        raise SystemExit("the mode `agent`, and only it, runs under an agent")

    def wait_for_turn() -> None:
        options.ready.with_suffix(".tmp").write_text(str(os.getpid()), encoding="ascii")
        options.ready.with_suffix(".tmp").rename(options.ready)
        os.kill(os.getpid(), signal.SIGSTOP)

    keep_freed_memory()
    watch = Stopwatch(on_begin=wait_for_turn, on_end=options.ended.touch)
    instrument(watch, options.mode)
    train()
    unfinished = options.times.with_suffix(".tmp")
    unfinished.write_text(json.dumps(watch.result()), encoding="utf-8")
    unfinished.rename(options.times)
