"""The digits example with a stopwatch around its training loop; started by `overhead` and by the agent under test.

It runs `gpu_client.training.digits.main`, unchanged, in one of three ways:

    agent     as a job's command: the real session, connected to the agent
    session   the real session without an agent: checkpoints are written, nothing is reported
    bare      the session's calls do nothing: the loop alone

Before the loop begins it stops itself (SIGSTOP) until somebody lets it go on. The loop is timed from the first batch
that is drawn to the switch to evaluation, so the checkpoint of the last step is inside and imports, reading images and
the final report are outside. Needs nothing of `tests`, since the agent starts it in a directory of its own.
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

from torch import nn

from gpu_client.training import BatchSampler, Session, digits

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""


class Stopwatch:
    """When the loop and each checkpoint in it began and ended, by `time.monotonic`; the loop's CPU time.

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

    def begin(self) -> None:
        """The loop begins; only the first call counts."""
        if self._began_at is None:
            self._on_begin()
            self.cpu_s = -time.process_time()
            self.waited_s = -waited_for_processor_s()
            self._began_at = time.monotonic()

    def end(self) -> None:
        """The loop is over."""
        assert self._began_at is not None, "the loop ended before it began"
        self.loop = (self._began_at, time.monotonic())
        self.cpu_s += time.process_time()
        self.waited_s += waited_for_processor_s()
        self._on_end()

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Around one checkpoint."""
        waited_s, began_at = waited_for_processor_s(), time.monotonic()
        yield
        self.checkpoints.append((began_at, time.monotonic()))
        self.checkpoints_waited_s += waited_for_processor_s() - waited_s

    def result(self) -> dict[str, Any]:
        """Everything, with the CPU seconds of the process so far."""
        return {
            "loop": self.loop,
            "cpu_s": self.cpu_s,
            "waited_s": self.waited_s,
            "checkpoints": self.checkpoints,
            "checkpoints_waited_s": self.checkpoints_waited_s,
            "process_cpu_s": time.process_time(),
        }


def waited_for_processor_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Seconds that this thread was ready to run while others ran, since it began; 0 where the system does not tell."""
    if not schedstat.exists():
        return 0.0
    return int(schedstat.read_text(encoding="ascii").split()[1]) / 1e9


class NoSession:
    """What the loop needs of a session, doing nothing."""

    should_stop = False

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
        """Nobody listens."""

    def checkpoint_due(self, step: int, every: int | None = None) -> bool:
        return False


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back to the system; does nothing where there is no glibc.

    How often a run of the example has memory taken from it and asks for it again is a matter of luck, decided by how
    its heap happens to lie: from 20,000 to 270,000 page faults in 300 steps, or 8 % of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 2**30)


def instrument(watch: Stopwatch, mode: str) -> None:
    """Put the stopwatch, and for `bare` the session that does nothing, into the example."""

    class TimedBatches(BatchSampler):
        def __next__(self) -> Any:
            watch.begin()
            return super().__next__()

    class TimedModel(nn.Sequential):
        def eval(self) -> Self:
            watch.end()
            return super().eval()

    class TimedSession(Session):
        def checkpoint(self, *arguments: Any, **states: Any) -> Path:
            with watch.checkpoint():
                return super().checkpoint(*arguments, **states)

    make_model = digits.make_model
    digits.BatchSampler = TimedBatches  # type: ignore[misc]
    digits.make_model = lambda hidden: TimedModel(*make_model(hidden))
    digits.Session = NoSession if mode == "bare" else TimedSession  # type: ignore[misc,assignment]


def main() -> None:
    """Train once and leave the times in a file."""
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
    digits.main()
    unfinished = options.times.with_suffix(".tmp")
    unfinished.write_text(json.dumps(watch.result()), encoding="utf-8")
    unfinished.rename(options.times)


if __name__ == "__main__":
    main()
