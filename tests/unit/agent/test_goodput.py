"""Test the division of an attempt's time, on a clock that the test moves."""

from __future__ import annotations

import pytest

from baton.contract.jobs.goodput import Goodput
from gpu_client.agent.attempt.goodput import Activity, GoodputMeter
from tests.kits.clock import Clock


def seconds(found: Goodput) -> dict[str, float]:
    names = ("productive_s", "repeated_s", "stalled_s", "transferring_s", "idle_s")
    return {name: value for name in names if (value := getattr(found, name))}


def meter(last_step: int | None = None) -> tuple[GoodputMeter, Clock]:
    clock = Clock()
    return GoodputMeter(last_step, clock), clock


def test_each_second_is_counted_once() -> None:
    times, clock = meter(last_step=110)
    clock.now += 1
    times.enter(Activity.TRANSFERRING)
    clock.now += 20
    times.enter(Activity.TRAINING)
    clock.now += 7  # imports
    times.record_step(100)
    clock.now += 10
    times.record_step(110)
    clock.now += 30
    times.record_step(140)
    times.enter(Activity.TRANSFERRING)
    clock.now += 5
    times.enter(Activity.IDLE)
    clock.now += 2
    assert seconds(times.report()) == {
        "productive_s": 30.0,
        "repeated_s": 10.0,
        "transferring_s": 25.0,
        "idle_s": 1.0 + 7 + 2,
    }


def test_a_report_that_spans_the_last_known_step_is_split() -> None:
    times, clock = meter(last_step=104)
    times.enter(Activity.TRAINING)
    times.record_step(100)
    clock.now += 10
    times.record_step(110)
    assert seconds(times.report()) == {"productive_s": 6.0, "repeated_s": 4.0}


def test_time_without_a_new_step_belongs_to_the_step_under_way() -> None:
    times, clock = meter(last_step=101)
    times.enter(Activity.TRAINING)
    times.record_step(100)
    clock.now += 3
    assert seconds(times.report()) == {"repeated_s": 3.0}
    times.record_step(101)
    clock.now += 4
    assert seconds(times.report()) == {"repeated_s": 3.0, "productive_s": 4.0}


def test_a_stall_is_taken_out_of_the_training() -> None:
    times, clock = meter()
    times.enter(Activity.TRAINING)
    times.record_step(0)
    clock.now += 10
    times.record_stall(2.5)
    times.record_step(10)
    clock.now += 1
    assert seconds(times.report()) == {"productive_s": 8.5, "stalled_s": 2.5}


def test_a_stall_longer_than_what_is_known_of_the_training_is_taken_out_later() -> None:
    times, clock = meter()
    times.enter(Activity.TRAINING)
    times.record_step(0)
    times.record_stall(2)
    clock.now += 1
    assert seconds(times.report()) == {"stalled_s": 1.0}
    clock.now += 3
    assert seconds(times.report()) == {"stalled_s": 2.0, "productive_s": 2.0}


@pytest.mark.parametrize("steps", [(5, 3), (5, 5)])
def test_steps_that_do_not_rise_are_no_error(steps: tuple[int, int]) -> None:
    times, clock = meter()
    times.enter(Activity.TRAINING)
    for step in steps:
        times.record_step(step)
        clock.now += 1
    assert seconds(times.report()) == {"productive_s": 2.0}


def test_what_checkpoints_weighed() -> None:
    times, _ = meter()
    times.record_commit(step=1, raw_bytes=100, reused_bytes=90, encoded_bytes=7, uploaded_bytes=4)
    times.record_commit(step=2, raw_bytes=100, reused_bytes=0, encoded_bytes=80, uploaded_bytes=80)
    times.record_skip()
    found = times.report()
    assert (found.checkpoints_committed, found.checkpoints_skipped) == (2, 1)
    assert (found.raw_bytes, found.reused_bytes, found.encoded_bytes, found.uploaded_bytes) == (200, 90, 87, 84)


NOTHING = {"raw_bytes": 0, "reused_bytes": 0, "encoded_bytes": 0, "uploaded_bytes": 0}


def test_a_script_that_reports_no_steps_has_used_the_time_up_to_its_commits() -> None:
    """The time up to a commit is productive for a script that reports no steps; its goodput was always 0 %."""
    times, clock = meter(last_step=100)
    times.enter(Activity.TRANSFERRING)
    clock.now += 4
    times.enter(Activity.TRAINING)
    clock.now += 20
    times.record_commit(step=100, **NOTHING)
    clock.now += 30
    assert seconds(times.report()) == {"repeated_s": 20.0, "transferring_s": 4.0, "idle_s": 30.0}
    clock.now += 5
    times.record_commit(step=200, **NOTHING)
    clock.now += 7
    times.enter(Activity.TRANSFERRING)
    assert seconds(times.report()) == {
        "productive_s": 35.0,
        "repeated_s": 20.0,
        "transferring_s": 4.0,
        "idle_s": 7.0,
    }
    times.record_commit(step=300, **NOTHING)
    assert seconds(times.report())["productive_s"] == 42.0, "stored behind its end"


def test_commits_add_nothing_to_a_training_that_reports_its_steps() -> None:
    times, clock = meter()
    times.enter(Activity.TRAINING)
    clock.now += 9  # imports
    times.record_step(0)
    clock.now += 10
    times.record_commit(step=5, **NOTHING)
    times.enter(Activity.TRANSFERRING)
    times.record_commit(step=10, **NOTHING)
    assert seconds(times.report()) == {"productive_s": 10.0, "idle_s": 9.0}
