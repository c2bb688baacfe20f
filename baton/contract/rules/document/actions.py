"""Actions of rules: a closed set, each with its parameters. The host that evaluates the rules executes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from baton.contract.rules.language.messages import Message


@dataclass(frozen=True, slots=True)
class Stop:
    """End the training; the job gets `outcome`."""

    outcome: Literal["complete", "failed"] = "complete"
    save: bool = True


@dataclass(frozen=True, slots=True)
class Save:
    """Commit a checkpoint under a tag that retention keeps."""

    tag: str = ""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the model now."""


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line to the training's log."""

    text: Message


@dataclass(frozen=True, slots=True)
class Alert:
    """Publish an alert event."""

    text: Message


@dataclass(frozen=True, slots=True)
class Set:
    """Set a registered knob to a value, or multiply it by a factor, within bounds.

    A factor moves the knob in one direction: a knob that is outside its bounds already does not move back.
    """

    knob: str
    value: float | None = None
    factor: float | None = None
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class RollbackAction:
    """Restore a checkpoint, at most `budget` times in a job's life."""

    to: Literal["last", "best"] = "last"
    skip: int = 0
    """Batches to skip after the restore."""
    lr_factor: float = 1.0
    budget: int = 3


@dataclass(frozen=True, slots=True)
class SkipBatch:
    """Discard the gradients of this batch."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Commit a checkpoint and release the machine; the job waits until a user resumes it."""


@dataclass(frozen=True, slots=True)
class ProfileAction:
    """Profile the next `steps` steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class Requeue:
    """Return the job to the queue for another machine."""

    exclude_host: bool = True


MOST_JOBS = 16
"""Default upper bound of a group that a rule enlarges, so that its cost stays foreseeable."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Change the number of a group's jobs: copy the newest job, or cancel the newest jobs."""

    group: str
    delta: int
    least: int = 0
    """Jobs that a negative delta leaves."""
    most: int = MOST_JOBS
    """Unfinished jobs that a positive delta may reach."""


@dataclass(frozen=True, slots=True)
class HookAction:
    """Call the hook that the job's image registered under `name`."""

    name: str


Action: TypeAlias = (
    Stop
    | Save
    | Evaluate
    | Log
    | Alert
    | Set
    | RollbackAction
    | SkipBatch
    | Pause
    | ProfileAction
    | Requeue
    | Scale
    | HookAction
)
ACTIONS: Mapping[str, type[Action]] = {
    "stop": Stop,
    "save": Save,
    "evaluate": Evaluate,
    "log": Log,
    "alert": Alert,
    "set": Set,
    "rollback": RollbackAction,
    "skip_batch": SkipBatch,
    "pause": Pause,
    "profile": ProfileAction,
    "requeue": Requeue,
    "scale": Scale,
    "hook": HookAction,
}
NAMES: Mapping[type[Action], str] = {kind: name for name, kind in ACTIONS.items()}
