"""Watching a job from outside, as any user could: by asking for its attempts again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.contract.checkpoints import CheckpointView
from baton.contract.history import AttemptView
from baton.contract.jobs import AttemptEnd
from demo.failure import DemoError
from demo.processes import Child
from gpu_client.transport.api.client import BatonClient

POLL_S = 0.4


@dataclass(frozen=True)
class Point:
    """A loss that attempt `epoch` reported for `step`."""

    epoch: int
    step: int
    loss: float


class Curve:
    """Every loss seen so far, once each."""

    def __init__(self) -> None:
        self._losses: dict[tuple[int, int], float] = {}

    def add_attempts(self, attempts: Iterable[AttemptView]) -> None:
        """Take the newest progress of each attempt."""
        for attempt in attempts:
            if attempt.progress and "loss" in attempt.progress.metrics:
                self._losses[attempt.epoch, attempt.progress.step] = attempt.progress.metrics["loss"]

    def add_checkpoints(self, checkpoints: Iterable[CheckpointView]) -> None:
        """Take the loss that was stored with each checkpoint."""
        for checkpoint in checkpoints:
            if "loss" in checkpoint.metrics:
                self._losses[checkpoint.epoch, checkpoint.step] = checkpoint.metrics["loss"]

    @property
    def points(self) -> list[Point]:
        """By attempt, then by step."""
        return [Point(epoch, step, loss) for (epoch, step), loss in sorted(self._losses.items())]


Attempts = list[AttemptView]


class Follower:
    """Follows one job and remembers its losses."""

    def __init__(
        self,
        client: BatonClient,
        job_id: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._clock = clock
        self._sleep = sleep
        self.curve = Curve()

    def until(
        self,
        condition: Callable[[Attempts], bool],
        *,
        deadline_s: float,
        what: str,
        worker: Child,
        on_step: Callable[[Attempts], None] = lambda _: None,
    ) -> Attempts:
        """Poll until `condition` holds of the attempts; `on_step` sees every answer before that.

        Raises DemoError when `what` has not happened after `deadline_s`, an attempt failed, or the worker has left.
        """
        deadline = self._clock() + deadline_s
        while True:
            # Asked before the attempts are: a worker may finish between the two questions.
            left_with = worker.exit_code
            attempts = self.look()
            on_step(attempts)
            if condition(attempts):
                return attempts
            self._require_progress(attempts, worker, left_with)
            if self._clock() > deadline:
                raise DemoError(f"{what} took more than {deadline_s:.0f} s", worker.log)
            self._sleep(POLL_S)

    def look(self) -> Attempts:
        """All attempts so far, oldest first."""
        attempts = self._client.attempts(self._job_id).attempts
        self.curve.add_attempts(attempts)
        return attempts

    def look_back(self) -> list[CheckpointView]:
        """Every checkpoint of the job, newest first."""
        checkpoints = self._client.checkpoints(self._job_id).checkpoints
        self.curve.add_checkpoints(checkpoints)
        return checkpoints

    def _require_progress(self, attempts: Attempts, worker: Child, left_with: int | None) -> None:
        for attempt in attempts:
            if attempt.end in (AttemptEnd.FAILED, AttemptEnd.CANCELED, AttemptEnd.RELEASED):
                because = attempt.reason.message or attempt.reason.code if attempt.reason else "no reason given"
                tail = "\n".join(attempt.log_tail[-10:])
                raise DemoError(
                    f"attempt {attempt.epoch} ended as {attempt.end}: {because}\n{tail}".strip(), worker.log
                )
        if left_with is not None:
            raise DemoError(f"{worker.name} left before its work was done, with exit code {left_with}", worker.log)


def step_of(attempts: Attempts, epoch: int) -> int | None:
    """The newest step that attempt `epoch` reported; None before its first report."""
    for attempt in attempts:
        if attempt.epoch == epoch and attempt.progress:
            return attempt.progress.step
    return None


def equal_losses(points: Iterable[Point], others: Iterable[Point]) -> tuple[int, int]:
    """Of two runs of the same job: at how many steps both reported exactly the same loss, of how many both reported.

    A step that one run did twice counts once, and as equal only if it came out the same each time.
    """
    expected = {other.step: other.loss for other in others}
    equal: dict[int, bool] = {}
    for point in points:
        if point.step in expected:
            equal[point.step] = equal.get(point.step, True) and point.loss == expected[point.step]
    return sum(equal.values()), len(equal)


def ended(attempts: Attempts, epoch: int) -> bool:
    """Whether attempt `epoch` has completed the job."""
    return any(attempt.epoch == epoch and attempt.end is AttemptEnd.COMPLETE for attempt in attempts)
