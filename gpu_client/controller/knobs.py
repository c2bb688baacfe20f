"""Numbers of a running training that rules and commands may turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

_OF_GROUPS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""What schedulers keep in an optimizer's groups and begin from, besides `lr` itself."""
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min")
"""Learning rates that schedulers keep for themselves."""


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

    With every rate that its schedulers keep, so that the schedule goes on, lower or higher; all of these are in the
    state_dicts of optimizer and schedulers, so a resumed training goes on with them. Wrappers of accelerate are looked
    through.
    """

    def __init__(self, optimizer: Any, *schedulers: Any) -> None:
        # Not its groups: load_state_dict() makes new ones.
        self._optimizer = optimizer
        self._schedulers = [part for scheduler in schedulers for part in _parts(scheduler)]

    def read(self) -> float:
        """That of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def write(self, value: float) -> None:
        """Change it. Raises ValueError where no factor leads there."""
        now = self.read()
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"a learning rate cannot be {value}")
        if value == now:
            return
        if now == 0 or value == 0:
            raise ValueError(f"the learning rate is {now:g}: no factor leads from there to {value:g} and back")
        self.scale(value / now)

    def scale(self, factor: float) -> None:
        """Change all of it by a factor, also where it is 0 at this moment of a schedule."""
        for group in self._optimizer.param_groups:
            if hasattr(group["lr"], "mul_"):
                group["lr"].mul_(factor)  # in place: a captured graph looks at this very tensor
            else:
                group["lr"] = group["lr"] * factor
            for name in _OF_GROUPS:
                if name in group:
                    group[name] = group[name] * factor
        for scheduler in self._schedulers:
            for name in _OF_SCHEDULERS:
                rates = getattr(scheduler, name, None)
                if isinstance(rates, list | tuple):
                    setattr(scheduler, name, [rate * factor for rate in rates])
                elif rates is not None:
                    setattr(scheduler, name, rates * factor)


def _parts(scheduler: Any) -> list[Any]:
    """The schedulers that it is made of."""
    inner = getattr(scheduler, "scheduler", None)  # accelerate's wrapper
    if inner is not None:
        return _parts(inner)
    several = getattr(scheduler, "_schedulers", None)
    return [scheduler, *(part for one in several for part in _parts(one))] if several else [scheduler]
