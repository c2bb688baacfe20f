"""The two times that rules go by, in seconds. Both go on where a checkpoint says, not by how late it was in the day."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Times:
    """Of one process. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Both begin at 0."""
        self._clock = clock
        self._began = clock()
        self._now_base = 0.0
        self._wall_base = 0.0
        self._knows_wall = False

    def begin(self, ran_s: float | None) -> None:
        """`ran_s`: how long the job had run before this attempt, as the control plane counts it; None if unsaid."""
        self._knows_wall = ran_s is not None
        self._wall_base = float(ran_s or 0)

    def now(self) -> float:
        """What windows, cooldowns and ages are counted by: time in training, up to the checkpoint and since."""
        return self._now_base + self._clock() - self._began

    def wall(self) -> float:
        """The metric `wall`: time in all attempts, as far as is known."""
        return self._wall_base + self._clock() - self._began

    def state(self) -> dict[str, float]:
        """Plain JSON."""
        return {"now": self.now(), "wall": self.wall()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where that was saved; of `wall` the control plane knows better, if it has said something."""
        passed = self._clock() - self._began
        self._now_base = float(state.get("now", 0.0)) - passed
        if not self._knows_wall:
            self._wall_base = float(state.get("wall", 0.0)) - passed
