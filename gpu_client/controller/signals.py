"""What is measured besides what the loop reports: times, the knobs, host and GPU. Only what rules read."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

from gpu_client.controller.performing import Offer, Source, said_of

log = logging.getLogger("baton.rules")

T = TypeVar("T")

SAMPLE_EVERY_S = 5.0
STOP_WITHIN_S = 2.0
"""A driver that hangs does not hold up the end of a training."""
_HOST = frozenset({"host.cpu", "host.mem"})
_GPU = frozenset({"gpu.util", "gpu.mem", "gpu.temp"})


class Signals:
    """The measures of one process. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stepped_at: float | None = None
        self._step: int | None = None
        self._saved_at = clock()
        self._waited_s = 0.0
        self._waits = False
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

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; how long each was waited for is noted."""
        iterator = iter(batches)
        while True:
            began = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.waited(self._clock() - began)
            yield batch

    def at_step(
        self, metrics: Mapping[str, object], *, step: int, reads: Set[str], wall: float, offer: Offer
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
            if "data.wait" in reads and self._waits:
                found["data.wait"] = self._waited_s
            self._waited_s = 0.0
        if "ckpt.age" in reads:
            found["ckpt.age"] = now - self._saved_at
        if "wall" in reads:
            found["wall"] = wall
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


class Probe:
    """Looks at host and GPU every few seconds, behind the training; each sample is taken once."""

    def __init__(self, every_s: float = SAMPLE_EVERY_S) -> None:
        self._every_s = every_s
        self._sample: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-probe", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self._thread.join(STOP_WITHIN_S)

    def take(self) -> dict[str, float]:
        """The newest sample, if there is one since the last call."""
        if not self._sample:
            return {}
        with self._lock:
            taken, self._sample = self._sample, {}
        return taken

    def _run(self) -> None:
        sources = [source for make in (_host, _gpu) if (source := make()) is not None]
        while sources:
            sample: dict[str, float] = {}
            for source in sources:
                # A driver may fail at any moment; then this value is missing, and rules know that.
                with contextlib.suppress(Exception):
                    sample |= source()
            with self._lock:
                self._sample = sample
            if self._stopped.wait(self._every_s):
                return


def _host() -> Callable[[], dict[str, float]] | None:
    try:
        psutil: Any = importlib.import_module("psutil")
        psutil.cpu_percent()  # the first call has nothing to compare with
    except Exception as error:  # noqa: BLE001 - no module, or one that this machine's /proc is too strange for
        log.info("host.* is not measured: %s", error)
        return None

    def read() -> dict[str, float]:
        return {"host.cpu": psutil.cpu_percent(), "host.mem": float(psutil.virtual_memory().used)}

    return read


def _gpu() -> Callable[[], dict[str, float]] | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception as error:  # noqa: BLE001 - no module, no driver, no device: each says so in its own way
        log.info("gpu.* is not measured: %s", error)
        return None

    def read() -> dict[str, float]:
        return {
            "gpu.util": float(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
            "gpu.mem": float(nvml.nvmlDeviceGetMemoryInfo(device).used),
            "gpu.temp": float(nvml.nvmlDeviceGetTemperature(device, 0)),
        }

    return read
