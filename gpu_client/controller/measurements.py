"""Measure metrics that the loop does not report: times, knobs, host and GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

from gpu_client.controller.action_executor import LoopCapabilities, UserMetric, format_error
from gpu_client.controller.hardware_sampler import HardwareSampler


class TrainingClock:
    """The two elapsed-time clocks of the rules, in seconds; both continue from a checkpoint.

    `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start both clocks at 0."""
        self._clock = clock
        self._began = clock()
        self._now_base = 0.0
        self._wall_base = 0.0
        self._knows_wall = False

    def begin(self, ran_s: float | None) -> None:
        """Set the seconds of earlier attempts, as reported by the control plane; `ran_s` None: unknown."""
        self._knows_wall = ran_s is not None
        self._wall_base = float(ran_s or 0)

    def now(self) -> float:
        """Return the training time in seconds, for windows, cooldowns and ages."""
        return self._now_base + self._clock() - self._began

    def wall(self) -> float:
        """Return the metric `wall`: seconds in all attempts, as far as known."""
        return self._wall_base + self._clock() - self._began

    def state(self) -> dict[str, float]:
        """Return the state as plain JSON."""
        return {"now": self.now(), "wall": self.wall()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. The control plane's value of `wall` takes precedence."""
        passed = self._clock() - self._began
        self._now_base = float(state.get("now", 0.0)) - passed
        if not self._knows_wall:
            self._wall_base = float(state.get("wall", 0.0)) - passed


log = logging.getLogger("baton.rules")

T = TypeVar("T")

_HOST = frozenset({"host.cpu", "host.mem"})
_GPU = frozenset({"gpu.util", "gpu.mem", "gpu.temp"})


class _Loader:
    """Loader that measures the waiting time for its batches, in seconds."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.seconds = 0.0
        """The last measured value."""

    def read(self) -> float | None:
        """Read the value; None if the loader has no finite number."""
        try:
            seconds = float(self.of.waited_s)
        except Exception:  # noqa: BLE001 - the user's code: the training continues
            return None
        if not math.isfinite(seconds):
            return None
        self.seconds = seconds
        return seconds


class Measurements:
    """Measurements of one process. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stepped_at: float | None = None
        self._step: int | None = None
        self._saved_at = clock()
        self._waited_s = 0.0
        self._waited_before_s = 0.0
        """Seconds waited before the newest step."""
        self._awaiting_since: float | None = None
        self._waits = False
        self._loaders: list[_Loader] = []
        """Loaders that measure their own waiting time."""
        self._last_report: tuple[int, float, float] | None = None
        """The last report to the agent: step, time, total seconds of waiting."""
        self._probe: HardwareSampler | None = None
        self._failed: set[str] = set()

    def follow(self, reads: Set[str]) -> None:
        """Start sampling the hardware if rules read its metrics."""
        if self._probe is None and reads & (_HOST | _GPU):
            probe = HardwareSampler()
            try:
                probe.start()
            except RuntimeError as error:  # The process has too many threads.
                log.warning("host.* and gpu.* are not measured: %s", error)
                return
            self._probe = probe

    def checkpoint_saved(self) -> None:
        """Reset the age of the newest checkpoint."""
        self._saved_at = self._clock()

    def add_wait(self, seconds: float) -> None:
        """Add seconds of the loop's waiting for data."""
        self._waited_s += seconds
        self._waits = True

    def wait_started(self) -> None:
        """Mark the start of waiting for data; a later call replaces the mark.

        Integrations with libraries that own their loaders call this method at the end of each other activity.
        """
        self._awaiting_since = self._clock()

    def wait_ended(self) -> None:
        """Add the time since `wait_started`."""
        if self._awaiting_since is not None:
            self.add_wait(self._clock() - self._awaiting_since)
            self._awaiting_since = None

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches and measure the waiting times, unless the loader measures its own (`waited_s`)."""
        if self._follows(batches):
            yield from batches
            return
        iterator = iter(batches)
        while True:
            began = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.add_wait(self._clock() - began)
            yield batch

    def follow_loaders(self, states: Iterable[object]) -> None:
        """Follow the states that measure their own waiting time (`waited_s`)."""
        for state in states:
            self._follows(state)

    def _follows(self, state: object) -> bool:
        """Follow a loader; return False for an object whose `waited_s` is no number."""
        if any(one.of is state for one in self._loaders):
            return True
        if not hasattr(type(state), "waited_s"):
            return False
        loader = _Loader(state)
        if loader.read() is None:
            return False
        self._loaders.append(loader)
        self._waits = True
        return True

    def _waited(self) -> float:
        for loader in self._loaders:
            loader.read()
        return self._waited_s + sum(loader.seconds for loader in self._loaders)

    def since_last_report(self, step: int) -> dict[str, float]:
        """Return the mean times of the steps since the last call; empty without a new step."""
        now, waited, before = self._clock(), self._waited(), self._last_report
        self._last_report = step, now, waited
        if before is None or step <= before[0]:
            return {}
        steps = step - before[0]
        found = {"step.time": (now - before[1]) / steps}
        if self._waits:
            found["data.wait"] = (waited - before[2]) / steps
        return found

    def step_metrics(
        self,
        metrics: Mapping[str, object],
        *,
        step: int,
        reads: Set[str],
        times: TrainingClock,
        capabilities: LoopCapabilities,
    ) -> dict[str, object]:
        """Return the reported metrics of a step and all other metrics that rules read.

        A repeated report of a step has no new times.
        """
        now = self._clock()
        found: dict[str, object] = dict(metrics)
        if step != self._step:
            self._step = step
            if "step.time" in reads and self._stepped_at is not None:
                found["step.time"] = now - self._stepped_at
            self._stepped_at = now
            if self._waits:
                waited = self._waited()
                if "data.wait" in reads:
                    found["data.wait"] = waited - self._waited_before_s
                self._waited_before_s = waited
        if "ckpt.age" in reads:
            found["ckpt.age"] = now - self._saved_at
        if "wall" in reads:
            found["wall"] = times.wall()
        if "lr" in reads and "lr" in capabilities.knobs and not metrics.keys() & {"lr", "learning_rate"}:
            found["lr"] = self._read_source("lr", capabilities.knobs["lr"].read)
        for name, source in capabilities.metrics.items():
            if name in reads:
                found[name] = self._read_source(name, source)
        if self._probe is not None:
            found.update(self._probe.take())
        return found

    def _read_source(self, name: str, source: UserMetric) -> float | None:
        try:
            return source()
        except Exception as error:  # noqa: BLE001 - the user's code: the training continues, the value is missing
            if name not in self._failed:
                self._failed.add(name)
                log.warning("the metric %s cannot be read: %s", name, format_error(error))
            return None

    def close(self) -> None:
        """Stop sampling."""
        if self._probe is not None:
            self._probe.stop()
            self._probe = None
