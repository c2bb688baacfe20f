"""Wait for a job, and read what the API knows about it, as any user could."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.contract.jobs.history import AttemptView, EventType, EventView
from baton.contract.jobs.job import JobState, JobView
from baton.contract.worker.output import LogLine
from demo.failure import DemoError
from demo.processes import Child
from demo.screen import Phase
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient

POLL_S = 0.4


@dataclass(frozen=True)
class TrainedStep:
    """The metrics that attempt `epoch` reported at a step."""

    epoch: int
    step: int
    metrics: Mapping[str, float]

    @property
    def loss(self) -> float:
        """Return the loss of the batch."""
        return self.metrics["loss"]


@dataclass(frozen=True)
class JobStatus:
    """A job and its attempts at one moment."""

    job: JobView
    attempts: list[AttemptView]

    def step(self, epoch: int) -> int:
        """Return the newest step that attempt `epoch` reported; 0 before its first report."""
        return next((one.progress.step for one in self.attempts if one.epoch == epoch and one.progress), 0)


@dataclass(frozen=True)
class JobRecord:
    """A job that has ended, with its history and the steps that reported a loss."""

    job: JobView
    attempts: list[AttemptView]
    events: list[EventView]
    steps: list[TrainedStep]

    @property
    def last_step(self) -> int:
        """Return the highest step that was trained."""
        return max((one.step for one in self.steps), default=0)

    @property
    def epochs(self) -> list[int]:
        """Return the attempts that trained."""
        return sorted({one.epoch for one in self.steps})

    def of_attempt(self, epoch: int) -> list[TrainedStep]:
        """Return the steps of one attempt."""
        return [one for one in self.steps if one.epoch == epoch]

    def event_data(self, kind: EventType) -> list[dict[str, Any]]:
        """Return the data of all events of a kind."""
        return [event.data for event in self.events if event.type is kind]


def read_record(client: BatonClient, job_id: str) -> JobRecord:
    """Read everything about a job that has ended. Raises BatonError.

    Reported metrics are a sample of the steps; a training that prints each step as JSON has all of them here.
    """
    attempts = client.attempts(job_id).attempts
    # A killed worker cannot send its last points, but its last heartbeat has the newest one.
    reported = [(one.epoch, one.progress.step, one.progress.metrics) for one in attempts if one.progress]
    reported += [(one.epoch, one.step, one.numbers()) for one in client.metric_points(job_id)]
    reported += printed_steps(_log_lines(client, job_id))
    steps = {(epoch, step): TrainedStep(epoch, step, values) for epoch, step, values in reported if "loss" in values}
    history = pages(lambda cursor: client.events(job_id, limit=1000, cursor=cursor))
    return JobRecord(
        job=client.get_job(job_id),
        attempts=attempts,
        events=[event for page in history for event in page.events],
        steps=[steps[key] for key in sorted(steps)],
    )


def printed_steps(lines: Iterable[LogLine]) -> list[tuple[int, int, dict[str, float]]]:
    """Return attempt, step and metrics of each line `{"step": 3, "loss": 0.5, ...}` among the printed ones."""
    printed = [(line.epoch, json.loads(line.text)) for line in lines if line.text.startswith('{"step":')]
    return [(epoch, values.pop("step"), values) for epoch, values in printed]


def _log_lines(client: BatonClient, job_id: str) -> Iterator[LogLine]:
    cursor: str | None = None
    # The log may always grow, therefore an empty page is its end, not a missing cursor.
    while (page := client.logs(job_id, limit=1000, cursor=cursor)).lines:
        yield from page.lines
        cursor = page.next_cursor


class JobWatch:
    """Waits for a job that `worker` trains, and shows its progress in `phase`."""

    def __init__(
        self,
        client: BatonClient,
        job_id: str,
        worker: Child,
        phase: Phase,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._job_id, self._worker, self._phase = client, job_id, worker, phase
        self._clock, self._sleep = clock, sleep

    def until(self, condition: Callable[[JobStatus], bool], event: str, deadline_s: float) -> JobStatus:
        """Poll until `condition` holds.

        Raises DemoError after `deadline_s` without a new step, or if the job ends or the worker leaves before.
        """
        last_step, deadline = None, self._clock() + deadline_s
        while True:
            # Read before the job: a worker may finish the job and leave between the two calls.
            exit_code = self._worker.exit_code
            job = self._client.get_job(self._job_id)
            status = JobStatus(job, self._client.attempts(self._job_id).attempts)
            self._show(status)
            if condition(status):
                return status
            reason = job.reason.message or job.reason.code if job.reason else "no reason given"
            if job.state.terminal:
                raise DemoError(f"the job is {job.state}, before {event}: {reason}", self._worker.log)
            if exit_code is not None:
                name, log = self._worker.name, self._worker.log
                raise DemoError(f"{name} left with exit code {exit_code}, before {event}: {reason}", log)
            step = [(attempt.epoch, attempt.progress.step) for attempt in status.attempts if attempt.progress][-1:]
            if step != last_step:
                last_step, deadline = step, self._clock() + deadline_s
            if self._clock() > deadline:
                busy = "the machine may be busy, then run the demo again"
                raise DemoError(f"no step for {deadline_s:.0f} s, before {event}; {busy}", self._worker.log)
            self._sleep(POLL_S)

    def until_end(self, expected: JobState, deadline_s: float) -> JobRecord:
        """Wait for the end of the job in state `expected`; returns its record."""
        self.until(lambda status: status.job.state is expected, f"its end as {expected}", deadline_s)
        record = read_record(self._client, self._job_id)
        if not record.steps:
            raise DemoError("the job has reported no steps", self._worker.log)
        return record

    def _show(self, status: JobStatus) -> None:
        progress = status.attempts[-1].progress if status.attempts else None
        if self._phase.total is not None and progress is not None:
            loss = progress.metrics.get("loss")
            self._phase.at(progress.step, f"step {progress.step}" + (f", loss {loss:.3g}" if loss is not None else ""))
