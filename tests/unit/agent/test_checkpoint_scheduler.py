"""Test the requests for checkpoints, and for the last one."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from gpu_client.agent.attempt.checkpoint_scheduler import FIRST_INTERVAL_S, MIN_TRAINER_S, SAFETY, CheckpointScheduler
from gpu_client.agent.attempt.goodput import Activity
from gpu_client.checkpoints.save.checkpoint_commit import Committed
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import make_committed, make_item


def pace(**fields: Any) -> tuple[CheckpointScheduler, Clock]:
    clock = Clock()
    return CheckpointScheduler(make_item(**fields), clock), clock


def committed(step: int, seconds: float) -> Committed:
    return make_committed(step, Mock(), seconds=seconds)


def test_a_job_that_does_not_say_is_never_asked() -> None:
    at, clock = pace()
    at.record_step(1)
    clock.now += 10**6
    assert not at.is_due()


def test_every_so_many_seconds_of_training() -> None:
    at, clock = pace(checkpoint_every=60)
    clock.now += 1000
    assert not at.is_due(), "the training has not begun"
    at.record_step(1)
    clock.now += 59
    assert not at.is_due()
    clock.now += 1
    assert at.is_due()
    at.record_request()
    assert not at.is_due()
    clock.now += 2
    at.record_saved(0.5)
    clock.now += 59
    assert not at.is_due(), "counted from the checkpoint, not from the question"
    clock.now += 1
    assert at.is_due()


def test_a_training_that_does_not_answer_is_asked_again() -> None:
    at, clock = pace(checkpoint_every=60)
    at.record_step(1)
    clock.now += 60
    at.record_request()
    clock.now += 60
    assert at.is_due()


def test_by_itself_as_often_as_pays() -> None:
    at, clock = pace(checkpoint_every="auto", runtime_s=3600, interruptions=9)
    at.record_step(1)
    clock.now += FIRST_INTERVAL_S
    assert at.is_due()
    at.record_saved(2.0)
    at.record_commit(committed(10, 5.0))
    mtbf_s = (3600 + FIRST_INTERVAL_S + 6 * 3600) / 10
    interval_s = (2 * 2.0 * mtbf_s) ** 0.5 - 2
    clock.now += interval_s - 1
    assert not at.is_due()
    clock.now += 2
    assert at.is_due()


def test_a_last_checkpoint_is_only_begun_if_it_can_be_stored() -> None:
    at, _ = pace()
    assert at.last_checkpoint_problem(1.0) == "", "nothing is known: try"
    at.record_saved(1.0)
    at.record_commit(committed(10, 9.0))
    needed_s = SAFETY * 10
    assert at.last_checkpoint_problem(needed_s) == ""
    assert at.last_checkpoint_problem(needed_s - 1) == "a checkpoint takes about 13 s, and 12 s are left"


def test_the_trainer_leaves_time_for_storing() -> None:
    at, _ = pace()
    assert at.trainer_time_s(30) == 30
    at.record_commit(committed(10, 10.0))
    assert at.trainer_time_s(30) == pytest.approx(30 - SAFETY * 10)
    assert at.trainer_time_s(5) == MIN_TRAINER_S


def test_what_it_reports() -> None:
    at, clock = pace(last_step=5)
    clock.now += 1
    at.enter(Activity.TRANSFERRING)
    clock.now += 4
    at.enter(Activity.TRAINING)
    at.record_step(5)
    clock.now += 10
    at.record_saved(2.5)
    at.record_commit(committed(6, 3.0))
    at.record_skip()
    found = at.goodput()
    assert (found.idle_s, found.transferring_s, found.stalled_s, found.productive_s) == (1, 4, 2.5, 7.5)
    assert (found.checkpoints_committed, found.checkpoints_skipped) == (1, 1)
    assert (found.raw_bytes, found.reused_bytes, found.encoded_bytes, found.uploaded_bytes) == (100, 40, 50, 30)
    assert at.last_step == 6
