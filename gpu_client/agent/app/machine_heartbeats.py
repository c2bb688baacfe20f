"""Send the signs of life of a rented machine, and end the agent when the fleet or a long silence demands the end.

The fleet pays for the machine as long as the machine exists. Therefore the machine leaves by itself if no answer of the
control plane comes (the dead man), and the checkpoint is saved as after a preemption notice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineHeartbeat, MachineOrders
from gpu_client.agent.app.shutdown import ShutdownRequest
from gpu_client.agent.attempt.lease import is_key_refused
from gpu_client.agent.retry_pauses import backoff_s
from gpu_client.transport.errors import ApiError, BatonError, Unauthorized

logger = logging.getLogger("baton.agent")

ALONE_S = 900.0
"""Seconds without an answer after which the agent ends, until the first answer names another time."""
SEND_BUDGET_S = 10.0
"""Seconds for one heartbeat with its retries; a drain may wait for the last heartbeat."""
LEAST_INTERVAL_S = 1.0
HUNG_S = 1800.0
"""Seconds from the decision to leave until a machine whose agent has not ended is given back all the same."""


class MachineHeartbeats:
    """A thread that sends heartbeats in its context: each interval, and at once when the machine's job changes.

    give_back: ends the machine at its provider; called if the agent has not ended HUNG_S after the decision to leave.
    """

    def __init__(
        self,
        send: Callable[[MachineHeartbeat], MachineOrders],
        stop: ShutdownRequest,
        *,
        interval_s: float,
        give_back: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._stop = stop
        self._give_back = give_back
        self._leaves_at: float | None = None
        self._clock = clock
        self._interval_s = max(interval_s, LEAST_INTERVAL_S)
        self._alone_s = ALONE_S
        self._answered_at = clock()
        self._lease_until = clock()
        self._failures = 0
        self._job_id: str | None = None
        self._reported: str | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-heartbeats", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Report the end of the job, if no heartbeat has done so, and stop."""
        self._closed.set()
        self._changed.set()
        self._thread.join()

    @contextmanager
    def holding(self, job_id: str, lease_s: float) -> Iterator[None]:
        """Report the job while the context lasts. `lease_s`: seconds from now until the end of the job's lease."""
        self.renew(lease_s)
        self._change_to(job_id)
        try:
            yield
        finally:
            self._change_to(None)

    def renew(self, lease_s: float) -> None:
        """Record a renewed lease, which is an answer of the control plane, too."""
        self._lease_until = self._clock() + lease_s

    def beat(self) -> float:
        """Send one heartbeat and obey the answer. Returns the seconds until the next heartbeat."""
        self._changed.clear()
        job_id = self._job_id
        try:
            orders = self._send(MachineHeartbeat(job_id=job_id))
        except BatonError as error:
            return self._miss(error)
        self._failures = 0
        self._answered_at = self._clock()
        self._reported = job_id
        self._alone_s = orders.alone_s
        self._interval_s = max(orders.heartbeat_interval_s, LEAST_INTERVAL_S)
        if orders.drain:
            self._leave(f"the fleet takes this machine back: {orders.reason or orders.state}")
        return self._interval_s

    def _miss(self, error: Exception) -> float:
        """Leave if the machine is no longer the fleet's, or alone for too long. Returns the seconds until a retry."""
        if _is_given_back(error):
            self._leave(f"the fleet has given this machine back: {error}")
        elif self._clock() >= max(self._answered_at, self._lease_until) + self._alone_s:
            self._leave(f"the control plane has not answered for {self._alone_s:.0f} s")
        elif self._failures == 0:
            logger.warning("no answer to this machine's heartbeat: %s", error)
        self._failures += 1
        return backoff_s(LEAST_INTERVAL_S, self._failures - 1, self._interval_s)

    def _leave(self, reason: str) -> None:
        if not self._stop.is_set():
            logger.warning("this machine leaves: %s", reason)
        self._stop.announce(reason)
        now = self._clock()
        if self._leaves_at is None:
            self._leaves_at = now
        if now >= self._leaves_at + HUNG_S:
            logger.error("the agent has not ended for %.0f s: this machine is given back without it", HUNG_S)
            self._give_back()

    def _change_to(self, job_id: str | None) -> None:
        self._job_id = job_id
        self._changed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._changed.wait(self._beat_safely())
        if self._reported != self._job_id:
            self._beat_safely()

    def _beat_safely(self) -> float:
        try:
            return self.beat()
        except Exception as error:
            # Catch all: without this thread nobody would end a machine that costs money.
            logger.exception("error while handling a machine's heartbeat")
            return self._miss(error)


def _is_given_back(error: Exception) -> bool:
    if isinstance(error, Unauthorized):
        return is_key_refused(error)
    return isinstance(error, ApiError) and error.code == ErrorCode.MACHINE_UNKNOWN
