"""Keep the lease: send heartbeats, prove the lease, detect its loss.

The server's clock alone decides about the lease. The agent measures durations on the monotonic clock, from the moment
of *sending* the last accepted heartbeat; after 80% of the granted duration the lease counts as unproven. Therefore a
wrong wall clock never matters. (The DynamoDB lock client's `ensure` works likewise.)

During an outage of the control plane the training continues, and the agent commits nothing until the control plane
accepts a heartbeat again. Only an answer of the control plane ends the lease.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.contract.errors import ErrorCode
from baton.contract.worker.calls import HeartbeatAnswer, HeartbeatRequest, WorkItem
from baton.contract.worker.control import Directive
from baton.contract.worker.lease_grace import RETRY_PAUSES
from gpu_client.agent.retry_pauses import backoff_s
from gpu_client.transport.errors import ApiError, BatonError, LeaseExpired, LeaseLost, Unauthorized

logger = logging.getLogger("baton.lease")

PROVEN_SHARE = 0.8
"""Share of the lease during which an accepted heartbeat counts as proof."""

MAX_INTERVAL_S = 3600.0
"""Longest interval between heartbeats in seconds; far below the longest sleep of a thread."""

RETRY_MIN_S = 0.5
"""Pause in seconds after a failed heartbeat, doubled up to a share of the interval (RETRY_PAUSES). Also the shortest
interval, so that no answer of the control plane makes the thread spin."""

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
    """Reason why the attempt may not write any more. `directive` is set if a user's command ended the attempt."""

    code: str
    message: str
    directive: Directive | None = None

    @property
    def canceled(self) -> bool:
        """Return True if a user canceled the job. Otherwise another attempt may own the job."""
        return self.directive is Directive.CANCEL or self.code == ErrorCode.JOB_CANCELED


def is_key_refused(error: Unauthorized) -> bool:
    """Return True if the control plane itself refused the key. A proxy's 403 is different: a retry may succeed."""
    return not error.foreign and error.code in _KEY_REFUSED


def _find_loss(error: BatonError) -> LeaseLoss | None:
    """Return the lease loss in an answer to a heartbeat; None if a later heartbeat may succeed."""
    final = isinstance(error, LeaseLost | LeaseExpired) or (isinstance(error, Unauthorized) and is_key_refused(error))
    # Any other 404 comes from a gateway or proxy that does not know the path.
    if isinstance(error, ApiError) and (final or error.code == ErrorCode.JOB_NOT_FOUND):
        return LeaseLoss(error.code, error.message)
    return None


def _clamp_interval_s(interval_s: int) -> float:
    return float(min(max(interval_s, RETRY_MIN_S), MAX_INTERVAL_S))


class LeaseKeeper:
    """A thread that sends heartbeats until closed or until the lease is lost.

    `status` returns the report; if `status` raises, the heartbeat goes out without a report. The keeper's thread (or
    the caller of `prove`) calls `on_directive`, `on_lost`, `on_answer` (after each accepted heartbeat) and `on_pause`
    (with the seconds until the next heartbeat has ended, accepted or not). The callbacks must return at once.
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
        """Start the heartbeats."""
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats. The keeper sends no heartbeat after this method has returned."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def lost(self) -> LeaseLoss | None:
        """Return why the lease is lost; None while the lease may hold."""
        return self._lost

    @property
    def proven(self) -> bool:
        """Return True while the last accepted heartbeat is new enough for a commit."""
        return self._lost is None and self._clock() - self._proven_at < PROVEN_SHARE * self._duration_s

    def prove(self) -> bool:
        """Prove the lease, with a heartbeat if the last proof is old.

        Returns False if the lease is lost or the control plane does not answer.
        """
        return self.proven or self.beat()

    def beat(self) -> bool:
        """Send one heartbeat. Returns True if the control plane accepted the heartbeat and the attempt continues."""
        with self._sending:
            if self._lost is not None or self._closed.is_set():
                return False
            request = self._request()
            sent_at = self._clock()
            try:
                answer = self._send(request)
            except BatonError as error:
                lost = _find_loss(error)
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
        """Return the seconds until the next heartbeat: the interval with a little jitter, or a growing retry pause."""
        if not self._failures:
            return self._interval_s * self._rng.uniform(0.9, 1.0)
        longest_s = max(self._interval_s / RETRY_PAUSES, RETRY_MIN_S)
        pause_s = backoff_s(RETRY_MIN_S, self._failures - 1, longest_s)
        return self._rng.uniform(pause_s / 2, pause_s)

    def _request(self) -> HeartbeatRequest:
        try:
            return self._status()
        except Exception:
            # Catch all: a bug in the report's code must not lose the lease.
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
                # Catch all: a dead thread would look like a dead machine. Continue as after a failed heartbeat.
                logger.exception("error while handling a heartbeat")
                self._failures += 1
