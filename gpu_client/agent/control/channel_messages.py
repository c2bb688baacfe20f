"""Check and parse the messages of an untrusted training process, line by line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.contract.base import MAX_STEP
from gpu_client.checkpoints.local.sanitizer import sanitize_metrics, sanitize_readings

MAX_POINTS_IN_A_MESSAGE = 65
"""Points in a message: the newest point, and an earlier point for each metric that the newest point lacks."""
_STEERING = frozenset(("rules_in_force", "rule_statuses", "decision", "command_result", "leaving", "quarantined"))


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a training process."""

    pid: int
    protocol: int
    steering: bool = False
    """True if the process follows rules and commands."""


@dataclass(frozen=True, slots=True)
class Point:
    """Values reported at a step; NaN and infinities are words."""

    step: int
    metrics: dict[str, float | str]


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of the training. `nonfinite` contains NaN and infinite metrics, as words."""

    step: int
    total: int | None
    metrics: dict[str, float]
    phase: tuple[str, int] | None = None
    """Name and done amount of work between two steps, such as an evaluation; None during the steps."""
    nonfinite: dict[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = field(default=(), compare=False)
    """New values, ordered by step."""
    signals: dict[str, float] = field(default_factory=dict, compare=False)
    """Values that the session measures: mean times of the steps since the last message, in seconds."""


@dataclass(frozen=True, slots=True)
class CheckpointNotice:
    """Notice that the session has completed a checkpoint directory."""

    step: int
    path: Path
    metrics: dict[str, float]
    stall_s: float | None = None
    """Stall of the training in seconds; None if unknown."""


@dataclass(frozen=True, slots=True)
class ArtifactNotice:
    """Notice that the training has finished a file, which the user may see before the end of the training."""

    path: Path


@dataclass(frozen=True, slots=True)
class SteeringNotice:
    """Message on rules, commands or damaged ring objects; the consumer checks its fields."""

    message: dict[str, Any]


class ProtocolError(Exception):
    """Error of an invalid line; the text is the reason, ``kind`` the counter."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def parse(
    line: bytes, places: Sequence[Path]
) -> Hello | TrainingProgress | CheckpointNotice | ArtifactNotice | SteeringNotice:
    """Parse a line of a training process. Paths must lie in one of `places`; the first is the output directory.

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
        return Hello(
            _parse_integer(message, "pid"), _parse_integer(message, "protocol"), message.get("steering") is True
        )
    if kind == "progress":
        return _parse_progress(message)
    if kind == "checkpoint":
        return CheckpointNotice(
            _parse_integer(message, "step"),
            _parse_path(message, places, "checkpoint"),
            sanitize_metrics(message.get("metrics")),
            sanitize_metrics({"stall_s": message.get("stall_s")}).get("stall_s"),
        )
    if kind == "artifact":
        return ArtifactNotice(_parse_path(message, places[:1], "artifact"))
    if isinstance(kind, str) and kind in _STEERING:
        return SteeringNotice(message)
    raise ProtocolError("malformed", f"unknown type {str(kind)[:40]!r}")


def _parse_progress(message: dict[str, Any]) -> TrainingProgress:
    step = _parse_integer(message, "step")
    total = None if message.get("total") is None else _parse_integer(message, "total")
    metrics = sanitize_metrics(message.get("metrics"))
    readings = sanitize_readings(message.get("nonfinite"))
    nonfinite = {name: value for name, value in readings.items() if isinstance(value, str)}
    phase = _parse_phase(message)
    points: tuple[Point, ...] = ()
    if isinstance(message.get("points"), list):
        whole = [one for one in message["points"][:MAX_POINTS_IN_A_MESSAGE] if isinstance(one, dict)]
        points = tuple(Point(_parse_integer(one, "step"), sanitize_readings(one.get("metrics"))) for one in whole)
    elif phase is None:
        points = (Point(step, sanitize_readings({**metrics, **nonfinite})),)
    return TrainingProgress(step, total, metrics, phase, nonfinite, points, sanitize_metrics(message.get("signals")))


def _parse_integer(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STEP:
        raise ProtocolError("invalid", f"{name} must be an integer from 0 to {MAX_STEP}, got {str(value)[:40]!r}")
    return value


def _parse_phase(message: dict[str, Any]) -> tuple[str, int] | None:
    phase = message.get("phase")
    if phase is None:
        return None
    if not isinstance(phase, dict) or not isinstance(phase.get("name"), str):
        raise ProtocolError("invalid", f"a phase has a name, got {str(phase)[:80]!r}")
    return phase["name"], _parse_integer(phase, "done")


def _parse_path(message: dict[str, Any], places: Sequence[Path], kind: str) -> Path:
    value = message.get("path")
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ProtocolError("invalid", f"path must be absolute, got {str(value)[:80]!r}")
    try:
        path = Path(value).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ProtocolError("invalid", f"path {value[:80]!r}: {error}") from error
    if not any(place in path.parents for place in places):
        raise ProtocolError("invalid", f"{kind} {value[:80]!r} is not inside the output directory")
    return path
