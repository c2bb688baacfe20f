"""The retry policy: one pure function, so every line of it can be tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_client.transport.retry import (
    Failure,
    GaveUp,
    RetryLater,
    RetryPolicy,
    call_with_retry,
    parse_retry_after,
    retry_delay_s,
)

POLICY = RetryPolicy(max_tries=5, budget_s=60, first_delay_s=0.5, max_delay_s=4)


def delay(failure: Failure, *, tries: int = 1, elapsed_s: float = 0, draw: float = 1, repeatable: bool = True):
    return retry_delay_s(POLICY, failure, tries=tries, elapsed_s=elapsed_s, draw=draw, repeatable=repeatable)


@pytest.mark.parametrize("status", [None, 408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int | None) -> None:
    assert delay(Failure(reason="", status=status)) == 0.5


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 501])
def test_what_is_about_the_request_is_not(status: int) -> None:
    assert delay(Failure(reason="", status=status)) is None


def test_a_conflict_that_asks_to_repeat_is_repeated() -> None:
    assert delay(Failure(reason="", status=409, code="conflict")) == 0.5
    assert delay(Failure(reason="", status=409, code="lease_lost")) is None


def test_backoff_doubles_up_to_the_cap_and_the_tries_end() -> None:
    failure = Failure(reason="", status=503)
    assert [delay(failure, tries=tries) for tries in range(1, 6)] == [0.5, 1, 2, 4, None]


def test_jitter_is_full() -> None:
    failure = Failure(reason="", status=503)
    assert delay(failure, tries=4, draw=0) == 0
    assert delay(failure, tries=4, draw=0.25) == 1


def test_the_servers_word_wins_over_backoff_and_cap() -> None:
    assert delay(Failure(reason="", status=503, retry_after_s=17), draw=0) == 17


def test_a_server_that_says_at_once_is_not_asked_without_a_pause() -> None:
    assert [delay(Failure(reason="", status=503, retry_after_s=0), tries=tries) for tries in (1, 2, 3)] == [0.5, 1, 2]


def test_a_wait_beyond_the_budget_is_not_begun() -> None:
    assert delay(Failure(reason="", status=503, retry_after_s=61)) is None
    assert delay(Failure(reason=""), elapsed_s=59.8) is None
    assert delay(Failure(reason=""), elapsed_s=59.4) == 0.5


def test_an_unrepeatable_call_is_only_repeated_when_nothing_was_done() -> None:
    assert delay(Failure(reason="", status=429), repeatable=False) == 0.5
    assert delay(Failure(reason=""), repeatable=False) is None
    assert delay(Failure(reason="", status=503), repeatable=False) is None


def test_retry_after_in_seconds() -> None:
    assert parse_retry_after(" 12 ", date=None) == 12
    assert parse_retry_after("-3", date=None) == 0


def test_retry_after_as_a_date_is_measured_on_the_servers_clock() -> None:
    """A worker whose clock is wrong by an hour must not wait an hour."""
    date = "Fri, 20 Nov 2026 20:00:00 GMT"
    assert parse_retry_after("Fri, 20 Nov 2026 20:00:30 GMT", date=date) == 30
    assert parse_retry_after("Fri, 20 Nov 2026 19:00:00 GMT", date=date) == 0
    assert parse_retry_after("Fri, 20 Nov 2026 20:00:30 GMT", date=None) is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "soon",
        "1.5.2",
        "9" * 400,
        "9" * 5000,
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Mon, 01 Jan 2026 00:00:00 +99999999999999999999",
        "Mon, 31 Feb 2026 00:00:00 GMT",
    ],
)
def test_unusable_retry_after_is_ignored(value: str | None) -> None:
    """Numbers beyond all bounds ended the agent: they raise OverflowError, which is no ValueError."""
    assert parse_retry_after(value, date=None) is None
    assert parse_retry_after(value, date="Fri, 20 Nov 2026 20:00:00 GMT") is None


def failing(*failures: RetryLater) -> Callable[[], str]:
    """A call that raises each failure once and then succeeds."""
    left = iter(failures)

    def once() -> str:
        for failure in left:
            raise failure
        return "done"

    return once


def later(status: int | None = 503, *, stale: bool = False) -> RetryLater:
    return RetryLater(Failure(reason=f"status {status}", status=status), stale=stale)


def test_a_call_is_repeated_after_growing_pauses() -> None:
    pauses: list[float] = []
    once = failing(later(), later(), later(None))
    assert call_with_retry(once, POLICY, name="call", pause=pauses.append, draw=lambda: 1.0) == "done"
    assert pauses == [0.5, 1, 2]


def test_a_stale_connection_costs_neither_a_pause_nor_a_try() -> None:
    policy = RetryPolicy(max_tries=1)
    once = failing(*[later(None, stale=True)] * 20)
    assert call_with_retry(once, policy, name="call", pause=lambda _: pytest.fail("it paused")) == "done"


def test_what_gave_up_has_all_failures() -> None:
    with pytest.raises(GaveUp, match=r"3 tries \(last: status 400\)") as caught:
        call_with_retry(failing(later(), later(None), later(400)), POLICY, name="call", pause=lambda _: None)
    assert [failure.status for failure in caught.value.failures] == [503, None, 400]


def test_the_budget_counts_all_time_by_a_clock_and_else_the_pauses() -> None:
    times = iter([0.0, 59.8])
    with pytest.raises(GaveUp):
        call_with_retry(
            failing(later()), POLICY, name="c", pause=lambda _: None, draw=lambda: 1.0, clock=lambda: next(times)
        )
    pauses: list[float] = []
    with pytest.raises(GaveUp) as caught:
        call_with_retry(
            failing(*[later()] * 9),
            RetryPolicy(budget_s=10, first_delay_s=4, max_delay_s=4),
            name="c",
            pause=pauses.append,
            draw=lambda: 1.0,
        )
    assert (pauses, caught.value.elapsed_s) == ([4, 4], 8)
