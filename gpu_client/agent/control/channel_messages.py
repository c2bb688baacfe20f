"""What a training process says, as the agent understands it: each line is checked, none is trusted."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.contract.base import MAX_STEP
from gpu_client.checkpoints.local.sanitizer import sanitize_metrics, sanitize_readings

MAX_POINTS_IN_A_MESSAGE = 65
"""The newest, and of each metric that it has not an earlier one."""
_STEERING = frozenset(("rules_in_force", "rule_statuses", "decision", "command_result", "leaving", "quarantined"))


@dataclass(frozen=True, slots=True)
class Hello:
    """A training process has connected."""

    pid: int
    protocol: int
    steering: bool = False
    """It goes by rules and commands."""


@dataclass(frozen=True, slots=True)
class Point:
    """What the training reported at a step; what is not finite is said in words."""

    step: int
    metrics: dict[str, float | str]


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far the training is. Metrics that are not finite numbers are in `nonfinite`, in words."""

    step: int
    total: int | None
    metrics: dict[str, float]
    phase: tuple[str, int] | None = None
    """What it does between two steps, if it says so, and how much of that is done."""
    nonfinite: dict[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = field(default=(), compare=False)
    """What is new, by steps."""
    signals: dict[str, float] = field(default_factory=dict, compare=False)
    """What the session has measured by itself: mean times of the steps since the message before, in seconds."""


@dataclass(frozen=True, slots=True)
class CheckpointNotice:
    """The session has completed a checkpoint directory."""

    step: int
    path: Path
    metrics: dict[str, float]
    stall_s: float | None = None
    """How long the training stood still for it, if it says so."""


@dataclass(frozen=True, slots=True)
class ArtifactNotice:
    """The training has finished a file that may be shown before the end."""

    path: Path


@dataclass(frozen=True, slots=True)
class SteeringNotice:
    """What the training says of rules and commands, and of damage; whoever uses it checks what is in it."""

    message: dict[str, Any]


class ProtocolError(Exception):
    """A line that is not understood; the text says why. ``kind`` is the counter."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def parse(
    line: bytes, places: Sequence[Path]
) -> Hello | TrainingProgress | CheckpointNotice | ArtifactNotice | SteeringNotice:
    """A line of a training process; paths have to lie in one of `places`, the first is the output directory.

    Raises ProtocolError.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("malformed", f"not JSON: {line[:80]!r}: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("malformed", f"not an object: {line[:80]!r}")
    kind = message.get("type")
    if kind == "hello":
        return Hello(_integer(message, "pid"), _integer(message, "protocol"), message.get("steering") is True)
    if kind == "progress":
        return _progress_of(message)
    if kind == "checkpoint":
        return CheckpointNotice(
            _integer(message, "step"),
            _path_inside(message, places, "checkpoint"),
            sanitize_metrics(message.get("metrics")),
            sanitize_metrics({"stall_s": message.get("stall_s")}).get("stall_s"),
        )
    if kind == "artifact":
        return ArtifactNotice(_path_inside(message, places[:1], "artifact"))
    if isinstance(kind, str) and kind in _STEERING:
        return SteeringNotice(message)
    raise ProtocolError("malformed", f"unknown type {str(kind)[:40]!r}")


def _progress_of(message: dict[str, Any]) -> TrainingProgress:
    step = _integer(message, "step")
    total = None if message.get("total") is None else _integer(message, "total")
    metrics = sanitize_metrics(message.get("metrics"))
    said = sanitize_readings(message.get("nonfinite"))
    nonfinite = {name: value for name, value in said.items() if isinstance(value, str)}
    phase = _phase_of(message)
    points: tuple[Point, ...] = ()
    if isinstance(message.get("points"), list):
        whole = [one for one in message["points"][:MAX_POINTS_IN_A_MESSAGE] if isinstance(one, dict)]
        points = tuple(Point(_integer(one, "step"), sanitize_readings(one.get("metrics"))) for one in whole)
    elif phase is None:
        points = (Point(step, sanitize_readings({**metrics, **nonfinite})),)
    return TrainingProgress(step, total, metrics, phase, nonfinite, points, sanitize_metrics(message.get("signals")))


def _integer(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STEP:
        raise ProtocolError("invalid", f"{name} must be an integer from 0 to {MAX_STEP}, got {str(value)[:40]!r}")
    return value


def _phase_of(message: dict[str, Any]) -> tuple[str, int] | None:
    phase = message.get("phase")
    if phase is None:
        return None
    if not isinstance(phase, dict) or not isinstance(phase.get("name"), str):
        raise ProtocolError("invalid", f"a phase has a name, got {str(phase)[:80]!r}")
    return phase["name"], _integer(phase, "done")


def _path_inside(message: dict[str, Any], places: Sequence[Path], what: str) -> Path:
    value = message.get("path")
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ProtocolError("invalid", f"path must be absolute, got {str(value)[:80]!r}")
    try:
        path = Path(value).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ProtocolError("invalid", f"path {value[:80]!r}: {error}") from error
    if not any(place in path.parents for place in places):
        raise ProtocolError("invalid", f"{what} {value[:80]!r} is not inside the output directory")
    return path
