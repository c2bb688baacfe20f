"""When a call or a transfer is tried again, and how long to wait first: one pure function.

After stripe-python's `_should_retry`: a short list of statuses, capped exponential backoff (here with full jitter, so
that a fleet does not come back in step), and never sooner than the server says.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from baton.contract.errors import ErrorCode

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""The server, or something in between, says: not now. The rest of 400 and above is about the request itself."""

RETRIED_CODES = frozenset({ErrorCode.CONFLICT.value})
"""Somebody else changed the same item at the same moment: repeating is the remedy."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Bounds of trying again. `budget_s` counts from the first try; a wait that would exceed it is not begun."""

    max_tries: int = 10
    budget_s: float = 60.0
    first_delay_s: float = 0.5
    max_delay_s: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What one try ended with. `status` None means that no (complete) answer came: connection, timeout, cut short.

    `overload`: the other side says, or seems, to have too much to do.
    """

    reason: str
    status: int | None = None
    code: str | None = None
    retry_after_s: float | None = None
    overload: bool = False


class RetryLater(Exception):  # noqa: N818 - a normal outcome, tried again
    """One try failed and may be repeated; `failure` tells why."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.reason)


def retry_delay_s(
    policy: RetryPolicy, failure: Failure, *, tries: int, elapsed_s: float, draw: float, repeatable: bool = True
) -> float | None:
    """Seconds to wait before the next try; None to give up.

    `tries` have been made in `elapsed_s`; `draw` is a random number in [0, 1). A call that is not `repeatable` (it has
    neither fence nor idempotency key) is only tried again after 429, which is answered before anything is done.
    """
    if not _may_pass(failure) or tries >= policy.max_tries or not (repeatable or failure.status == 429):
        return None
    delay_s = draw * min(policy.max_delay_s, policy.first_delay_s * 2.0 ** min(tries - 1, 30))
    if failure.retry_after_s is not None:
        # At least: a server that says "at once" is not asked ten times without a pause.
        delay_s = max(delay_s, failure.retry_after_s)
    return delay_s if elapsed_s + delay_s <= policy.budget_s else None


def _may_pass(failure: Failure) -> bool:
    return failure.status is None or failure.status in RETRIED_STATUSES or failure.code in RETRIED_CODES


def parse_retry_after(value: str | None, *, date: str | None) -> float | None:
    """Seconds that a Retry-After header asks for; None if it says nothing usable.

    A point in time is compared with the answer's own Date header, never with this machine's clock.
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
