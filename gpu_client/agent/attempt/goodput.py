"""Where the time of an attempt goes: into new steps, or into what an unreliable machine costs.

Goodput is the share of new steps (Google Cloud's ML goodput and NVIDIA's fault tolerance reports use the word so).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum

from baton.contract.goodput import Goodput


class Activity(StrEnum):
    """What the attempt does at the moment."""

    IDLE = "idle"
    """Starting, waiting, ending."""
    TRANSFERRING = "transferring"
    """Bytes are fetched or stored, and the training waits for them."""
    TRAINING = "training"


class GoodputMeter:
    """Told what happens when it happens; safe from several threads. `clock`: monotonic seconds.

    `last_step`: the last step that any earlier attempt reported. Steps up to it are repeated ones.
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
        """The training has reported no step: its committed checkpoints alone tell how far it is."""
        self._uncommitted_s = 0.0
        """Time that a silent training has taken since its last commit, counted as idle so far."""
        self._stalled_s = 0.0
        """Of the running stretch of training; taken out of it when it is settled."""
        counted = ("committed", "skipped", "raw_bytes", "reused_bytes", "encoded_bytes", "uploaded_bytes")
        self._counts = dict.fromkeys(counted, 0)

    def enter(self, activity: Activity) -> None:
        """The activity changes now."""
        with self._lock:
            self._settle(self._step)
            self._activity = activity
            self._step = None

    def record_step(self, step: int) -> None:
        """The training has reached `step`. What lies before its first report is its start, and counts as idle."""
        with self._lock:
            self._silent = False
            if step != self._step:
                self._settle(step)
                self._step = step

    def record_stall(self, seconds: float) -> None:
        """The training stood still for this long to take a checkpoint."""
        with self._lock:
            self._stalled_s += max(seconds, 0.0)

    def record_commit(
        self, *, step: int, raw_bytes: int, reused_bytes: int, encoded_bytes: int, uploaded_bytes: int
    ) -> None:
        """A checkpoint was committed; the bytes as in Goodput.

        Of a training that reports no steps, the time up to a commit led to the checkpoint's steps. What comes behind
        its last commit is lost to the next attempt, and stays idle.
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
        """A checkpoint was passed over for a newer one."""
        with self._lock:
            self._counts["skipped"] += 1

    def report(self) -> Goodput:
        """As of now."""
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
        """Account for the time since the last settling; the training has moved from `self._step` to `step` in it."""
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
        # Time without a new step belongs to the step that is being worked on.
        reached = max(self._step + 1, step if step is not None else 0)
        repeated = min(max(self._last_step - self._step, 0) / (reached - self._step), 1.0)
        self._seconds["repeated"] += (passed_s - stalled_s) * repeated
        self._seconds["productive"] += (passed_s - stalled_s) * (1 - repeated)
