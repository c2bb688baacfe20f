"""Read and change the numbers (knobs) of a running training, such as the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

_OF_GROUPS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""Rates that schedulers keep in an optimizer's groups, besides `lr`."""
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min")
"""Rates that schedulers keep as attributes."""


class Knob(Protocol):
    """Number of a training that rules read and change between two steps.

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
    """The learning rate of a torch optimizer; all groups change by one factor.

    The rates in the schedulers change by the factor, too, so that the schedule continues on a higher or lower level.
    The state_dicts of optimizer and schedulers contain all these rates, therefore a resumed training keeps the change.
    The constructor unwraps accelerate's wrappers.
    """

    def __init__(self, optimizer: Any, *schedulers: Any) -> None:
        # load_state_dict() replaces the groups, therefore the knob keeps the optimizer.
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
                group["lr"].mul_(factor)  # A captured graph reads this tensor, therefore the change is in place.
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
    """List the parts of a compound scheduler."""
    inner = getattr(scheduler, "scheduler", None)  # accelerate's wrapper
    if inner is not None:
        return _parts(inner)
    several = getattr(scheduler, "_schedulers", None)
    return [scheduler, *(part for one in several for part in _parts(one))] if several else [scheduler]
