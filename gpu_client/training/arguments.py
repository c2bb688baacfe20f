"""What a session takes, and what it calls its own."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from pathlib import Path

from gpu_client.training.errors import CheckpointMismatchError, SessionError

STEERING = "steering"
"""Of a checkpoint's states the one that is the session's own: counters of rules, where there are any."""


def whole(name: str, value: int) -> int:
    """`value` as Python's own whole number: what JSON and file names are made of."""
    try:
        return index(value)
    except TypeError as error:
        raise SessionError(f"{name} is {value!r}", "Pass a whole number") from error


def require_free(stateful: Mapping[str, object]) -> None:
    if STEERING in stateful:
        raise SessionError(f"the state {STEERING!r} is the session's own", "Choose another keyword for yours")


def require_same(directory: Path, stored: Mapping[str, object], asked: Mapping[str, object]) -> None:
    """Raises CheckpointMismatchError where a checkpoint has other states than are asked for."""
    if stored.keys() != asked.keys():
        raise CheckpointMismatchError(
            f"{directory} holds {names(stored)}, but resume() asks for {names(asked)}",
            "Name the same states in checkpoint() and resume(), or start a new job for the changed script",
        )


def names(named: Mapping[str, object]) -> str:
    return ", ".join(sorted(named)) or "nothing"
