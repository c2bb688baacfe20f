"""The GPU that a process samples, and partial samples of limited drivers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_client.controller import hardware_sampler

UUIDS = ["GPU-aaaa-0", "GPU-aabb-1", "GPU-cccc-2", "GPU-dddd-3"]


class Pynvml(SimpleNamespace):
    """Fake of the package with four GPUs: GPU n is n % busy, has n bytes in use and n degrees."""

    def __init__(self, *, fails: frozenset[str] = frozenset(), count: int = 4, old: bool = False) -> None:
        super().__init__(fails=fails, count=count, old=old)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return int(self.count)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self.count or f"handle-{index}" in self.fails:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        if name not in UUIDS:
            raise RuntimeError("Not Found")
        return UUIDS.index(name)

    def nvmlDeviceGetUUID(self, device: int) -> str | bytes:
        return UUIDS[device].encode() if self.old else UUIDS[device]

    def _told(self, what: str, device: int) -> float:
        if what in self.fails or f"{what}-{device}" in self.fails:
            raise RuntimeError("Not Supported")
        return device

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=self._told("util", device))

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(used=self._told("mem", device))

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> float:
        return self._told("temp", device)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sample with these variables and this driver: one GPU, and the busiest of all."""

    def measured(driver: Pynvml, visible: str | None = None, local: str | None = None) -> tuple[Any, Any]:
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", local)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        one, busiest = hardware_sampler._gpu(), hardware_sampler._gpus()
        return one and one(), busiest and busiest()

    return measured


def all_of(device: float) -> dict[str, float]:
    return {"gpu.util": device, "gpu.mem": device, "gpu.temp": device}


@pytest.mark.parametrize(
    ("visible", "local", "device", "busiest"),
    [
        (None, None, 0, 3),
        (None, "2", 2, 3),
        ("3,1", None, 3, 3),
        ("3,1", "1", 1, 3),
        (" 0 , 2 ", "1", 2, 2),
        ("2", "3", 2, 2),  # a launcher that shows each process its own
        ("GPU-cccc-2", "0", 2, 2),
        ("GPU-aabb-1,GPU-aaaa-0", "1", 0, 1),
        ("GPU-d,GPU-aab", "1", 1, 3),
        ("1,-1,3", "1", 1, 1),
        ("1,9,3", "1", 1, 1),
        ("1,,3", "1", 1, 1),
        ("1", "one", 1, 1),
    ],
)
def test_the_gpu_of_this_process_is_looked_at(
    gpus: Any, visible: str | None, local: str | None, device: int, busiest: int
) -> None:
    """The machine's first GPU was sampled, whichever GPU trained."""
    assert gpus(Pynvml(), visible, local) == (all_of(device), {"gpu.util": busiest})
    assert gpus(Pynvml(old=True), visible, local) == (all_of(device), {"gpu.util": busiest})


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "9", "1" * 5000])
def test_where_it_sees_none_none_is_looked_at(gpus: Any, visible: str) -> None:
    assert gpus(Pynvml(), visible) == (None, None)


@pytest.mark.parametrize("fails", ["util", "mem", "temp"])
def test_what_one_device_does_not_know_does_not_take_the_rest_along(gpus: Any, fails: str) -> None:
    one, _ = gpus(Pynvml(fails=frozenset({fails})), "2")
    assert one == {name: 2 for name in ("gpu.util", "gpu.mem", "gpu.temp") if name != f"gpu.{fails}"}


def test_of_several_those_that_answer_count(gpus: Any) -> None:
    assert gpus(Pynvml(fails=frozenset({"util-3"})))[1] == {"gpu.util": 2}
    assert gpus(Pynvml(fails=frozenset({"util"})))[1] == {}
    lost = gpus(Pynvml(fails=frozenset({"handle-3"})), None, "3")
    assert lost == (None, {"gpu.util": 2}), "another one's values are not its own"
