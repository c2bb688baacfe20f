"""Test calls that must arrive: on a proven lease only, repeated, and not forever."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_client.agent.attempt.lease import LeaseKeeper
from gpu_client.agent.attempt.outage_tolerance import (
    CALL_BUDGET_S,
    HURRIED_BUDGET_S,
    MAX_FOREIGN,
    MAX_UNEXPECTED,
    LeasedCalls,
)
from gpu_client.agent.retry_pauses import MAX_PAUSE_S, backoff_s
from gpu_client.transport.errors import ApiError, LeaseLost, TransferCanceled, UnexpectedAnswer, Unreachable
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import Heart, foreign, make_item, refusal


class Client:
    """Follows `outcomes` in turn, the last one forever."""

    def __init__(self, *outcomes: object, budget_s: float = 0) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[float] = []
        self.budget_s = budget_s

    def within(self, budget_s: float) -> Client:
        limited = Client(budget_s=budget_s)
        limited.outcomes, limited.calls = self.outcomes, self.calls
        return limited

    def inputs_page(self, *_: object, **__: object) -> Any:
        self.calls.append(self.budget_s)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def make(client: Client, heart: Heart, *, clock: Clock | None = None, given_up: Any = lambda: False) -> LeasedCalls:
    clock = clock or Clock()
    keeper = LeaseKeeper(
        make_item(),
        heart,
        lambda: None,  # type: ignore[arg-type, return-value]
        on_directive=lambda *_: None,
        on_lost=lambda _: None,
        claimed_at=clock(),
        clock=clock,
    )
    return LeasedCalls(client, keeper, given_up=given_up, retry_s=0.0)  # type: ignore[arg-type]


def ask(calls: LeasedCalls) -> Any:
    return calls.inputs_page("j", "t")


def test_a_call_on_a_proven_lease_costs_no_heartbeat() -> None:
    client, heart = Client("page"), Heart()
    assert ask(make(client, heart)) == "page"
    assert heart.requests == []
    assert client.calls == [CALL_BUDGET_S]


def test_an_outage_is_waited_for() -> None:
    client = Client(*[Unreachable("down")] * 20, "page")
    assert ask(make(client, Heart())) == "page"
    assert len(client.calls) == 21


def test_an_old_proof_is_renewed_before_the_call() -> None:
    client, heart, clock = Client("page"), Heart(Unreachable("down"), Unreachable("down"), Heart().answers[0]), Clock()
    calls = make(client, heart, clock=clock)
    clock.now += 3600
    assert ask(calls) == "page"
    assert len(heart.requests) == 3
    assert len(client.calls) == 1, "nothing is written on a lease that is not proven"


def test_an_expired_lease_is_proved_again() -> None:
    client, heart = Client(refusal("lease_expired"), "page"), Heart()
    assert ask(make(client, heart)) == "page"
    assert len(heart.requests) == 1


@pytest.mark.parametrize("code", ["lease_lost", "not_stored_yet", "job_not_found", "invalid_value", "key_revoked"])
def test_refusals_are_raised_at_once(code: str) -> None:
    client = Client(refusal(code))
    with pytest.raises(ApiError) as caught:
        ask(make(client, Heart()))
    assert caught.value.code == code
    assert len(client.calls) == 1


def test_a_lost_lease_ends_the_waiting() -> None:
    client, heart = Client(refusal("lease_expired")), Heart(refusal("lease_lost"))
    with pytest.raises(TransferCanceled, match="the lease is lost"):
        ask(make(client, heart))
    assert len(client.calls) == 1
    with pytest.raises(LeaseLost):
        raise heart.answers[0]  # type: ignore[misc]


def test_giving_up_allows_one_hurried_try() -> None:
    client = Client(Unreachable("down"))
    with pytest.raises(TransferCanceled, match="inputs: no time left"):
        ask(make(client, Heart(), given_up=lambda: True))
    assert client.calls == [HURRIED_BUDGET_S]
    done = Client("page")
    assert ask(make(done, Heart(), given_up=lambda: True)) == "page"


def test_answers_that_are_never_understood_are_raised() -> None:
    client = Client(UnexpectedAnswer("?"))
    with pytest.raises(UnexpectedAnswer):
        ask(make(client, Heart()))
    assert len(client.calls) == MAX_UNEXPECTED


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
def test_a_refusal_by_something_in_between_is_waited_for_but_not_for_ever(status: int) -> None:
    """A proxy's 403 during `complete` failed jobs whose training was done, and blamed the job."""
    client = Client(*[foreign(status)] * (MAX_FOREIGN - 1), "page")
    assert ask(make(client, Heart())) == "page"
    client = Client(foreign(status))
    with pytest.raises(ApiError):
        ask(make(client, Heart()))
    assert len(client.calls) == MAX_FOREIGN


def test_a_conflict_is_tried_again() -> None:
    """A conflict is tried again beyond the client's own tries, as its remedy says; it failed the job."""
    client = Client(*[refusal("conflict")] * 3, "page")
    assert ask(make(client, Heart())) == "page"


def test_pauses_grow_to_a_maximum() -> None:
    assert [backoff_s(2.0, times) for times in range(6)] == [2, 4, 8, 16, MAX_PAUSE_S, MAX_PAUSE_S]
    assert backoff_s(2.0, 10_000) == MAX_PAUSE_S
