"""What can be known of an ended job from outside: its output, its history, its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from baton.contract.checkpoints import CheckpointView
from baton.contract.history import AttemptView, EventType, EventView
from baton.contract.jobs import JobView
from baton.contract.output import LogLine
from baton.contract.rules import presets
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient

LINES_PER_PAGE = 1000


@dataclass(frozen=True)
class Trained:
    """A step, as attempt `epoch` printed it. `batch` counts from 1."""

    epoch: int
    step: int
    loss: float
    lr: float
    batch: int


@dataclass(frozen=True)
class Firing:
    """A rule that fired."""

    rule: str
    step: int
    operands: dict[str, Any]

    @property
    def because(self) -> str:
        """`mean(loss, 10) = 757`: the operand that says most, the longest expression that has a number."""
        numbers = {text: value for text, value in self.operands.items() if isinstance(value, int | float)}
        if not numbers:
            return ", ".join(f"{text} = {value}" for text, value in self.operands.items())
        text = max(numbers, key=len)
        return f"{text} = {numbers[text]:.3g}"


@dataclass(frozen=True)
class Account:
    """Of one job."""

    job: JobView
    attempts: list[AttemptView]
    events: list[EventView]
    steps: list[Trained]
    checkpoints: list[CheckpointView]

    @property
    def last_step(self) -> int:
        """That was trained."""
        return max((one.step for one in self.steps), default=0)

    @property
    def epochs(self) -> list[int]:
        """Attempts that trained."""
        return sorted({one.epoch for one in self.steps})

    @property
    def firings(self) -> list[Firing]:
        """Of the job's own rules, in their order."""
        return [
            Firing(str(data["rule"]), int(data["step"]), dict(data.get("operands") or {}))
            for data in self.told(EventType.RULE_FIRED)
            if data["rule"] not in presets.NAMES
        ]

    @property
    def productive_s(self) -> float:
        """Training of new steps, in seconds, as the workers measured it."""
        return sum(one.progress.goodput.productive_s for one in self.attempts if one.progress and one.progress.goodput)

    def told(self, kind: EventType) -> list[dict[str, Any]]:
        """What the history says of that kind."""
        return [event.data for event in self.events if event.type is kind]

    def of_attempt(self, epoch: int) -> list[Trained]:
        """What that attempt trained."""
        return [one for one in self.steps if one.epoch == epoch]


def ask(client: BatonClient, job_id: str) -> Account:
    """Everything about a job that has ended. Raises BatonError."""
    history = pages(lambda cursor: client.events(job_id, limit=1000, cursor=cursor))
    lines: list[LogLine] = []
    cursor: str | None = None
    while (page := client.logs(job_id, limit=LINES_PER_PAGE, cursor=cursor)).lines:
        lines += page.lines
        cursor = page.next_cursor
    return Account(
        job=client.get_job(job_id),
        attempts=client.attempts(job_id).attempts,
        events=[event for one in history for event in one.events],
        steps=steps_of(lines),
        checkpoints=client.checkpoints(job_id).checkpoints,
    )


def steps_of(lines: Iterable[LogLine]) -> list[Trained]:
    """The steps among what was printed, in its order."""
    found = []
    for line in lines:
        if line.text.startswith('{"step":'):
            said = json.loads(line.text)
            found.append(Trained(line.epoch, said["step"], said["loss"], said["lr"], said["batch"]))
    return found
