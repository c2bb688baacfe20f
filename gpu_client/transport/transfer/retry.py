"""One transfer tried until it is done: what may pass is waited out, bytes that were altered are moved once more."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TypeVar

from gpu_client.transport.errors import ChecksumMismatch, FalseDigest, Unreachable
from gpu_client.transport.limits.channel import Pause, TransferChannel
from gpu_client.transport.limits.stats import TransferStats
from gpu_client.transport.net.cancellation import Flight, stop_if_set
from gpu_client.transport.net.connections import BrokenConnection
from gpu_client.transport.retry import Failure, RetryLater, RetryPolicy, retry_delay_s

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TransferRetry:
    """Tries of the policy, each after a pause of random length. Tells the channel when the store is overloaded."""

    def __init__(
        self, policy: RetryPolicy, stats: TransferStats, *, pause: Pause, draw: Callable[[], float] = random.random
    ) -> None:
        self._policy = policy
        self._stats = stats
        self._pause = pause
        self._draw = draw

    def twice_if_altered(self, name: str, flight: Flight, channel: TransferChannel, once: Callable[[], T]) -> T:
        """Bytes can be altered on the way: only a second mismatch means that they are wrong at their source."""
        try:
            return self.until_done(name, flight, channel, once)
        except FalseDigest:
            raise
        except ChecksumMismatch as error:
            logger.warning("%s; moving it once more", error)
            self._stats.add(retries=1)
            return self.until_done(name, flight, channel, once)

    def until_done(self, name: str, flight: Flight, channel: TransferChannel, once: Callable[[], T]) -> T:
        """What `once` returns. Raises Unreachable after all tries, TransferCanceled, and whatever `once` does not mean
        to be tried again."""
        tries, waited_s = 0, 0.0
        while True:
            stop_if_set(flight)
            tries += 1
            try:
                return once()
            except BrokenConnection as error:
                if error.stale and not flight.is_set():
                    # a store closes connections that were idle for long: there is nothing to wait for
                    tries -= 1
                    continue
                failure = Failure(reason=str(error), overload=error.timed_out)
            except RetryLater as error:
                failure = error.failure
            stop_if_set(flight)
            if failure.overload:
                channel.limit.slow_down()
            delay_s = retry_delay_s(self._policy, failure, tries=tries, elapsed_s=waited_s, draw=self._draw())
            if delay_s is None:
                raise Unreachable(f"{name}: not moved after {tries} tries (last: {failure.reason})")
            logger.info("%s: %s; trying again in %.1f s", name, failure.reason, delay_s)
            self._stats.add(retries=1)
            self._pause(flight, delay_s)
            waited_s += delay_s
