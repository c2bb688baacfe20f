"""What host and GPU tell of themselves, sampled behind whoever wants to know."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("baton.rules")

SAMPLE_EVERY_S = 5.0
STOP_WITHIN_S = 2.0
"""A driver that hangs does not hold up the end of a training."""
MAX_GPUS = 16


class Probe:
    """Looks at host and GPU every few seconds, in a thread of its own; each sample is taken once."""

    def __init__(self, every_s: float = SAMPLE_EVERY_S, *, gpus_only: bool = False) -> None:
        """`gpus_only`: nothing of the host, and of all GPUs instead of the first one."""
        self._every_s = every_s
        self._gpus_only = gpus_only
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
        makes = (_gpus,) if self._gpus_only else (_host, _gpu)
        sources = [source for make in makes if (source := make()) is not None]
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


def _devices(*, most: int) -> tuple[Any, list[Any]] | None:
    """The driver's library and handles of the first GPUs."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        number = 1 if most == 1 else min(most, nvml.nvmlDeviceGetCount())
        return nvml, [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(number)]
    except Exception as error:  # noqa: BLE001 - no module, no driver, no device: each says so in its own way
        log.info("gpu.* is not measured: %s", error)
        return None


def _gpus() -> Callable[[], dict[str, float]] | None:
    found = _devices(most=MAX_GPUS)
    if found is None or not found[1]:
        return None
    nvml, devices = found
    return lambda: {"gpu.util": max(float(nvml.nvmlDeviceGetUtilizationRates(device).gpu) for device in devices)}


def _gpu() -> Callable[[], dict[str, float]] | None:
    found = _devices(most=1)
    if found is None:
        return None
    nvml, (device,) = found

    def read() -> dict[str, float]:
        return {
            "gpu.util": float(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
            "gpu.mem": float(nvml.nvmlDeviceGetMemoryInfo(device).used),
            "gpu.temp": float(nvml.nvmlDeviceGetTemperature(device, 0)),
        }

    return read
