"""What an attempt's checkpoints cost so far, and what follows from it: when the next one pays, whether a last one fits,
and where the attempt's time went."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from baton.contract.goodput import Goodput
from baton.contract.work import WorkItem
from gpu_client.agent.attempt.goodput import Activity, GoodputMeter
from gpu_client.checkpoints.save.checkpoint_commit import Committed

FIRST_INTERVAL_S = 120.0
"""Before the first checkpoint nothing is known of its cost."""
MIN_INTERVAL_S = 15.0
MAX_INTERVAL_S = 3600.0
PRIOR_MTBF_S = 6 * 3600.0
"""Mean time between interruptions of a machine of which nothing is known."""
REMEMBERED = 8
SAFETY = 1.3
"""A last checkpoint is begun if this many times its usual duration is left."""
MIN_TRAINER_S = 1.0
"""A trainer is given at least this long to end by itself."""


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

    def record_stall(self, seconds: float) -> None:
        """The training stood still for this long."""
        self._stalls_s.append(seconds)

    def record_upload(self, seconds: float) -> None:
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


class CheckpointScheduler:
    """Of one attempt; safe from several threads. `clock`: monotonic seconds."""

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
        """The newest that is known: reported, or of a committed checkpoint."""
        self.total: int | None = None
        """The last step, as the checkpoints of a script say that reports nothing."""

    def enter(self, activity: Activity) -> None:
        """The attempt does something else now."""
        self._meter.enter(activity)

    def record_step(self, step: int) -> None:
        """The training has reached `step`."""
        with self._lock:
            if self._training_since is None:
                self._training_since = self._saved_at = self._clock()
            self.last_step = step
        self._meter.record_step(step)

    def reported_step(self, *, needed: bool) -> int | None:
        """How far a script is that reports nothing: as its last checkpoint.

        `needed`: metrics are to be told, which nobody hears of without a step. The job is where it was then.
        """
        with self._lock:
            if self.last_step is None and needed:
                return self._item.last_step or 0
            return self.last_step

    def set_total(self, total: int) -> None:
        """A checkpoint says which step is the last."""
        self.total = total

    def record_saved(self, stall_s: float | None) -> None:
        """The session has saved a checkpoint, for which the training stood still so long (None: it does not say)."""
        with self._lock:
            self._saved_at, self._asked_at = self._clock(), None
            if stall_s is not None:
                self._times.record_stall(stall_s)
        if stall_s is not None:
            self._meter.record_stall(stall_s)

    def record_commit(self, result: Committed) -> None:
        """A checkpoint is stored."""
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
        """A checkpoint was passed over for a newer one, or given up."""
        self._meter.record_skip()

    def record_request(self) -> None:
        """The training was asked for a checkpoint; it is not asked again before one has come, or as long again."""
        with self._lock:
            self._asked_at = self._clock()

    def is_due(self) -> bool:
        """Whether to ask the training for a checkpoint, by the job's `checkpoint_every`."""
        with self._lock:
            if self._item.checkpoint_every is None or self._training_since is None:
                return False
            interval_s = self._interval_s()
            waited_s = self._clock() - max(self._saved_at, self._asked_at or 0.0)
            return waited_s >= interval_s

    def last_checkpoint_problem(self, left_s: float) -> str:
        """Why a last checkpoint cannot be stored in time; "" if it can, or nothing is known of how long one takes."""
        with self._lock:
            needed_s = self._times.last_checkpoint_s()
        if needed_s is None or needed_s <= left_s:
            return ""
        return f"it takes about {needed_s:.0f} s, and {left_s:.0f} s are left"

    def trainer_time_s(self, left_s: float) -> float:
        """How much of what is left the trainer may use up, so that its last checkpoint can still be stored."""
        with self._lock:
            storing_s = self._times.storing_s() or 0.0
        return max(left_s - storing_s, MIN_TRAINER_S)

    def goodput(self) -> Goodput:
        """As of now."""
        return self._meter.report()

    def _interval_s(self) -> float:
        every = self._item.checkpoint_every
        if isinstance(every, int):
            return float(every)
        trained_s = self._clock() - (self._training_since or self._clock())
        return self._times.interval_s(
            runtime_s=self._item.runtime_s + trained_s, interruptions=self._item.interruptions
        )
