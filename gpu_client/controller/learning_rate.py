"""Numbers of a running training that rules and commands can change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

_OF_GROUPS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""Rates that schedulers keep in an optimizer's groups, besides `lr`."""
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min")
"""Rates that schedulers keep in themselves."""


class Knob(Protocol):
    """A number that can be read and changed between two steps.

    `write` raises ValueError with the reason for an impossible value.
    """

    def read(self) -> float: ...

    def write(self, value: float) -> None: ...


class Setting:
    """A knob made of two functions."""

    def __init__(self, read: Callable[[], float], write: Callable[[float], object]) -> None:
        self.read = read
        self._write = write

    def write(self, value: float) -> None:
        """Change the value."""
        self._write(value)


class LearningRate:
    """The learning rate of a torch optimizer; all groups change by the same factor.

    Every rate that the schedulers keep changes too, so that the schedule continues on a higher or lower level. All of
    these rates are in the state_dicts of optimizer and schedulers, so a resumed training keeps them. Wrappers of
    accelerate are unwrapped.
    """

    def __init__(self, optimizer: Any, *schedulers: Any) -> None:
        # The optimizer instead of its groups: load_state_dict() replaces the groups.
        self._optimizer = optimizer
        self._schedulers = [part for scheduler in schedulers for part in _parts(scheduler)]

    def read(self) -> float:
        """Return the rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def write(self, value: float) -> None:
        """Change the rate. Raises ValueError if no factor leads from the present rate to `value`."""
        now = self.read()
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"a learning rate cannot be {value}")
        if value == now:
            return
        if now == 0 or value == 0:
            raise ValueError(f"the learning rate is {now:g}: no factor leads from there to {value:g} and back")
        self.scale(value / now)

    def scale(self, factor: float) -> None:
        """Multiply all rates by a factor, also while the schedule is at 0."""
        for group in self._optimizer.param_groups:
            if hasattr(group["lr"], "mul_"):
                group["lr"].mul_(factor)  # in place: a captured graph reads this very tensor
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
    """List the schedulers that a scheduler consists of."""
    inner = getattr(scheduler, "scheduler", None)  # accelerate's wrapper
    if inner is not None:
        return _parts(inner)
    several = getattr(scheduler, "_schedulers", None)
    return [scheduler, *(part for one in several for part in _parts(one))] if several else [scheduler]
