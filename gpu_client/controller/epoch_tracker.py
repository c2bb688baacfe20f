"""Passes over the data, as the loop reports them: when one ends, and in which one a step was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

_REMEMBERED = 16
"""Changes: several processes decide some steps later."""


class Ended(NamedTuple):
    """A pass over the data."""

    step: int
    """Its last one."""
    epoch: float


class Epochs:
    """Of one process.

    A number with a fraction (a float) says how many passes are done, so that 1.0 comes with the last step of the first
    one. A whole one (an int) says which one is under way, and that it has ended is known when the next one begins, or
    with the last step of the training.
    """

    def __init__(self) -> None:
        self._passed: int | None = None
        """The newest, without its fraction."""
        self._under_way: Ended | None = None
        """The newest that was whole, and its newest step; None once it has ended."""
        self._of_steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def before(self, step: int, metrics: Mapping[str, object]) -> Ended | None:
        """What has ended ahead of this step."""
        epoch = _number(metrics)
        if epoch is None:
            return None
        if not self._of_steps or self._of_steps[-1][1] != epoch:
            self._of_steps.append((step, float(epoch)))
        if not isinstance(epoch, int):
            return None
        ended = self._under_way
        if ended is not None and ended.epoch == epoch:
            self._under_way = Ended(step, epoch)
            return None
        if self._passed != epoch:
            # The last one may be reported once more when it has ended.
            self._passed, self._under_way = epoch, Ended(step, epoch)
        return ended

    def after(self, step: int, metrics: Mapping[str, object], *, last: bool) -> Ended | None:
        """What ends with this step; `last`: as far as is known none comes after it."""
        epoch = _number(metrics)
        if epoch is None:
            return None
        if isinstance(epoch, int):
            if not last:
                return None
            ended, self._under_way = self._under_way, None
            return ended
        before, self._passed = self._passed, math.floor(epoch)
        if before is None:
            # The first that is heard of: a pass ends here if nothing is left of it.
            before = math.ceil(epoch) - 1 if epoch > 0 else self._passed
        return Ended(step, epoch) if before != self._passed else None

    def at(self, step: int) -> float | None:
        """In which one that step was; None where nobody has said so."""
        return next((epoch for began, epoch in reversed(self._of_steps) if began <= step), None)

    def state(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"epoch": self._passed, "epoch_under_way": list(self._under_way) if self._under_way else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where that was saved. Raises TypeError or ValueError."""
        self._passed = state.get("epoch")
        under_way = state.get("epoch_under_way")
        self._under_way = Ended(*under_way) if under_way is not None else None


def _number(metrics: Mapping[str, object]) -> int | float | None:
    epoch = metrics.get("epoch")
    # NaN is not below it, and no whole number is too large to be compared.
    return epoch if isinstance(epoch, int | float) and abs(epoch) < 1e12 else None
