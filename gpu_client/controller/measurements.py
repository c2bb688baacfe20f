"""What is measured besides what the loop reports: times, the knobs, host and GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

from gpu_client.controller.action_executor import Offer, Source, said_of
from gpu_client.controller.hardware_sampler import Probe


class Times:
    """Of one process. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Both begin at 0."""
        self._clock = clock
        self._began = clock()
        self._now_base = 0.0
        self._wall_base = 0.0
        self._knows_wall = False

    def begin(self, ran_s: float | None) -> None:
        """`ran_s`: how long the job had run before this attempt, as the control plane counts it; None if unsaid."""
        self._knows_wall = ran_s is not None
        self._wall_base = float(ran_s or 0)

    def now(self) -> float:
        """What windows, cooldowns and ages are counted by: time in training, up to the checkpoint and since."""
        return self._now_base + self._clock() - self._began

    def wall(self) -> float:
        """The metric `wall`: time in all attempts, as far as is known."""
        return self._wall_base + self._clock() - self._began

    def state(self) -> dict[str, float]:
        """Plain JSON."""
        return {"now": self.now(), "wall": self.wall()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where that was saved; of `wall` the control plane knows better, if it has said something."""
        passed = self._clock() - self._began
        self._now_base = float(state.get("now", 0.0)) - passed
        if not self._knows_wall:
            self._wall_base = float(state.get("wall", 0.0)) - passed


log = logging.getLogger("baton.rules")

T = TypeVar("T")

_HOST = frozenset({"host.cpu", "host.mem"})
_GPU = frozenset({"gpu.util", "gpu.mem", "gpu.temp"})


class _Loader:
    """One that measures by itself how long it was waited for, in seconds."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.seconds = 0.0
        """As it last said."""

    def read(self) -> float | None:
        """What it says now; None where that is no number, or cannot be had."""
        try:
            seconds = float(self.of.waited_s)
        except Exception:  # noqa: BLE001 - the user's code: the training goes on
            return None
        if not math.isfinite(seconds):
            return None
        self.seconds = seconds
        return seconds


class Signals:
    """The measures of one process. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stepped_at: float | None = None
        self._step: int | None = None
        self._saved_at = clock()
        self._waited_s = 0.0
        self._waited_before_s = 0.0
        """Before the newest step."""
        self._awaiting_since: float | None = None
        self._waits = False
        self._loaders: list[_Loader] = []
        """Those that measure by themselves how long they were waited for."""
        self._told: tuple[int, float, float] | None = None
        """When the agent was last told: step, time, seconds waited so far."""
        self._probe: Probe | None = None
        self._failed: set[str] = set()

    def follow(self, reads: Set[str]) -> None:
        """Rules read these: begin to sample what has to be sampled."""
        if self._probe is None and reads & (_HOST | _GPU):
            probe = Probe()
            try:
                probe.start()
            except RuntimeError as error:  # no more threads
                log.warning("host.* and gpu.* are not measured: %s", error)
                return
            self._probe = probe

    def saved(self) -> None:
        """A checkpoint has just been taken."""
        self._saved_at = self._clock()

    def waited(self, seconds: float) -> None:
        """So long the loop waited for data."""
        self._waited_s += seconds
        self._waits = True

    def awaiting(self) -> None:
        """As far as is known the loop does nothing from now on but wait for data.

        For libraries that hold their loaders themselves, and tell when something is done: the newest call counts.
        """
        self._awaiting_since = self._clock()

    def arrived(self) -> None:
        """It has them."""
        if self._awaiting_since is not None:
            self.waited(self._clock() - self._awaiting_since)
            self._awaiting_since = None

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; how long each was waited for is noted, by themselves if they can (`waited_s`)."""
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
            self.waited(self._clock() - began)
            yield batch

    def follow_loaders(self, states: Iterable[object]) -> None:
        """Those among them that measure by themselves how long they were waited for (`waited_s`)."""
        for state in states:
            self._follows(state)

    def _follows(self, state: object) -> bool:
        """Whether it is one of them: any object may have something else by that name."""
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

    def since_told(self, step: int) -> dict[str, float]:
        """The mean times of the steps since this was last asked; nothing where there was none."""
        now, waited, told = self._clock(), self._waited(), self._told
        self._told = step, now, waited
        if told is None or step <= told[0]:
            return {}
        steps = step - told[0]
        found = {"step.time": (now - told[1]) / steps}
        if self._waits:
            found["data.wait"] = (waited - told[2]) / steps
        return found

    def at_step(
        self, metrics: Mapping[str, object], *, step: int, reads: Set[str], times: Times, offer: Offer
    ) -> dict[str, object]:
        """What the loop reported with this step, and everything else that rules read.

        A step that is reported again has no new times.
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
        if "lr" in reads and "lr" in offer.knobs and not metrics.keys() & {"lr", "learning_rate"}:
            found["lr"] = self._asked("lr", offer.knobs["lr"].read)
        for name, source in offer.metrics.items():
            if name in reads:
                found[name] = self._asked(name, source)
        if self._probe is not None:
            found.update(self._probe.take())
        return found

    def _asked(self, name: str, source: Source) -> float | None:
        try:
            return source()
        except Exception as error:  # noqa: BLE001 - the user's code: the training goes on, the value is missing
            if name not in self._failed:
                self._failed.add(name)
                log.warning("the metric %s cannot be read: %s", name, said_of(error))
            return None

    def close(self) -> None:
        """Stop sampling."""
        if self._probe is not None:
            self._probe.stop()
            self._probe = None
