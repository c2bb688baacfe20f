"""Test the schedule on a fake clock: rate, failures, slow calls, stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from functions.local.triggers.schedule import Schedule, scheduled_event


class Time:
    """Clock and stop signal in one: a wait advances the clock; the signal is set at `end_s`."""

    def __init__(self, end_s: float) -> None:
        self.now_s = 1_000.0
        self.end_s = 1_000.0 + end_s
        self.stopped = False

    def __call__(self) -> float:
        return self.now_s

    def wait(self, timeout: float) -> bool:
        self.now_s += timeout
        return self.stopped or self.now_s > self.end_s

    def set(self) -> None:
        self.stopped = True


def run(handler: Callable[[dict[str, Any], Any], Any], time: Time, interval_s: float = 60) -> None:
    Schedule(handler, interval_s=interval_s, clock=time, monotonic=time, stopper=time).run()


def test_the_handler_is_called_once_an_interval_beginning_after_the_first() -> None:
    time = Time(end_s=185)
    calls: list[tuple[float, dict[str, Any]]] = []

    def sweep(event: dict[str, Any], context: Any) -> dict[str, Any]:
        calls.append((time.now_s, event))
        return {}

    run(sweep, time)
    assert [at for at, _ in calls] == [1060, 1120, 1180]
    assert [event["time"] for _, event in calls] == [
        "1970-01-01T00:17:40Z",
        "1970-01-01T00:18:40Z",
        "1970-01-01T00:19:40Z",
    ]
    assert len({event["id"] for _, event in calls}) == 3


def test_a_failing_call_is_logged_and_does_not_end_the_schedule(caplog: pytest.LogCaptureFixture) -> None:
    time = Time(end_s=125)

    def sweep(event: dict[str, Any], context: Any) -> dict[str, Any]:
        raise RuntimeError(f"no {context.function_name}")

    with caplog.at_level(logging.ERROR):
        run(sweep, time)
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert "no sweep" in caplog.text


def test_a_slow_call_delays_the_next_and_is_not_made_up_for() -> None:
    time = Time(end_s=300)
    starts: list[float] = []

    def sweep(event: dict[str, Any], context: Any) -> dict[str, Any]:
        starts.append(time.now_s - 1_000)
        time.now_s += 130 if len(starts) == 1 else 10
        return {}

    run(sweep, time)
    assert starts == [60, 190, 250]


def test_calls_do_not_drift() -> None:
    time = Time(end_s=241)
    starts: list[float] = []

    def sweep(event: dict[str, Any], context: Any) -> dict[str, Any]:
        starts.append(time.now_s - 1_000)
        time.now_s += 7
        return {}

    run(sweep, time)
    assert starts == [60, 120, 180, 240]


def test_a_stopped_schedule_calls_nothing_and_ends() -> None:
    calls: list[Any] = []

    def sweep(event: dict[str, Any], context: Any) -> dict[str, Any]:
        calls.append(event)
        return {}

    schedule = Schedule(sweep, interval_s=3600)
    with schedule:
        pass
    assert calls == []
    with pytest.raises(RuntimeError, match="already started"):
        schedule.start()


def test_the_event_is_a_schedulers() -> None:
    event = scheduled_event(0)
    assert event["source"] == "aws.scheduler"
    assert event["detail-type"] == "Scheduled Event"
    assert event["time"] == "1970-01-01T00:00:00Z"
    assert {"version", "id", "account", "region", "resources", "detail"} <= set(event)


def test_the_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="interval_s"):
        Schedule(lambda event, context: {}, interval_s=0)
