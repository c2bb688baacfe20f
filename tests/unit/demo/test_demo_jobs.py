"""Waiting for a job, its deadlines, and the record of an ended job."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.contract.jobs.history import AttemptPage, AttemptView, EventPage
from baton.contract.jobs.job import JobState, JobView, Progress, Reason
from baton.contract.worker.output import LogLine, LogPage, MetricPoint
from demo.failure import DemoError
from demo.jobs import JobStatus, JobWatch, read_record
from demo.processes import Child
from demo.screen import Phase
from gpu_client.transport.api.client import BatonClient
from tests.kits.clock import Clock
from tests.unit.cli.cli_kit import a_job


def attempt(epoch: int, step: int | None = None, loss: float = 0.5) -> AttemptView:
    progress = None if step is None else Progress(step=step, metrics={"loss": loss})
    return AttemptView(epoch=epoch, started_at=1, progress=progress)


class Api:
    """Answers with one status after the other; the last one stays."""

    def __init__(self, *statuses: JobStatus) -> None:
        self.statuses = list(statuses)
        self.asked = 0

    def get_job(self, job_id: str) -> JobView:
        self.asked += 1
        if self.asked > 1 and len(self.statuses) > 1:
            self.statuses.pop(0)
        return self.statuses[0].job

    def attempts(self, job_id: str) -> AttemptPage:
        return AttemptPage(attempts=self.statuses[0].attempts)


class Worker:
    name = "worker-9"
    log = Path("worker-9.log")

    def __init__(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code


def running(*attempts: AttemptView) -> JobStatus:
    return JobStatus(a_job(JobState.RUNNING), list(attempts))


def wait_for(api: Api, epoch: int, step: int, exit_code: int | None = None, time: Clock | None = None) -> list[str]:
    """Wait for a step; returns what the phase showed."""
    shown: list[str] = []
    time = time or Clock(0.0)
    phase = SimpleNamespace(total=30, at=lambda step, note: shown.append(note))
    worker = cast(Child, Worker(exit_code))
    watch = JobWatch(cast(BatonClient, api), "job", worker, cast(Phase, phase), clock=time, sleep=time.sleep)
    watch.until(lambda status: status.step(epoch) >= step, "the step", 10.0)
    return shown


def test_waiting_ends_with_the_first_answer_that_satisfies() -> None:
    interrupted = attempt(1, 15)
    api = Api(running(), running(attempt(1)), running(interrupted), running(interrupted, attempt(2, 20)), running())
    assert wait_for(api, 2, 20) == ["step 15, loss 0.5", "step 20, loss 0.5"]
    assert api.asked == 4


def test_waiting_has_a_deadline() -> None:
    time = Clock(0.0)
    with pytest.raises(DemoError, match="no step for 10 s, before the step; the machine may be busy") as failure:
        wait_for(Api(running(attempt(1, 5))), 1, 20, time=time)
    assert 10 < time.now < 11
    assert failure.value.log == Worker.log


def test_a_training_on_a_busy_machine_has_the_deadline_for_each_step() -> None:
    """At 20 trainings on 2 cores the demo gave up a training whose steps went on."""
    time = Clock(0.0)
    steps = [running(attempt(1, step)) for step in range(1, 21) for _ in range(10)]
    wait_for(Api(*steps), 1, 20, time=time)
    assert time.now > 20


def test_a_worker_that_leaves_early_ends_the_wait_at_once_with_the_reason() -> None:
    retried = a_job(JobState.PENDING, reason=Reason(code="script_error", message="exit code 1"))
    api = Api(JobStatus(retried, [attempt(1, 5)]))
    with pytest.raises(DemoError, match="worker-9 left with exit code -9, before the step: exit code 1"):
        wait_for(api, 1, 20, -9)
    assert api.asked == 1


def test_a_worker_that_left_because_all_is_done_is_no_failure() -> None:
    assert wait_for(Api(running(attempt(1, 20))), 1, 20, 0)


def test_a_job_that_ended_otherwise_ends_the_wait() -> None:
    with pytest.raises(DemoError, match="the job is failed, before the step: no reason given"):
        wait_for(Api(JobStatus(a_job(JobState.FAILED), [attempt(1, 5)])), 1, 20)


class Ended(Api):
    """The API of a job that has ended, after two attempts."""

    def __init__(self) -> None:
        super().__init__(JobStatus(a_job(JobState.COMPLETE), [attempt(1, 20, 0.4), attempt(2, 12, 0.6), attempt(3)]))

    def metric_points(self, job_id: str) -> list[MetricPoint]:
        points: list[tuple[int, int, Any]] = [
            (1, 10, {"loss": "nan"}), (2, 11, {"loss": 0.7}), (2, 11, {"eval.accuracy": 0.9}), (2, 12, {"loss": 0.6}),
        ]  # fmt: skip
        return [MetricPoint(epoch=epoch, step=step, at=1.0, metrics=metrics) for epoch, step, metrics in points]

    def logs(self, job_id: str, *, limit: int, cursor: str | None) -> LogPage:
        texts = (
            ["loading", '{"step": 12, "loss": 0.6, "batch": 52}', '{"step": 13, "loss": NaN, "batch": 53}']
            if cursor is None
            else []
        )
        lines = [LogLine(epoch=2, line=number, text=text, at=1) for number, text in enumerate(texts)]
        return LogPage(lines=lines, next_cursor="more")

    def events(self, job_id: str, *, limit: int, cursor: str | None) -> EventPage:
        return EventPage(events=[])


def test_the_record_joins_what_was_reported_and_printed_once_a_step() -> None:
    record = read_record(cast(BatonClient, Ended()), "job")
    assert [(one.epoch, one.step) for one in record.steps] == [(1, 10), (1, 20), (2, 11), (2, 12), (2, 13)]
    assert all(math.isnan(one.loss) for one in (record.steps[0], record.steps[-1]))
    assert [one.loss for one in record.steps[1:-1]] == [0.4, 0.7, 0.6]
    assert [one.metrics["batch"] for one in record.steps[-2:]] == [52, 53]
    assert (record.last_step, record.epochs) == (20, [1, 2])
