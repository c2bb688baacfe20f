"""How long rules may take of a step, and what is done about it: they are checked at fewer steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

BUDGET_S = 200e-6
"""Of processor time, for each step in the mean."""
MEASURE_EVERY = 8
"""Observations: measuring costs a system call."""
SAMPLES = 32
"""After so many measurements it is judged: one that was interrupted says nothing."""
MAX_EVERY = 64
MAX_KINDS = 64
"""Of reports, by what they have."""


class Budget:
    """Watches how long observations take. What it has slowed down it lets go on as before once there is room."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: seconds of processor time of this thread; others on the machine do not count."""
        self.clock = clock
        self.every = 1
        """Rules are checked at each so many steps."""
        self._seen = 0
        self._spent_s = 0.0
        self._samples = 0
        self.looked: dict[frozenset[str], int] = {}
        """The newest step that was looked at, by what it had of what rules read."""

    def passes_over(self, step: int, metrics: Mapping[str, object]) -> bool:
        """Whether this step is left out. Never one with a value that is not finite: it may be the only one.

        Of so many steps in a row the first that has these metrics is looked at: a loop may report them seldom.
        """
        names = frozenset(metrics)
        if len(self.looked) >= MAX_KINDS:
            self.looked.clear()
        before = self.looked.setdefault(names, step if step % self.every else -1)
        if before == -1 or before // self.every != step // self.every:
            self.looked[names] = step
            return False
        return all(
            value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in metrics.values()
        )

    def is_due(self) -> bool:
        """Whether this observation is to be measured; called once for each that is not left out.

        All of the few that are left are.
        """
        self._seen += 1
        return self.every > 1 or self._seen % MEASURE_EVERY == 0

    def spent(self, seconds: float) -> str:
        """So long an observation took; what is changed therefore, in words."""
        self._spent_s += seconds
        self._samples += 1
        if self._samples < SAMPLES:
            return ""
        mean_s, self._spent_s, self._samples = self._spent_s / SAMPLES, 0.0, 0
        wanted = min(MAX_EVERY, max(1, math.ceil(mean_s / BUDGET_S)))
        # More often again only where there is plenty of room: no going to and fro.
        if wanted == self.every or (wanted < self.every and mean_s > self.every * BUDGET_S / 4):
            return ""
        self.every = wanted
        at = "every step" if wanted == 1 else f"every {wanted} steps"
        return f"rules take {mean_s * 1e6:.0f} us (budget {BUDGET_S * 1e6:.0f}): checked at {at} from now on"
