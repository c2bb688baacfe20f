"""Track the epochs that the loop reports: the last step of an epoch, and the epoch of a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

_REMEMBERED = 16
"""Number of remembered changes, because several ranks decide some steps later."""


class EndedEpoch(NamedTuple):
    """An epoch that has ended."""

    step: int
    """The last step of the epoch."""
    epoch: float


class EpochTracker:
    """Tracker of one process's epochs.

    A float is the number of complete epochs; 1.0 accompanies the last step of the first epoch. An int is the number of
    the current epoch; such an epoch ends with the start of the next epoch, or with the last step of the training.
    """

    def __init__(self) -> None:
        self._passed: int | None = None
        """The newest epoch without its fraction."""
        self._under_way: EndedEpoch | None = None
        """The newest epoch that was reported as an int, with its newest step; None after the epoch's end."""
        self._of_steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def before(self, step: int, metrics: Mapping[str, object]) -> EndedEpoch | None:
        """Return the epoch that ended before this step, or None."""
        epoch = _number(metrics)
        if epoch is None:
            return None
        if not self._of_steps or self._of_steps[-1][1] != epoch:
            self._of_steps.append((step, float(epoch)))
        if not isinstance(epoch, int):
            return None
        ended = self._under_way
        if ended is not None and ended.epoch == epoch:
            self._under_way = EndedEpoch(step, epoch)
            return None
        if self._passed != epoch:
            # A loop may report the last epoch again after its end.
            self._passed, self._under_way = epoch, EndedEpoch(step, epoch)
        return ended

    def after(self, step: int, metrics: Mapping[str, object], *, last: bool) -> EndedEpoch | None:
        """Return the epoch that ends with this step, or None. `last`: no further step is known."""
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
            # Without an earlier report, a float ends an epoch only if the float is whole.
            before = math.ceil(epoch) - 1 if epoch > 0 else self._passed
        return EndedEpoch(step, epoch) if before != self._passed else None

    def at(self, step: int) -> float | None:
        """Return the epoch of a step, or None if unknown."""
        return next((epoch for began, epoch in reversed(self._of_steps) if began <= step), None)

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {"epoch": self._passed, "epoch_under_way": list(self._under_way) if self._under_way else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises TypeError or ValueError."""
        self._passed = state.get("epoch")
        under_way = state.get("epoch_under_way")
        self._under_way = EndedEpoch(*under_way) if under_way is not None else None


def _number(metrics: Mapping[str, object]) -> int | float | None:
    epoch = metrics.get("epoch")
    # The comparison also excludes NaN, and accepts integers of any size without an overflow.
    return epoch if isinstance(epoch, int | float) and abs(epoch) < 1e12 else None
