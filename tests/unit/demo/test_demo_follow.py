"""Watching a job: the curve, the waits and their deadlines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from demo.follow import Curve, Follower, Point, ended, equal_losses, step_of

from baton.contract.checkpoints import CheckpointView
from baton.contract.history import AttemptPage, AttemptView
from baton.contract.jobs import AttemptEnd, Progress, Reason
from demo.failure import DemoError
from demo.processes import Child
from gpu_client.transport.api.client import BatonClient


def attempt(epoch: int, step: int | None = None, loss: float = 0.5, **more: Any) -> AttemptView:
    progress = None if step is None else Progress(step=step, metrics={"loss": loss})
    return AttemptView(epoch=epoch, started_at=1, progress=progress, **more)


class Api:
    """Answers the question for attempts from a list; the last answer stays."""

    def __init__(self, *answers: list[AttemptView]) -> None:
        self._answers = list(answers)
        self.asked = 0

    def attempts(self, job_id: str) -> AttemptPage:
        assert job_id == "job"
        self.asked += 1
        return AttemptPage(attempts=self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])


class Worker:
    """A worker that has left with `exit_code`, or runs."""

    name = "worker-9"
    log = Path("worker-9.log")

    def __init__(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code


class Time:
    """A clock that only sleeping moves."""

    now = 0.0

    def sleep(self, delay_s: float) -> None:
        self.now += delay_s


def follow(api: Api, time: Time) -> Follower:
    return Follower(cast(BatonClient, api), "job", clock=lambda: time.now, sleep=time.sleep)


def wait_for_step(follower: Follower, step: int, worker: Worker | None = None) -> list[AttemptView]:
    return follower.until(
        lambda attempts: (step_of(attempts, 1) or 0) >= step,
        deadline_s=10.0,
        what="the step",
        worker=cast(Child, worker or Worker()),
    )


def test_waiting_ends_with_the_first_answer_that_satisfies() -> None:
    api = Api([], [attempt(1)], [attempt(1, 10)], [attempt(1, 20)], [attempt(1, 30)])
    follower = follow(api, Time())
    assert step_of(wait_for_step(follower, 20), 1) == 20
    assert api.asked == 4
    assert [point.step for point in follower.curve.points] == [10, 20]


def test_waiting_has_a_deadline() -> None:
    time = Time()
    with pytest.raises(DemoError, match="the step took more than 10 s") as failure:
        wait_for_step(follow(Api([attempt(1, 5)]), time), 20)
    assert 10 < time.now < 11
    assert failure.value.log == Worker.log


def test_a_worker_that_leaves_early_ends_the_wait_at_once() -> None:
    api = Api([attempt(1, 5)])
    with pytest.raises(DemoError, match="worker-9 left before its work was done, with exit code -9"):
        wait_for_step(follow(api, Time()), 20, Worker(-9))
    assert api.asked == 1


def test_a_worker_that_left_because_all_is_done_is_no_failure() -> None:
    assert wait_for_step(follow(Api([attempt(1, 20)]), Time()), 20, Worker(0))


def test_a_failed_attempt_ends_the_wait_with_its_reason_and_last_words() -> None:
    failed = attempt(
        1,
        5,
        end=AttemptEnd.FAILED,
        reason=Reason(code="script_error", message="exit code 1"),
        log_tail=["ValueError: x"],
    )
    with pytest.raises(DemoError, match=r"attempt 1 ended as failed: exit code 1\nValueError: x"):
        wait_for_step(follow(Api([failed]), Time()), 20)


def test_an_interrupted_attempt_is_what_the_demo_waits_through() -> None:
    interrupted = attempt(1, 5, end=AttemptEnd.INTERRUPTED)
    follower = follow(Api([interrupted], [interrupted, attempt(2)], [interrupted, attempt(2, 3)]), Time())
    attempts = follower.until(
        lambda found: step_of(found, 2) is not None, deadline_s=10, what="x", worker=cast(Child, Worker())
    )
    assert step_of(attempts, 2) == 3
    assert not ended(attempts, 1)


def test_a_job_has_ended_when_this_attempt_completed_it() -> None:
    attempts = [attempt(1, end=AttemptEnd.INTERRUPTED), attempt(2, end=AttemptEnd.COMPLETE)]
    assert ended(attempts, 2)
    assert not ended(attempts, 1)
    assert not ended(attempts, 3)


def test_the_curve_keeps_each_attempts_own_loss_of_a_repeated_step() -> None:
    curve = Curve()
    curve.add_attempts([attempt(1, 20, 0.4)])
    curve.add_attempts([attempt(1, 20, 0.4), attempt(2, 10, 0.6)])
    curve.add_attempts([attempt(1, 20, 0.4), attempt(2, 20, 0.3), attempt(3)])
    curve.add_checkpoints([_checkpoint(1, 5, {"loss": 0.9}), _checkpoint(2, 15, {})])
    assert curve.points == [Point(1, 5, 0.9), Point(1, 20, 0.4), Point(2, 10, 0.6), Point(2, 20, 0.3)]


def test_losses_are_compared_at_common_steps_only() -> None:
    mine = [Point(1, 1, 0.9), Point(1, 2, 0.5), Point(2, 2, 0.5), Point(2, 3, 0.4), Point(2, 4, 0.2)]
    other = [Point(1, 2, 0.5), Point(1, 3, 0.4), Point(1, 5, 0.1)]
    assert equal_losses(mine, other) == (2, 2)
    assert equal_losses([*mine, Point(3, 3, 0.40000001)], other) == (1, 2)
    assert equal_losses([], other) == (0, 0)


def _checkpoint(epoch: int, step: int, metrics: dict[str, float]) -> CheckpointView:
    return CheckpointView(
        step=step,
        epoch=epoch,
        committed_at=1,
        num_files=1,
        total_bytes=1,
        metrics=metrics,
        manifest_key="m",
        current=True,
    )
