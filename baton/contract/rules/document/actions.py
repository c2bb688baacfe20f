"""What a rule can do: a closed set, each with its own parameters. Doing it is up to who evaluates the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from baton.contract.rules.language.messages import Message


@dataclass(frozen=True, slots=True)
class Stop:
    """End the training. `outcome`: what the job is then."""

    outcome: Literal["complete", "failed"] = "complete"
    save: bool = True


@dataclass(frozen=True, slots=True)
class Save:
    """Commit a checkpoint, under a name that retention keeps."""

    tag: str = ""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate now."""


@dataclass(frozen=True, slots=True)
class Log:
    """A line in the training's log."""

    text: Message


@dataclass(frozen=True, slots=True)
class Alert:
    """An event that people are told of."""

    text: Message


@dataclass(frozen=True, slots=True)
class Set:
    """Change a knob that the training registered: to a value, or by a factor, and then into the bounds.

    A factor turns it one way only: a knob beyond a bound already is not turned back to it.
    """

    knob: str
    value: float | None = None
    factor: float | None = None
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """Go back to a checkpoint, at most `budget` times in a job's life."""

    to: Literal["last", "best"] = "last"
    skip: int = 0
    """Batches that are passed over afterwards."""
    lr_factor: float = 1.0
    budget: int = 3


@dataclass(frozen=True, slots=True)
class SkipBatch:
    """Do not apply the gradients of this batch."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Commit a checkpoint and give the machine back; the job waits until somebody resumes it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile so many steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class Requeue:
    """Give the job to another machine."""

    exclude_host: bool = True


MOST_JOBS = 16
"""Of a group that a rule adds to, unless it says more: nobody wants to be surprised by a bill."""


@dataclass(frozen=True, slots=True)
class Scale:
    """More or fewer jobs of a group: copies of its newest one, or its newest ones taken out."""

    group: str
    delta: int
    least: int = 0
    """Jobs that are left by a delta below 0."""
    most: int = MOST_JOBS
    """Jobs that have not ended, behind a delta above 0."""


@dataclass(frozen=True, slots=True)
class Hook:
    """Call what the job's image registered under that name."""

    name: str


Action: TypeAlias = (
    Stop | Save | Evaluate | Log | Alert | Set | Rollback | SkipBatch | Pause | Profile | Requeue | Scale | Hook
)
ACTIONS: Mapping[str, type[Action]] = {
    "stop": Stop,
    "save": Save,
    "evaluate": Evaluate,
    "log": Log,
    "alert": Alert,
    "set": Set,
    "rollback": Rollback,
    "skip_batch": SkipBatch,
    "pause": Pause,
    "profile": Profile,
    "requeue": Requeue,
    "scale": Scale,
    "hook": Hook,
}
NAMES: Mapping[type[Action], str] = {kind: name for name, kind in ACTIONS.items()}
