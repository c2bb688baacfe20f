"""What of a training's metrics the agent is told: numbers, and of which step they are. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_CARRIED = 64
"""Metrics that wait for the next report; more are left out."""

Warn = Callable[[str], None]


def numbers_of(metrics: Mapping[str, object], warn: Warn) -> dict[str, float]:
    """The numbers among `metrics`, NaN and infinity too; tensors and numpy scalars of one element are read.

    warn: is told what is left out, and what is not finite.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            plain = value.item() if hasattr(value, "item") else value
            number: float = int(plain) if isinstance(plain, int) else float(plain)  # type: ignore[arg-type]
            is_finite = math.isfinite(number)
        except (TypeError, ValueError, RuntimeError):
            warn(f"metric {name!r} is not a number ({type(value).__name__}): left out")
            continue
        except OverflowError:
            warn(f"metric {name!r} is beyond what a float can hold: left out of reports while it is")
            continue
        numbers[name] = number
        if not is_finite:
            warn(f"metric {name!r} became {number}: left out of checkpoints' metrics while it is")
    return numbers


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Those that are finite."""
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def said(number: float) -> float | str:
    """As JSON can say it: NaN and infinity are words."""
    return number if math.isfinite(number) else str(float(number))


class Carried:
    """Metrics that the agent has not been told, each with its step: the newest of each name."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, object]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, step: int, metrics: Mapping[str, object], *, but: Mapping[str, object] | None = None) -> None:
        """Keep these; `but` names what comes anew. Nothing is read yet: that would wait for the GPU."""
        for name, value in metrics.items():
            if (but is None or name not in but) and (name in self._values or len(self._values) < MAX_CARRIED):
                self._values[name] = step, value

    def take(self, warn: Warn) -> dict[int, dict[str, float]]:
        """All of them, read, by steps; they are forgotten."""
        values, self._values = self._values, {}
        by_step: dict[int, dict[str, object]] = {}
        for name, (step, value) in values.items():
            by_step.setdefault(step, {})[name] = value
        return {step: numbers_of(found, warn) for step, found in by_step.items()}


def points_of(carried: Mapping[int, Mapping[str, float]], step: int, own: Mapping[str, float]) -> list[dict[str, Any]]:
    """What is new in a report of `step`, step by step."""
    by_step = {of_step: dict(found) for of_step, found in carried.items()}
    if own:
        by_step.setdefault(step, {}).update(own)
    return [
        {"step": of_step, "metrics": {name: said(number) for name, number in found.items()}}
        for of_step, found in sorted(by_step.items())
    ]
