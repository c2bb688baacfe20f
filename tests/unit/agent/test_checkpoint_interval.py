"""Test the interval between checkpoints and the time for a last one."""

from __future__ import annotations

import math

import pytest

from gpu_client.agent.attempt.checkpoint_scheduler import (
    FIRST_INTERVAL_S,
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    PRIOR_MTBF_S,
    SAFETY,
    CheckpointTimes,
    best_interval_s,
    expected_time_between_interruptions_s,
)


def lost_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the first-order cost of checkpoints and repeated steps, which Daly's interval minimizes."""
    return cost_s / (interval_s + cost_s) + (interval_s / 2 + cost_s) / mtbf_s


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(1.3, 6 * 3600), (5, 1800), (30, 7200), (2, 600)])
def test_no_other_interval_loses_noticeably_less(cost_s: float, mtbf_s: float) -> None:
    best = best_interval_s(cost_s, mtbf_s, durable_s=0)
    assert MIN_INTERVAL_S < best < MAX_INTERVAL_S
    others = (lost_share(best * factor, cost_s, mtbf_s) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))
    assert lost_share(best, cost_s, mtbf_s) <= min(others)


def test_never_more_often_than_checkpoints_can_be_stored() -> None:
    assert best_interval_s(0.01, 600, durable_s=0) == MIN_INTERVAL_S
    assert best_interval_s(0.01, 600, durable_s=90) == 90
    assert best_interval_s(3000, 10**7, durable_s=0) == MAX_INTERVAL_S


def test_a_job_that_is_interrupted_often_is_saved_more_often() -> None:
    calm = expected_time_between_interruptions_s(36_000, 0)
    rough = expected_time_between_interruptions_s(36_000, 20)
    assert expected_time_between_interruptions_s(0, 0) == PRIOR_MTBF_S
    assert rough == pytest.approx((36_000 + PRIOR_MTBF_S) / 21)
    times = CheckpointTimes()
    times.record_stall(2)
    times.record_upload(10)
    often = times.interval_s(runtime_s=36_000, interruptions=20)
    assert often == pytest.approx(math.sqrt(2 * 2 * rough) - 2)
    assert often < times.interval_s(runtime_s=36_000, interruptions=0) == pytest.approx(math.sqrt(2 * 2 * calm) - 2)


def test_before_anything_is_measured() -> None:
    times = CheckpointTimes()
    assert times.interval_s(runtime_s=0, interruptions=0) == FIRST_INTERVAL_S
    assert times.last_checkpoint_s() is None


def test_a_script_that_does_not_tell_its_stall() -> None:
    times = CheckpointTimes()
    times.record_upload(8)
    assert times.interval_s(runtime_s=0, interruptions=0) == pytest.approx(math.sqrt(2 * 8 * PRIOR_MTBF_S) - 8)


def test_a_last_checkpoint_takes_as_long_as_the_worst_of_the_last_ones() -> None:
    times = CheckpointTimes()
    for took_s in (100, *[4] * 7, 6):
        times.record_upload(took_s)
    times.record_stall(1)
    assert times.last_checkpoint_s() == pytest.approx(SAFETY * 7)
