"""Metrics besides the reported ones."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from controller_kit import Clock

from gpu_client.controller import hardware_sampler
from gpu_client.controller import measurements as module
from gpu_client.controller.action_executor import LoopCapabilities
from gpu_client.controller.hardware_sampler import HardwareSampler
from gpu_client.controller.learning_rate import Setting
from gpu_client.controller.measurements import Measurements, TrainingClock
from tests.kits.waiting import soon

ALL = frozenset({"step.time", "data.wait", "ckpt.age", "wall", "lr"})


def at(
    signals: Measurements, step: int, *, reads: frozenset[str] = ALL, offer: LoopCapabilities | None = None, **said: Any
) -> Any:
    times = TrainingClock(lambda: 0.0)
    times.begin(7.0)
    return signals.step_metrics(said, step=step, reads=reads, times=times, capabilities=offer or LoopCapabilities())


def test_times_of_a_step() -> None:
    clock = Clock()
    signals = Measurements(clock)
    assert "step.time" not in at(signals, 1) and "data.wait" not in at(signals, 1)
    clock.now += 2
    signals.add_wait(0.5)
    signals.add_wait(0.25)
    found = at(signals, 2, loss=1.0)
    assert found == {"loss": 1.0, "step.time": 2.0, "data.wait": 0.75, "ckpt.age": 2.0, "wall": 7.0}
    signals.checkpoint_saved()
    clock.now += 1
    assert at(signals, 3) == {"step.time": 1.0, "data.wait": 0.0, "ckpt.age": 1.0, "wall": 7.0}


def test_of_what_a_library_says_the_newest_begins_a_wait() -> None:
    clock = Clock()
    signals = Measurements(clock)
    signals.wait_ended()
    assert "data.wait" not in at(signals, 1), "nobody said when it began"
    for passed_s in (3, 2, 1):
        signals.wait_started()
        clock.now += passed_s
    signals.wait_ended()
    signals.wait_ended()
    assert at(signals, 2)["data.wait"] == 1.0


def test_a_step_that_is_reported_again_has_no_new_times() -> None:
    """A report of an evaluation made every second step take no time at all."""
    clock = Clock()
    signals = Measurements(clock)
    for step in range(1, 4):
        clock.now += 2
        signals.add_wait(0.5)
        first = at(signals, step)
        clock.now += 0.1
        assert not at(signals, step).keys() & {"step.time", "data.wait"}
    assert first["step.time"] == pytest.approx(2.1) and first["data.wait"] == 0.5


def test_nothing_is_measured_that_no_rule_reads() -> None:
    asked: list[int] = []
    offer = LoopCapabilities(
        knobs={"lr": Setting(lambda: float(len(asked)), lambda value: None)},
        metrics={"mine": lambda: float(asked.append(1) is None)},
    )
    signals = Measurements(Clock())
    assert at(signals, 1, reads=frozenset({"loss"}), offer=offer, loss=1.0) == {"loss": 1.0}
    assert asked == []
    assert at(signals, 2, reads=frozenset({"mine", "lr"}), offer=offer) == {"lr": 0.0, "mine": 1.0}


@pytest.mark.parametrize("name", ["lr", "learning_rate"])
def test_a_rate_that_the_loop_reports_itself_is_taken(name: str) -> None:
    offer = LoopCapabilities(knobs={"lr": Setting(lambda: 0.5, lambda value: None)})
    assert at(Measurements(Clock()), 1, reads=frozenset({"lr"}), offer=offer, **{name: 0.1}) == {name: 0.1}


class Loader:
    """The loader measures its own waiting time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @property
    def waited_s(self) -> float:
        return self.seconds


def test_the_agent_is_told_the_mean_of_the_steps_since_it_was_told_last() -> None:
    clock = Clock()
    signals = Measurements(clock)
    assert signals.since_last_report(10) == {}
    clock.now += 4
    assert signals.since_last_report(20) == {"step.time": 0.4}, "nobody measures how long data are waited for"
    signals.add_wait(1.0)
    clock.now += 3
    assert signals.since_last_report(20) == {}, "a phase between two steps is time of neither"
    signals.add_wait(0.5)
    clock.now += 2
    assert signals.since_last_report(22) == {"step.time": 1.0, "data.wait": 0.25}
    assert signals.since_last_report(5) == {}, "resumed before it"


def test_loaders_that_measure_by_themselves_are_asked_and_counted_once() -> None:
    clock, loader = Clock(), Loader()
    signals = Measurements(clock)
    signals.follow_loaders([loader, object()])
    signals.follow_loaders([loader])
    assert signals.since_last_report(1) == {}
    assert at(signals, 1)["data.wait"] == 0.0
    loader.seconds += 0.5
    clock.now += 1
    assert signals.since_last_report(2) == {"step.time": 1.0, "data.wait": 0.5}
    assert at(signals, 2)["data.wait"] == 0.5
    assert at(signals, 3)["data.wait"] == 0.0


class Method:
    """A loader whose `waited_s` is a method instead of a number."""

    def waited_s(self) -> float:
        return 1.0

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


class Raising(Method):
    @property
    def waited_s(self) -> float:  # type: ignore[override]
        raise OSError("closed")


class Text(Method):
    waited_s = "much"  # type: ignore[assignment]


@pytest.mark.parametrize("state", [Method(), Raising(), Text()], ids=["method", "raises", "text"])
def test_a_state_that_has_something_else_by_that_name_is_passed_over(state: Any) -> None:
    """float() of a method went through session.report into the loop."""
    clock = Clock()
    signals = Measurements(clock)
    signals.follow_loaders([state])
    assert "data.wait" not in at(signals, 1) and signals.since_last_report(1) == {}
    for batch in signals.timed(state):
        clock.now += 1
        found = at(signals, 1 + batch)
    assert found["data.wait"] == 0.0, "it is timed like any other"


@pytest.mark.parametrize("broken", [OSError("closed"), "much", float("nan")], ids=["raises", "text", "nan"])
def test_a_loader_that_breaks_counts_as_it_last_said(broken: Any) -> None:
    class Breaking(Loader):
        broken: Any = None

        @property
        def waited_s(self) -> Any:
            if isinstance(self.broken, Exception):
                raise self.broken
            return self.seconds if self.broken is None else self.broken

    clock, loader = Clock(), Breaking()
    signals = Measurements(clock)
    signals.follow_loaders([loader])
    at(signals, 1)
    loader.seconds, clock.now = 0.5, clock.now + 1
    assert at(signals, 2)["data.wait"] == 0.5
    loader.broken = broken
    assert at(signals, 3)["data.wait"] == 0.0
    loader.broken, loader.seconds = None, 0.75
    assert at(signals, 4)["data.wait"] == 0.25


@pytest.mark.parametrize(("utils", "busiest"), [([0, 97, 3], 97.0), ([0, 0], 0.0)])
def test_of_all_gpus_the_busiest_counts_for_the_agent(
    monkeypatch: pytest.MonkeyPatch, utils: list[int], busiest: float
) -> None:
    class Several(Pynvml):
        def nvmlDeviceGetCount(self) -> int:
            return len(utils)

        def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
            return SimpleNamespace(gpu=utils[device])

    monkeypatch.setitem(sys.modules, "psutil", Psutil())
    monkeypatch.setitem(sys.modules, "pynvml", Several(len(utils)))
    probe = HardwareSampler(0.001, gpus_only=True)
    probe.start()
    found: dict[str, float] = {}
    soon(lambda: found.update(probe.take()) or found)
    probe.stop()
    assert found == {"gpu.util": busiest}, "and nothing of the host"


class Psutil(SimpleNamespace):
    """Fake of the package."""

    def __init__(self) -> None:
        super().__init__(looks=0)

    def cpu_percent(self) -> float:
        self.looks += 1
        return 12.5

    def virtual_memory(self) -> Any:
        if self.looks == 2:
            raise OSError("/proc is gone for a moment")
        return SimpleNamespace(used=3000)


class Pynvml(SimpleNamespace):
    """Fake of the package with one GPU."""

    def __init__(self, devices: int = 1) -> None:
        super().__init__(devices=devices)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return int(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self.devices:
            raise RuntimeError("Not Found")
        return index

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(used=2**33)

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        return 66


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HardwareSampler]]:
    """Yield the hardware samplers of a test, which sample without a pause; stop them at the end."""
    made: list[HardwareSampler] = []

    class Quick(HardwareSampler):
        def __init__(self) -> None:
            super().__init__(every_s=0.001)
            made.append(self)

    monkeypatch.setattr(module, "HardwareSampler", Quick)
    yield made
    for probe in made:
        probe.stop()
        assert not probe._thread.is_alive()


def test_host_and_gpu_are_sampled_behind_the_training(
    monkeypatch: pytest.MonkeyPatch, probes: list[HardwareSampler]
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", Psutil())
    monkeypatch.setitem(sys.modules, "pynvml", Pynvml())
    signals = Measurements(Clock())
    signals.follow({"loss"})
    assert probes == []
    signals.follow({"host.mem"})
    signals.follow({"gpu.temp"})
    (probe,) = probes
    found: dict[str, float] = {}

    def complete() -> bool:
        found.update(probe.take())
        return len(found) == 5

    soon(complete)
    assert found == {"host.cpu": 12.5, "host.mem": 3000.0, "gpu.util": 97.0, "gpu.mem": 2.0**33, "gpu.temp": 66.0}
    signals.close()
    assert not probe._thread.is_alive()


@pytest.mark.parametrize("missing", [{"psutil": None, "pynvml": None}, {"psutil": None, "pynvml": Pynvml(0)}])
def test_what_cannot_be_sampled_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    probes: list[HardwareSampler],
    caplog: pytest.LogCaptureFixture,
    missing: dict[str, Any],
) -> None:
    for name, found in missing.items():
        monkeypatch.setitem(sys.modules, name, found)
    signals = Measurements(Clock())
    with caplog.at_level(logging.INFO, "baton.rules"):
        signals.follow({"gpu.util", "host.cpu"})
        soon(lambda: not probes[0]._thread.is_alive())
    assert at(signals, 1, reads=frozenset({"gpu.util"})) == {}
    assert "host.* is not measured" in caplog.text and "gpu.* is not measured" in caplog.text


def test_a_machine_without_room_for_a_thread_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(HardwareSampler):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "HardwareSampler", Full)
    signals = Measurements(Clock())
    signals.follow({"gpu.util"})
    assert at(signals, 1, reads=frozenset({"gpu.util"})) == {}
    signals.close()


def test_a_driver_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, release = threading.Event(), threading.Event()

    class Hanging(Psutil):
        def virtual_memory(self) -> Any:
            hangs.set()
            release.wait(60)
            return SimpleNamespace(used=1)

    monkeypatch.setitem(sys.modules, "psutil", Hanging())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(hardware_sampler, "STOP_WITHIN_S", 0.01)
    probe = HardwareSampler()
    probe.start()
    assert hangs.wait(60)
    probe.stop()
    assert probe._thread.is_alive()
    release.set()
    probe._thread.join(60)
    assert not probe._thread.is_alive()
