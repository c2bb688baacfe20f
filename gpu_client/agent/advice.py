"""How often to take a checkpoint, and whether a last one can still be made: from what was measured.

The interval is the first-order optimum, sqrt(2 * cost * mean time between interruptions) - cost (Young, 1974; Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", 2006).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

FIRST_INTERVAL_S = 120.0
"""Before the first checkpoint nothing is known of its cost."""
MIN_INTERVAL_S = 15.0
MAX_INTERVAL_S = 3600.0
PRIOR_MTBF_S = 6 * 3600.0
"""Mean time between interruptions of a machine of which nothing is known."""
REMEMBERED = 8
SAFETY = 1.3
"""A last checkpoint is begun if this many times its usual duration is left."""


def expected_time_between_interruptions_s(runtime_s: float, interruptions: int) -> float:
    """From a job's history, with one interruption in PRIOR_MTBF_S as if it had been seen before."""
    return (max(runtime_s, 0.0) + PRIOR_MTBF_S) / (max(interruptions, 0) + 1)


def best_interval_s(cost_s: float, mtbf_s: float, *, durable_s: float) -> float:
    """Seconds of training between two checkpoints that cost `cost_s` of it each.

    Never less than it takes to store one (`durable_s`): more would only be passed over.
    """
    best_s = math.sqrt(2 * max(cost_s, 0.0) * mtbf_s) - cost_s
    return min(max(best_s, MIN_INTERVAL_S, durable_s), MAX_INTERVAL_S)


@dataclass
class CheckpointTimes:
    """What the last few checkpoints took. Not safe from several threads."""

    _stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _durable_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def stalled(self, seconds: float) -> None:
        """The training stood still for this long."""
        self._stalls_s.append(seconds)

    def stored(self, seconds: float) -> None:
        """From the checkpoint's being complete on this machine to its commit."""
        self._durable_s.append(seconds)

    def interval_s(self, *, runtime_s: float, interruptions: int) -> float:
        """How long to train until the next checkpoint."""
        if not self._durable_s:
            return FIRST_INTERVAL_S
        # A script that does not say how long it stood still is taken to have stood still while its files were stored.
        cost_s = median(self._stalls_s) if self._stalls_s else median(self._durable_s)
        mtbf_s = expected_time_between_interruptions_s(runtime_s, interruptions)
        return best_interval_s(cost_s, mtbf_s, durable_s=median(self._durable_s))

    def storing_s(self) -> float | None:
        """How long the commit of a checkpoint takes at worst; None if nothing is known."""
        return SAFETY * max(self._durable_s) if self._durable_s else None

    def last_checkpoint_s(self) -> float | None:
        """How long a last checkpoint takes at worst, from being asked for to its commit; None if nothing is known."""
        if not self._durable_s:
            return None
        return SAFETY * (max(self._durable_s) + max(self._stalls_s, default=0.0))
