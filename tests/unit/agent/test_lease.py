"""Test the lease keeper: proof, loss, and that nothing ends or spins its thread."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from baton.contract.worker.calls import HeartbeatRequest
from baton.contract.worker.control import Directive
from baton.contract.worker.lease_grace import RETRY_PAUSES
from gpu_client.agent.attempt import lease as lease_module
from gpu_client.agent.attempt.lease import PROVEN_SHARE, RETRY_MIN_S, LeaseKeeper, LeaseLoss
from gpu_client.transport.errors import UnexpectedAnswer, Unreachable
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import Heart, foreign, make_answer, make_item, refusal


class Notes:
    """Records the keeper's callbacks."""

    def __init__(self) -> None:
        self.lost: list[LeaseLoss] = []
        self.directives: list[tuple[Directive, str]] = []


def make_keeper(
    heart: Heart, clock: Any = None, *, status: Any = HeartbeatRequest, **item: Any
) -> tuple[LeaseKeeper, Notes]:
    notes = Notes()
    clock = clock or Clock()
    keeper = LeaseKeeper(
        make_item(**item),
        heart,
        status,
        on_directive=lambda directive, reason: notes.directives.append((directive, reason)),
        on_lost=notes.lost.append,
        claimed_at=clock(),
        clock=clock,
        rng=random.Random(1),
    )
    return keeper, notes


def proven(keeper: LeaseKeeper) -> bool:
    return keeper.proven


def test_a_claim_is_proof_for_a_while_counted_from_before_it_was_sent() -> None:
    clock, heart = Clock(), Heart()
    keeper, _ = make_keeper(heart, clock)
    clock.now += 90 * PROVEN_SHARE - 0.1
    assert proven(keeper)
    assert keeper.prove()
    assert heart.requests == []
    clock.now += 0.2
    assert not proven(keeper)
    assert keeper.prove(), "an old proof is renewed by asking"
    assert len(heart.requests) == 1
    assert proven(keeper)


def test_proof_counts_from_the_sending_of_the_heartbeat_not_from_its_answer() -> None:
    clock, heart = Clock(), Heart()
    keeper, _ = make_keeper(heart, clock)
    clock.now += 80
    heart.before = lambda: setattr(clock, "now", clock.now + 50)  # an answer that takes 50 s
    assert keeper.beat()
    assert proven(keeper)
    clock.now += 90 * PROVEN_SHARE - 50 + 0.1
    assert not proven(keeper)


def test_a_machine_that_slept_through_its_answer_has_no_proof() -> None:
    clock, heart = Clock(), Heart()
    keeper, _ = make_keeper(heart, clock)
    heart.before = lambda: setattr(clock, "now", clock.now + 7200)
    assert keeper.beat()
    assert not proven(keeper)


def test_a_wrong_wall_clock_is_irrelevant(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour before or after the server's time, and jumping."""
    clock, heart = Clock(), Heart()
    keeper, _ = make_keeper(heart, clock, lease_expires_at=1)
    for wall in (0.0, 1_790_003_600.0, 1_789_996_400.0, 4e9):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        assert proven(keeper)
        assert keeper.beat()
        assert proven(keeper)
        clock.now += 30


def test_the_lease_follows_what_the_control_plane_grants() -> None:
    clock = Clock()
    heart = Heart(make_answer(lease_duration_s=10, heartbeat_interval_s=3))
    keeper, _ = make_keeper(heart, clock)
    assert keeper.beat()
    clock.now += 8.1
    assert not proven(keeper)
    assert 2.7 <= keeper.next_pause_s() <= 3


def test_unreachable_for_ten_heartbeats_and_back() -> None:
    clock = Clock()
    heart = Heart(*[Unreachable("down")] * 10, make_answer())
    keeper, notes = make_keeper(heart, clock)
    for failures in range(1, 11):
        clock.now += 30
        assert not keeper.beat()
        assert keeper.lost is None
        assert proven(keeper) == (failures * 30 < 90 * PROVEN_SHARE)
        assert 0 < keeper.next_pause_s() <= 30
    assert not proven(keeper)
    assert keeper.prove(), "the lease is proved again before anything is committed"
    assert proven(keeper)
    assert notes.lost == []
    assert 27 <= keeper.next_pause_s() <= 30


@pytest.mark.parametrize(
    "trouble",
    [
        Unreachable("down"),
        UnexpectedAnswer("a page of a hotel's network"),
        refusal("http_404", 404),
        refusal("not_found", 404),
        refusal("http_403", 403),
        foreign(401),
        refusal("conflict"),
        refusal("invalid_value", 422),
    ],
    ids=str,
)
def test_what_does_not_end_a_lease(trouble: BaseException) -> None:
    heart = Heart(trouble, make_answer())
    keeper, notes = make_keeper(heart)
    assert not keeper.beat()
    assert keeper.lost is None
    assert 0 < keeper.next_pause_s() <= RETRY_MIN_S
    assert keeper.beat()
    assert notes.lost == []


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("lease_lost", 409),
        ("lease_expired", 409),
        ("lease_required", 409),
        ("job_canceled", 409),
        ("job_finished", 409),
        ("job_not_running", 400),
        ("job_not_found", 404),
        ("key_revoked", 403),
        ("key_expired", 403),
        ("wrong_scope", 403),
    ],
)
def test_what_ends_a_lease(code: str, status: int) -> None:
    heart = Heart(refusal(code, status))
    keeper, notes = make_keeper(heart)
    assert not keeper.beat()
    assert [lost.code for lost in notes.lost] == [code]
    assert keeper.lost == notes.lost[0]
    assert not proven(keeper)
    assert not keeper.prove()
    assert len(heart.requests) == 1, "nothing is sent for a lost lease"


def test_cancel_is_a_loss_with_a_directive() -> None:
    keeper, notes = make_keeper(Heart(make_answer(Directive.CANCEL, reason="canceled_by_user")))
    assert not keeper.beat()
    assert notes.lost == [LeaseLoss("job_canceled", "canceled_by_user", Directive.CANCEL)]
    assert notes.directives == []


@pytest.mark.parametrize("directive", [Directive.PAUSE, Directive.CHECKPOINT])
def test_other_directives_are_passed_on_and_the_lease_holds(directive: Directive) -> None:
    keeper, notes = make_keeper(Heart(make_answer(directive, reason="why"), make_answer()))
    assert keeper.beat()
    assert keeper.beat()
    assert notes.directives == [(directive, "why")]
    assert proven(keeper)


def test_pauses_grow_after_failures_and_never_vanish() -> None:
    """The original's client answered an error with the next heartbeat at once, for ever."""
    keeper, _ = make_keeper(Heart(Unreachable("down")), heartbeat_interval_s=24)
    pauses = []
    for _ in range(40):
        keeper.beat()
        pauses.append([keeper.next_pause_s() for _ in range(50)])
    for number, drawn in enumerate(pauses):
        ceiling = min(RETRY_MIN_S * 2**number, 24 / RETRY_PAUSES)
        assert all(ceiling / 2 <= pause <= ceiling for pause in drawn)
    assert len({round(pause, 6) for pause in pauses[-1]}) > 40, "agents must not come back in step"


def test_an_absurd_interval_does_not_make_it_spin() -> None:
    keeper, _ = make_keeper(Heart(make_answer(heartbeat_interval_s=0, lease_duration_s=0)))
    assert keeper.beat()
    assert keeper.next_pause_s() >= RETRY_MIN_S * 0.9
    assert not proven(keeper)
    keeper, _ = make_keeper(Heart(make_answer(heartbeat_interval_s=10**12)))
    assert keeper.beat()
    assert keeper.next_pause_s() <= 3600, "more than a thread can wait for would end the thread"


def test_a_report_that_cannot_be_made_does_not_cost_the_heartbeat() -> None:
    def status() -> HeartbeatRequest:
        raise OSError("the stats file is on a full disk")

    heart = Heart()
    keeper, notes = make_keeper(heart, status=status)
    assert keeper.beat()
    assert heart.requests == [HeartbeatRequest()]
    assert notes.lost == []


def test_the_thread_survives_whatever_happens_in_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RETRY_MIN_S", 0.001)
    heart = Heart(RuntimeError("a bug"), UnexpectedAnswer("?"), make_answer(Directive.PAUSE), refusal("lease_lost"))
    lost = threading.Event()

    def on_directive(_directive: Directive, _reason: str) -> None:
        raise ValueError("another bug")

    keeper = LeaseKeeper(
        make_item(heartbeat_interval_s=0),
        heart,
        HeartbeatRequest,
        on_directive=on_directive,
        on_lost=lambda _lost: lost.set(),
        claimed_at=time.monotonic(),
    )
    keeper.start()
    assert lost.wait(20), "it went on to the fourth heartbeat"
    keeper.close()
    assert len(heart.requests) == 4


def test_close_ends_the_thread_in_the_middle_of_its_pause() -> None:
    heart = Heart()
    keeper, _ = make_keeper(heart, time.monotonic)
    keeper.start()
    keeper.close()
    assert not keeper.beat(), "nothing is sent after the end"
    assert heart.requests == []
