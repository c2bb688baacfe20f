"""Decide from measured durations when the next checkpoint pays and whether a last checkpoint fits.

The interval is the first-order optimum, sqrt(2 * cost * mean time between interruptions) - cost (Young, 1974; Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", 2006).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from baton.contract.jobs.goodput import Goodput
from baton.contract.worker.calls import WorkItem
from gpu_client.agent.attempt.goodput import Activity, GoodputMeter
from gpu_client.checkpoints.save.checkpoint_commit import Committed

FIRST_INTERVAL_S = 120.0
"""Interval before the first checkpoint, while the cost is unknown."""
MIN_INTERVAL_S = 15.0
MAX_INTERVAL_S = 3600.0
PRIOR_MTBF_S = 6 * 3600.0
"""Assumed mean time between interruptions of a machine without history."""
REMEMBERED = 8
SAFETY = 1.3
"""Factor on the usual duration of a last checkpoint: the checkpoint starts only if the product is left."""
MIN_TRAINER_S = 1.0
"""Minimum seconds in which a trainer can end by itself."""


def expected_time_between_interruptions_s(runtime_s: float, interruptions: int) -> float:
    """Return the job's mean time between interruptions, with PRIOR_MTBF_S counted as one more interruption."""
    return (max(runtime_s, 0.0) + PRIOR_MTBF_S) / (max(interruptions, 0) + 1)


def best_interval_s(cost_s: float, mtbf_s: float, *, durable_s: float) -> float:
    """Return the seconds of training between two checkpoints that stall the training for `cost_s` each.

    The result is at least `durable_s`, the duration of an upload, because an earlier checkpoint would only supersede a
    waiting checkpoint.
    """
    best_s = math.sqrt(2 * max(cost_s, 0.0) * mtbf_s) - cost_s
    return min(max(best_s, MIN_INTERVAL_S, durable_s), MAX_INTERVAL_S)


@dataclass
class CheckpointTimes:
    """Durations of the last checkpoints. Not thread-safe."""

    _stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _durable_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def record_stall(self, seconds: float) -> None:
        """Record how long a checkpoint stalled the training."""
        self._stalls_s.append(seconds)

    def record_upload(self, seconds: float) -> None:
        """Record the seconds from a complete checkpoint on this machine to its commit."""
        self._durable_s.append(seconds)

    def interval_s(self, *, runtime_s: float, interruptions: int) -> float:
        """Return the seconds of training until the next checkpoint."""
        if not self._durable_s:
            return FIRST_INTERVAL_S
        # A script may report no stalls; the time to store its files then stands in for the stall.
        cost_s = median(self._stalls_s) if self._stalls_s else median(self._durable_s)
        mtbf_s = expected_time_between_interruptions_s(runtime_s, interruptions)
        return best_interval_s(cost_s, mtbf_s, durable_s=median(self._durable_s))

    def storing_s(self) -> float | None:
        """Return the longest expected upload and commit in seconds; None without a measurement."""
        return SAFETY * max(self._durable_s) if self._durable_s else None

    def last_checkpoint_s(self) -> float | None:
        """Return the longest expected time from a request to the commit in seconds; None without a measurement."""
        if not self._durable_s:
            return None
        return SAFETY * (max(self._durable_s) + max(self._stalls_s, default=0.0))


class CheckpointScheduler:
    """Schedules the checkpoints of one attempt. Thread-safe. `clock`: monotonic seconds."""

    def __init__(self, item: WorkItem, clock: Callable[[], float] = time.monotonic) -> None:
        self._item = item
        self._clock = clock
        self._lock = threading.Lock()
        self._times = CheckpointTimes()
        self._meter = GoodputMeter(item.last_step, clock)
        self._training_since: float | None = None
        self._saved_at = 0.0
        self._asked_at: float | None = None
        self.last_step: int | None = None
        """Newest known step, from a report or a committed checkpoint."""
        self.total: int | None = None
        """Last step of the training, as its checkpoints name the step; for scripts that report no progress."""

    def enter(self, activity: Activity) -> None:
        """Change the activity of the attempt."""
        self._meter.enter(activity)

    def record_step(self, step: int) -> None:
        """Record that the training has reached `step`."""
        with self._lock:
            if self._training_since is None:
                self._training_since = self._saved_at = self._clock()
            self.last_step = step
        self._meter.record_step(step)

    def reported_step(self, *, needed: bool) -> int | None:
        """Return the step of the last checkpoint, for a script that reports no steps.

        `needed`: the heartbeat carries metrics, which require a step; before the first checkpoint the method returns
        the job's last step.
        """
        with self._lock:
            if self.last_step is None and needed:
                return self._item.last_step or 0
            return self.last_step

    def set_total(self, total: int) -> None:
        """Set the last step, as a checkpoint names it."""
        self.total = total

    def record_saved(self, stall_s: float | None) -> None:
        """Record a checkpoint of the session, and its stall in seconds (None if unknown)."""
        with self._lock:
            self._saved_at, self._asked_at = self._clock(), None
            if stall_s is not None:
                self._times.record_stall(stall_s)
        if stall_s is not None:
            self._meter.record_stall(stall_s)

    def record_commit(self, result: Committed) -> None:
        """Record a committed checkpoint."""
        with self._lock:
            self._times.record_upload(result.seconds)
            self.last_step = max(self.last_step or 0, result.step)
        self._meter.record_commit(
            step=result.step,
            raw_bytes=result.raw_bytes,
            reused_bytes=result.reused_bytes,
            encoded_bytes=result.encoded_bytes,
            uploaded_bytes=result.uploaded_bytes,
        )

    def record_skip(self) -> None:
        """Record a checkpoint that was superseded or given up."""
        self._meter.record_skip()

    def record_request(self) -> None:
        """Record a request for a checkpoint. The next request waits for the checkpoint or for another interval."""
        with self._lock:
            self._asked_at = self._clock()

    def is_due(self) -> bool:
        """Return True if the job's `checkpoint_every` demands a checkpoint now."""
        with self._lock:
            if self._item.checkpoint_every is None or self._training_since is None:
                return False
            interval_s = self._interval_s()
            waited_s = self._clock() - max(self._saved_at, self._asked_at or 0.0)
            return waited_s >= interval_s

    def last_checkpoint_problem(self, left_s: float) -> str:
        """Return why `left_s` seconds are too short for a last checkpoint; "" if enough, or without a measurement."""
        with self._lock:
            needed_s = self._times.last_checkpoint_s()
        if needed_s is None or needed_s <= left_s:
            return ""
        return f"a checkpoint takes about {needed_s:.0f} s, and {left_s:.0f} s are left"

    def trainer_time_s(self, left_s: float) -> float:
        """Return the part of `left_s` seconds that the trainer may use, so that its last checkpoint can be stored."""
        with self._lock:
            storing_s = self._times.storing_s() or 0.0
        return max(left_s - storing_s, MIN_TRAINER_S)

    def goodput(self) -> Goodput:
        """Return the goodput up to now."""
        return self._meter.report()

    def _interval_s(self) -> float:
        every = self._item.checkpoint_every
        if isinstance(every, int):
            return float(every)
        trained_s = self._clock() - (self._training_since or self._clock())
        return self._times.interval_s(
            runtime_s=self._item.runtime_s + trained_s, interruptions=self._item.interruptions
        )
