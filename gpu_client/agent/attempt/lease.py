"""The lease keeper: proves the lease again and again, and says when it is gone.

One clock decides about the lease: the server's. Here only durations are measured, on the monotonic clock, from the
moment the last accepted heartbeat was *sent*; at 80 % of the granted duration the lease counts as unproven, so a wrong
wall clock never matters (after the DynamoDB lock client's `ensure`).

An unreachable control plane does not end the training: it goes on, and nothing is committed until a heartbeat is
accepted again. The lease is lost only when the control plane says so.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.contract.errors import ErrorCode
from baton.contract.leases import RETRY_PAUSES
from baton.contract.work import Directive, HeartbeatAnswer, HeartbeatRequest, WorkItem
from gpu_client.agent.retry import backoff_s
from gpu_client.transport.errors import ApiError, BatonError, LeaseExpired, LeaseLost, Unauthorized

logger = logging.getLogger("baton.lease")

PROVEN_SHARE = 0.8
"""Share of the lease during which an accepted heartbeat counts as proof."""

MAX_INTERVAL_S = 3600.0
"""The longest interval that is kept to: a thread cannot sleep for any length of time it is told."""

RETRY_MIN_S = 0.5
"""Pause after a heartbeat that did not reach the control plane; doubles up to a share of the interval (RETRY_PAUSES).
Also the shortest interval that is kept to, whatever the control plane says: nothing here may spin."""

_KEY_REFUSED = frozenset(
    {
        ErrorCode.UNAUTHORIZED,
        ErrorCode.KEY_UNKNOWN,
        ErrorCode.KEY_REVOKED,
        ErrorCode.KEY_EXPIRED,
        ErrorCode.WRONG_SCOPE,
    }
)

SendHeartbeat = Callable[[HeartbeatRequest], HeartbeatAnswer]


@dataclass(frozen=True)
class LeaseLoss:
    """Why the attempt may not write any more. `directive` is set when a user's command ended it."""

    code: str
    message: str
    directive: Directive | None = None

    @property
    def canceled(self) -> bool:
        """True if the job was canceled; else another attempt owns it, or nobody may."""
        return self.directive is Directive.CANCEL or self.code == ErrorCode.JOB_CANCELED


def key_is_refused(error: Unauthorized) -> bool:
    """True if the control plane itself said that the key will not do; a 403 of something in between may pass."""
    return not error.foreign and error.code in _KEY_REFUSED


def _loss_of(error: BatonError) -> LeaseLoss | None:
    """What is lost if this answer to a heartbeat says that none will be accepted again; None if it may pass."""
    final = isinstance(error, LeaseLost | LeaseExpired) or (isinstance(error, Unauthorized) and key_is_refused(error))
    # Any other 404 is that of a gateway or proxy that knows no such path.
    if isinstance(error, ApiError) and (final or error.code == ErrorCode.JOB_NOT_FOUND):
        return LeaseLoss(error.code, error.message)
    return None


def _clamp_interval_s(interval_s: int) -> float:
    return float(min(max(interval_s, RETRY_MIN_S), MAX_INTERVAL_S))


class LeaseKeeper:
    """Sends heartbeats from a thread of its own until closed or lost.

    `status` is asked for what to report; if it raises, the heartbeat goes out without. `on_directive` and `on_lost` are
    called from the keeper's thread (or from `prove`'s caller) and must return at once, and so must `on_answer`,
    which hears of each accepted heartbeat, and `on_pause`: it hears from the thread in how many seconds the next
    heartbeat is over, answered or not.
    """

    def __init__(
        self,
        item: WorkItem,
        send: SendHeartbeat,
        status: Callable[[], HeartbeatRequest],
        *,
        on_directive: Callable[[Directive, str], None],
        on_lost: Callable[[LeaseLoss], None],
        on_pause: Callable[[float], None] = lambda pause_s: None,
        on_answer: Callable[[HeartbeatRequest, HeartbeatAnswer], None] = lambda request, answer: None,
        claimed_at: float,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._send = send
        self._status = status
        self._on_directive = on_directive
        self._on_lost = on_lost
        self._on_pause = on_pause
        self._on_answer = on_answer
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._duration_s = float(item.lease_duration_s)
        self._interval_s = _clamp_interval_s(item.heartbeat_interval_s)
        self._proven_at = claimed_at
        self._failures = 0
        self._lost: LeaseLoss | None = None
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def start(self) -> None:
        """Begin sending heartbeats."""
        self._thread.start()

    def close(self) -> None:
        """Stop at once; no further heartbeat is sent after this returns."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def lost(self) -> LeaseLoss | None:
        """Why the lease is gone; None while it may still hold."""
        return self._lost

    @property
    def proven(self) -> bool:
        """True while the last accepted heartbeat is young enough to commit on."""
        return self._lost is None and self._clock() - self._proven_at < PROVEN_SHARE * self._duration_s

    def prove(self) -> bool:
        """Make sure the lease holds right now, asking the control plane if the last proof is old.

        False when it is lost or the control plane cannot be reached at the moment.
        """
        return self.proven or self.beat()

    def beat(self) -> bool:
        """Send one heartbeat; True if it was accepted and the attempt goes on."""
        with self._sending:
            if self._lost is not None or self._closed.is_set():
                return False
            request = self._request()
            sent_at = self._clock()
            try:
                answer = self._send(request)
            except BatonError as error:
                lost = _loss_of(error)
                if lost is not None:
                    self._set_lost(lost)
                    return False
                self._failures += 1
                if self._failures == 1:
                    logger.warning("heartbeat failed; training goes on: %s", error)
                return False
            if self._failures:
                logger.info("control plane is back after %d failed heartbeats", self._failures)
            self._failures = 0
            self._proven_at = sent_at
            self._duration_s = float(answer.lease_duration_s)
            self._interval_s = _clamp_interval_s(answer.heartbeat_interval_s)
            self._on_answer(request, answer)
        return self._apply_directive(answer)

    def next_pause_s(self) -> float:
        """Seconds until the next heartbeat: the interval with a little jitter, or a growing retry pause."""
        if not self._failures:
            return self._interval_s * self._rng.uniform(0.9, 1.0)
        longest_s = max(self._interval_s / RETRY_PAUSES, RETRY_MIN_S)
        pause_s = backoff_s(RETRY_MIN_S, self._failures - 1, longest_s)
        return self._rng.uniform(pause_s / 2, pause_s)

    def _request(self) -> HeartbeatRequest:
        try:
            return self._status()
        except Exception:
            # The top of what others hang into the heartbeat: a bug in a report must not cost the lease it is about.
            logger.exception("the heartbeat goes out without a report")
            return HeartbeatRequest()

    def _apply_directive(self, answer: HeartbeatAnswer) -> bool:
        if answer.directive is Directive.CANCEL:
            self._set_lost(LeaseLoss("job_canceled", answer.reason or "the job was canceled", Directive.CANCEL))
            return False
        if answer.directive is not Directive.CONTINUE:
            self._on_directive(answer.directive, answer.reason)
        return True

    def _set_lost(self, lost: LeaseLoss) -> None:
        if self._lost is None:
            self._lost = lost
            self._on_lost(lost)

    def _run(self) -> None:
        while not self._closed.is_set() and self._lost is None:
            pause_s = self.next_pause_s()
            self._on_pause(pause_s + self._interval_s)
            if self._closed.wait(pause_s):
                return
            try:
                self.beat()
            except Exception:
                # The top of this thread. A dead keeper would look like a dead machine: say so and go on, not faster
                # than after a failure.
                logger.exception("a heartbeat could not be dealt with")
                self._failures += 1
