"""Test stop requests of two levels, without real signals."""

import signal
from types import FrameType

import pytest

from gpu_client.agent.app.shutdown import (
    LEAVE_MARGIN_S,
    LEAVE_MIN_S,
    Handler,
    ShutdownLevel,
    ShutdownRequest,
    stop_on_signals,
)
from tests.kits.clock import Clock


def test_first_drain_then_now() -> None:
    clock = Clock()
    stop = ShutdownRequest(clock)
    assert (stop.level, stop.is_set(), stop.reason) == (ShutdownLevel.NONE, False, "")
    assert stop.request("spot notice") == ShutdownLevel.DRAIN
    assert stop.is_set()
    assert stop.wait(0)
    assert not stop.wait_now(0)
    clock.now += 5
    assert stop.request("SIGTERM") == ShutdownLevel.NOW
    assert stop.wait_now(0)
    assert stop.reason == "spot notice"
    clock.now += 5
    assert stop.request("again") == ShutdownLevel.NOW


def test_two_signals_of_one_event_are_one_request() -> None:
    clock = Clock()
    stop = ShutdownRequest(clock)
    stop.request("SIGTERM")
    clock.now += 0.2
    assert stop.request("SIGTERM") == ShutdownLevel.DRAIN
    clock.now += 0.9  # 1.1 s after the first.
    assert stop.request("SIGTERM") == ShutdownLevel.NOW


@pytest.mark.parametrize(
    ("machine_ends_in_s", "grace_s", "lasts_s"),
    [(30.0, 600.0, 30.0 - LEAVE_MARGIN_S), (None, 5.0, 5.0 + LEAVE_MIN_S), (None, 60.0, 120.0)],
)
def test_an_orderly_exit_ends_in_time(machine_ends_in_s: float | None, grace_s: float, lasts_s: float) -> None:
    clock = Clock()
    stop = ShutdownRequest(clock, shutdown_grace_s=machine_ends_in_s)
    stop.request("SIGTERM")
    clock.now += lasts_s - 0.5
    assert not stop.out_of_time(grace_s)
    clock.now += 1.0
    assert stop.out_of_time(grace_s)


def test_handlers_are_installed_and_put_back() -> None:
    installed: dict[signal.Signals, object] = {signal.SIGTERM: "former TERM", signal.SIGINT: None}

    def register(number: signal.Signals, handler: Handler) -> object:
        former = installed[number]
        installed[number] = handler
        return former

    stop = ShutdownRequest(Clock())
    with stop_on_signals(stop, register=register):
        handler = installed[signal.SIGTERM]
        assert callable(handler)
        frame: FrameType | None = None
        handler(int(signal.SIGTERM), frame)
        assert stop.wait(60)
    assert installed == {signal.SIGTERM: "former TERM", signal.SIGINT: signal.SIG_DFL}
    assert stop.reason == "SIGTERM"
    assert stop.level == ShutdownLevel.DRAIN


def test_a_real_signal_wakes_a_waiting_main_thread() -> None:
    former = signal.getsignal(signal.SIGINT)
    stop = ShutdownRequest()
    with stop_on_signals(stop):
        signal.raise_signal(signal.SIGINT)
        assert stop.wait(60)
    assert stop.level == ShutdownLevel.DRAIN
    assert signal.getsignal(signal.SIGINT) is former
