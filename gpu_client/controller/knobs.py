"""Numbers of a running training that rules and commands may turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol


class Knob(Protocol):
    """A number that can be read and changed between two steps.

    `write` raises ValueError, with the reason, for a value that cannot be.
    """

    def read(self) -> float: ...

    def write(self, value: float) -> None: ...


class Setting:
    """A knob made of two functions."""

    def __init__(self, read: Callable[[], float], write: Callable[[float], object]) -> None:
        self.read = read
        self._write = write

    def write(self, value: float) -> None:
        """Change it."""
        self._write(value)


class LearningRate:
    """The learning rate of a torch optimizer: all its groups by the same factor.

    With the schedulers' base rates too, so that the schedule goes on, lower or higher; both are in their own
    state_dicts, so a resumed training goes on with them. Wrappers of accelerate are looked through.
    """

    def __init__(self, optimizer: Any, *schedulers: Any) -> None:
        self._groups = optimizer.param_groups
        self._schedulers = [part for scheduler in schedulers for part in _parts(scheduler)]

    def read(self) -> float:
        """That of the first group."""
        return float(self._groups[0]["lr"])

    def write(self, value: float) -> None:
        """Change it. Raises ValueError where no factor leads there."""
        now = self.read()
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"a learning rate cannot be {value}")
        if value == now:
            return
        if now == 0:
            raise ValueError("the learning rate is 0 now: no factor leads from there to another one")
        self.scale(value / now)

    def scale(self, factor: float) -> None:
        """Change all of it by a factor, also where it is 0 at this moment of a schedule."""
        for group in self._groups:
            for name in ("lr", "initial_lr", "max_lr", "min_lr"):
                if name in group:
                    group[name] = group[name] * factor
        for scheduler in self._schedulers:
            for name in ("base_lrs", "_last_lr"):
                if hasattr(scheduler, name):
                    setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])


def _parts(scheduler: Any) -> list[Any]:
    """The schedulers that it is made of."""
    inner = getattr(scheduler, "scheduler", None)  # accelerate's wrapper
    if inner is not None:
        return _parts(inner)
    several = getattr(scheduler, "_schedulers", None)
    return [scheduler, *(part for one in several for part in _parts(one))] if several else [scheduler]
