"""Repeat a transfer until it succeeds: after transient failures, and once after altered bytes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TypeVar

from gpu_client.transport.errors import ChecksumMismatch, FalseDigest, Unreachable
from gpu_client.transport.limits.stats import TransferStats
from gpu_client.transport.limits.transfer_channel import Pause, TransferChannel
from gpu_client.transport.net.cancellation import Flight, stop_if_set
from gpu_client.transport.retry import GaveUp, RetryLater, RetryPolicy, call_with_retry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TransferRetry:
    """Retry of transfers by `policy`, whose budget limits the pauses. Reports overload of the store to the channel."""

    def __init__(
        self, policy: RetryPolicy, stats: TransferStats, *, pause: Pause, draw: Callable[[], float] = random.random
    ) -> None:
        self._policy = policy
        self._stats = stats
        self._pause = pause
        self._draw = draw

    def twice_if_altered(self, name: str, flight: Flight, channel: TransferChannel, once: Callable[[], T]) -> T:
        """Repeat `once` as in `until_done`, and once more after ChecksumMismatch.

        The network can alter bytes, therefore only a second mismatch proves that the stored bytes are wrong.
        """
        try:
            return self.until_done(name, flight, channel, once)
        except FalseDigest:
            raise
        except ChecksumMismatch as error:
            logger.warning("%s; moving it once more", error)
            self._stats.add(retries=1)
            return self.until_done(name, flight, channel, once)

    def until_done(self, name: str, flight: Flight, channel: TransferChannel, once: Callable[[], T]) -> T:
        """Return the result of `once`, repeated while `once` raises RetryLater.

        Raises Unreachable after all tries, TransferCanceled, and every other exception of `once` at once.
        """

        def attempt() -> T:
            stop_if_set(flight)
            try:
                return once()
            except RetryLater as error:
                stop_if_set(flight)
                if error.failure.overload:
                    channel.limit.slow_down()
                raise

        def pause(delay_s: float) -> None:
            self._stats.add(retries=1)
            self._pause(flight, delay_s)

        try:
            return call_with_retry(attempt, self._policy, name=name, pause=pause, draw=self._draw)
        except GaveUp as error:
            raise Unreachable(f"{name}: not moved after {error}") from error.last
