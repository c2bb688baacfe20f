"""Divide the time of an attempt into new steps and the costs of an unreliable machine.

Goodput is the share of new steps (Google Cloud's ML goodput and NVIDIA's fault tolerance reports use the word so).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum

from baton.contract.jobs.goodput import Goodput


class Activity(StrEnum):
    """Present activity of the attempt."""

    IDLE = "idle"
    """Starting, waiting, ending."""
    TRANSFERRING = "transferring"
    """Fetching or storing bytes while the training waits."""
    TRAINING = "training"


class GoodputMeter:
    """Counter of an attempt's seconds by their use. Thread-safe. `clock`: monotonic seconds.

    `last_step`: last step that an earlier attempt reported. Steps up to `last_step` count as repeated.
    """

    def __init__(self, last_step: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._last_step = last_step if last_step is not None else -1
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._activity = Activity.IDLE
        self._step: int | None = None
        self._seconds = {"productive": 0.0, "repeated": 0.0, "stalled": 0.0, "transferring": 0.0, "idle": 0.0}
        self._silent = True
        """True while the training has reported no step; then only its committed checkpoints show its progress."""
        self._uncommitted_s = 0.0
        """Seconds of a silent training since its last commit, counted as idle so far."""
        self._stalled_s = 0.0
        """Stalls within the running stretch of training; `_settle` subtracts them."""
        counted = ("committed", "skipped", "raw_bytes", "reused_bytes", "encoded_bytes", "uploaded_bytes")
        self._counts = dict.fromkeys(counted, 0)

    def enter(self, activity: Activity) -> None:
        """Change the activity."""
        with self._lock:
            self._settle(self._step)
            self._activity = activity
            self._step = None

    def record_step(self, step: int) -> None:
        """Record that the training has reached `step`. Time before the first report is start-up and counts as idle."""
        with self._lock:
            self._silent = False
            if step != self._step:
                self._settle(step)
                self._step = step

    def record_stall(self, seconds: float) -> None:
        """Record how long a checkpoint stalled the training."""
        with self._lock:
            self._stalled_s += max(seconds, 0.0)

    def record_commit(
        self, *, step: int, raw_bytes: int, reused_bytes: int, encoded_bytes: int, uploaded_bytes: int
    ) -> None:
        """Record a committed checkpoint; bytes as in Goodput.

        Without reported steps, the time up to a commit counts as training. Time after the last commit stays idle,
        because the next attempt does not keep the work of that time.
        """
        with self._lock:
            if self._silent:
                self._settle(None)
                self._seconds["idle"] -= self._uncommitted_s
                self._seconds["productive" if step > self._last_step else "repeated"] += self._uncommitted_s
                self._uncommitted_s = 0.0
            self._counts["committed"] += 1
            self._counts["raw_bytes"] += raw_bytes
            self._counts["reused_bytes"] += reused_bytes
            self._counts["encoded_bytes"] += encoded_bytes
            self._counts["uploaded_bytes"] += uploaded_bytes

    def record_skip(self) -> None:
        """Record a checkpoint that a newer one superseded."""
        with self._lock:
            self._counts["skipped"] += 1

    def report(self) -> Goodput:
        """Return the goodput up to now."""
        with self._lock:
            self._settle(self._step)
            return Goodput(
                productive_s=round(self._seconds["productive"], 1),
                repeated_s=round(self._seconds["repeated"], 1),
                stalled_s=round(self._seconds["stalled"], 3),
                transferring_s=round(self._seconds["transferring"], 1),
                idle_s=round(self._seconds["idle"], 1),
                checkpoints_committed=self._counts["committed"],
                checkpoints_skipped=self._counts["skipped"],
                raw_bytes=self._counts["raw_bytes"],
                reused_bytes=self._counts["reused_bytes"],
                encoded_bytes=self._counts["encoded_bytes"],
                uploaded_bytes=self._counts["uploaded_bytes"],
            )

    def _settle(self, step: int | None) -> None:
        """Attribute the time since the last call, in which the training moved from `self._step` to `step`."""
        now = self._clock()
        passed_s, self._since = now - self._since, now
        if self._activity is not Activity.TRAINING or self._step is None:
            self._seconds[Activity.TRANSFERRING if self._activity is Activity.TRANSFERRING else Activity.IDLE] += (
                passed_s
            )
            if self._activity is Activity.TRAINING:
                self._uncommitted_s += passed_s
            return
        stalled_s = min(self._stalled_s, passed_s)
        self._stalled_s -= stalled_s
        self._seconds["stalled"] += stalled_s
        # Time without a new step belongs to the step in progress.
        reached = max(self._step + 1, step if step is not None else 0)
        repeated = min(max(self._last_step - self._step, 0) / (reached - self._step), 1.0)
        self._seconds["repeated"] += (passed_s - stalled_s) * repeated
        self._seconds["productive"] += (passed_s - stalled_s) * (1 - repeated)
