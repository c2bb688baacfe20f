"""Retry calls and transfers by a policy.

The policy follows stripe-python's `_should_retry`: a short list of statuses, capped exponential backoff (here with full
jitter, so that the machines of a fleet do not retry in step), and no retry before the server's Retry-After.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from baton.contract.errors import ErrorCode

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of temporary refusals by the server or a gateway. Every other status from 400 on concerns the request."""

RETRIED_CODES = frozenset({ErrorCode.CONFLICT.value})
"""Error codes of concurrent changes of one item, for which a retry is the remedy."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits of one call's tries. No pause begins that would end after `budget_s` seconds."""

    max_tries: int = 10
    budget_s: float = 60.0
    first_delay_s: float = 0.5
    max_delay_s: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of one try. `status` None: no complete answer (connection error, timeout, truncated answer).

    `overload`: True if the server reports an overload, or its silence suggests one.
    """

    reason: str
    status: int | None = None
    code: str | None = None
    retry_after_s: float | None = None
    overload: bool = False


class RetryLater(Exception):  # noqa: N818 - a normal outcome, tried again
    """Failure of one try, for which the policy decides about a retry.

    `stale`: the server had closed a kept-alive connection before the request; a retry needs no pause and does not count
    as a try.
    """

    def __init__(self, failure: Failure, *, stale: bool = False) -> None:
        self.failure = failure
        self.stale = stale
        super().__init__(failure.reason)


class GaveUp(Exception):  # noqa: N818 - callers turn it into an error of their own
    """End of all tries. `failures`: failures of all tries, oldest first. `last`: exception of the last try."""

    def __init__(self, failures: list[Failure], last: RetryLater, elapsed_s: float) -> None:
        self.failures = failures
        self.last = last
        self.elapsed_s = elapsed_s
        super().__init__(f"{len(failures)} tries (last: {last})")


def call_with_retry(
    once: Callable[[], T],
    policy: RetryPolicy,
    *,
    name: str,
    pause: Callable[[float], object],
    draw: Callable[[], float] = random.random,
    clock: Callable[[], float] | None = None,
    repeatable: bool = True,
) -> T:
    """Return the result of `once`, repeated while `once` raises RetryLater and `policy` allows another try.

    `pause` waits for seconds. The policy's budget counts all time by `clock`; without a clock, only the pauses.
    `repeatable`: see `retry_delay_s`. Raises GaveUp, and every other exception of `once` at once.
    """
    began_s = clock() if clock else 0.0
    waited_s = 0.0
    failures: list[Failure] = []
    while True:
        try:
            return once()
        except RetryLater as error:
            if error.stale:
                continue
            last = error
        failures.append(last.failure)
        elapsed_s = clock() - began_s if clock else waited_s
        delay_s = retry_delay_s(
            policy, last.failure, tries=len(failures), elapsed_s=elapsed_s, draw=draw(), repeatable=repeatable
        )
        if delay_s is None:
            raise GaveUp(failures, last, elapsed_s)
        logger.info("%s: %s; trying again in %.1f s", name, last, delay_s)
        pause(delay_s)
        waited_s += delay_s


def retry_delay_s(
    policy: RetryPolicy, failure: Failure, *, tries: int, elapsed_s: float, draw: float, repeatable: bool = True
) -> float | None:
    """Return the seconds to wait before the next try; None without another try.

    `tries`: number of tries in `elapsed_s` seconds. `draw`: random number in [0, 1). `repeatable`: False for a call
    with neither fence nor idempotency key, which is repeated only after 429, because the server sends 429 before any
    effect.
    """
    if not _may_pass(failure) or tries >= policy.max_tries or not (repeatable or failure.status == 429):
        return None
    delay_s = draw * min(policy.max_delay_s, policy.first_delay_s * 2.0 ** min(tries - 1, 30))
    if failure.retry_after_s is not None:
        # A Retry-After of 0 would cause ten requests without a pause, therefore the backoff is the minimum.
        delay_s = max(delay_s, failure.retry_after_s)
    return delay_s if elapsed_s + delay_s <= policy.budget_s else None


def _may_pass(failure: Failure) -> bool:
    return failure.status is None or failure.status in RETRIED_STATUSES or failure.code in RETRIED_CODES


def parse_retry_after(value: str | None, *, date: str | None) -> float | None:
    """Return the seconds in a Retry-After header; None for an unusable value.

    The function compares a point in time with the answer's own Date header, never with this machine's clock.
    """
    if value is None:
        return None
    try:
        return max(0.0, float(int(value.strip())))
    except (ValueError, OverflowError):
        pass
    until, now = _instant(value), _instant(date or "")
    return max(0.0, (until - now).total_seconds()) if until and now else None


def _instant(text: str) -> datetime | None:
    try:
        instant = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)
