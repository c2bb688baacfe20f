"""Sample metrics of host and GPU in a background thread."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

log = logging.getLogger("baton.rules")

SAMPLE_EVERY_S = 5.0
STOP_WITHIN_S = 2.0
"""Limit in seconds for the end of the thread, because a hanging driver must not delay the end of a training."""
MAX_GPUS = 16


class HardwareSampler:
    """Sampler of host and GPU at intervals of seconds; `take` returns each sample once."""

    def __init__(self, every_s: float = SAMPLE_EVERY_S, *, gpus_only: bool = False) -> None:
        """`gpus_only`: sample only the utilization of all GPUs."""
        self._every_s = every_s
        self._gpus_only = gpus_only
        self._sample: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-probe", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join(STOP_WITHIN_S)

    def take(self) -> dict[str, float]:
        """Return the newest sample since the last call; {} without a sample."""
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
                # A driver can fail at any time; rules tolerate the missing value.
                with contextlib.suppress(Exception):
                    sample |= source()
            with self._lock:
                self._sample = sample
            if self._stopped.wait(self._every_s):
                return


def _host() -> Callable[[], dict[str, float]] | None:
    try:
        psutil: Any = importlib.import_module("psutil")
        psutil.cpu_percent()  # The first call returns no usage, for lack of an earlier value.
    except Exception as error:  # noqa: BLE001 - no module, or one that this machine's /proc is too strange for
        log.info("host.* is not measured: %s", error)
        return None

    def read() -> dict[str, float]:
        return {"host.cpu": psutil.cpu_percent(), "host.mem": float(psutil.virtual_memory().used)}

    return read


def _library() -> Any:
    """Load the driver's library; None without a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - no module or no driver: each raises its own error
        log.info("gpu.* is not measured: %s", error)
        return None
    return nvml


def _devices(nvml: Any, variables: Mapping[str, str]) -> list[Any]:
    """Return the GPUs that a process with these variables sees, in CUDA's order; None for an unavailable GPU.

    CUDA and the driver number the GPUs equally if all have one model, or if CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except Exception as error:  # noqa: BLE001 - as above
        log.info("gpu.* is not measured: %s", error)
        return []
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if visible is None else _names(visible, count)
    if not names:
        log.info("gpu.* is not measured: there is no GPU")
    return [_handle(nvml, name, count) for name in names[:MAX_GPUS]]


def _names(visible: str, count: int) -> list[str]:
    """List indices and UUIDs up to the first invalid entry, as CUDA does."""
    names: list[str] = []
    for name in map(str.strip, visible.split(",")):
        if not name or name.startswith("-") or (_is_number(name) and int(name) >= count):
            break
        names.append(name)
    return names


def _handle(nvml: Any, name: str, count: int) -> Any:
    """Find a GPU by index, UUID or prefix of a UUID."""
    try:
        if _is_number(name):
            return nvml.nvmlDeviceGetHandleByIndex(int(name))
        with contextlib.suppress(Exception):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        return next((one for one in handles if _text(nvml.nvmlDeviceGetUUID(one)).startswith(name)), None)
    except Exception as error:  # noqa: BLE001 - as above
        log.info("gpu.* of %s is not measured: %s", name, error)
        return None


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _gpus() -> Callable[[], dict[str, float]] | None:
    """Make a source that returns the utilization of the busiest GPU."""
    nvml = _library()
    devices = [one for one in _devices(nvml, os.environ) if one is not None] if nvml is not None else []
    if not devices:
        return None

    measures = [partial(_util, nvml, device) for device in devices]

    def read() -> dict[str, float]:
        shares = [share for measure in measures if (share := _measured(measure)) is not None]
        return {"gpu.util": max(shares)} if shares else {}

    return read


def _gpu() -> Callable[[], dict[str, float]] | None:
    """Make a source for the GPU of this process: the only visible GPU, or the GPU with the local rank's number."""
    nvml = _library()
    devices = _devices(nvml, os.environ) if nvml is not None else []
    local = os.environ.get("LOCAL_RANK", "")
    device = devices[int(local) % len(devices) if _is_number(local) else 0] if devices else None
    if device is None:
        return None
    measures: dict[str, Callable[[], float]] = {
        "gpu.util": lambda: _util(nvml, device),
        "gpu.mem": lambda: float(nvml.nvmlDeviceGetMemoryInfo(device).used),
        "gpu.temp": lambda: float(nvml.nvmlDeviceGetTemperature(device, 0)),
    }
    return lambda: {name: value for name, measure in measures.items() if (value := _measured(measure)) is not None}


def _util(nvml: Any, device: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(device).gpu)


def _measured(measure: Callable[[], float]) -> float | None:
    """Read one value; return None if the device lacks the value, so that the other values remain."""
    try:
        return measure()
    except Exception:  # noqa: BLE001 - as above
        return None
