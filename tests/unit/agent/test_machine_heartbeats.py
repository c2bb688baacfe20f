"""Test a rented machine's signs of life: what they report, the drain that they answer, and the dead man."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineHeartbeat, MachineOrders, MachineState
from gpu_client.agent.app.machine_heartbeats import ALONE_S, HUNG_S, MachineHeartbeats
from gpu_client.agent.app.shutdown import ShutdownLevel, ShutdownRequest
from gpu_client.transport.errors import BatonError, Unreachable
from tests.kits.clock import Clock
from tests.kits.waiting import soon
from tests.unit.agent.agent_kit import JOB_ID, foreign, orders, refusal

DOWN = Unreachable("no route")


class Machine:
    """Heartbeats to a scripted control plane, on a clock that only the test moves."""

    def __init__(self, *answers: MachineOrders | Exception) -> None:
        self.answers = list(answers) or [orders()]
        self.reported: list[str | None] = []
        self.clock = Clock()
        self.stop = ShutdownRequest(self.clock)
        self.given_back_at: list[float] = []
        self.heartbeats = MachineHeartbeats(
            self._send,
            self.stop,
            interval_s=60,
            give_back=lambda: self.given_back_at.append(self.clock()),
            clock=self.clock,
        )

    def _send(self, request: MachineHeartbeat) -> MachineOrders:
        self.reported.append(request.job_id)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def beat(self, times: int = 1) -> None:
        """Send heartbeats with their pauses."""
        for _ in range(times):
            self.clock.advance(self.heartbeats.beat())

    def alone_after_s(self, beat: Callable[[], float] | None = None) -> float:
        """Beat until the agent gives up; return the seconds until then."""
        began = self.clock()
        while pause_s := (beat or self.heartbeats.beat)():
            if self.stop.is_set():
                return self.clock() - began
            self.clock.advance(pause_s)
            assert self.clock() - began < 10_000
        raise AssertionError("a pause of 0 s")


def test_it_reports_the_job_that_the_machine_holds() -> None:
    machine = Machine()
    machine.beat()
    with machine.heartbeats.holding(JOB_ID, lease_s=90):
        machine.beat()
    machine.beat()
    assert machine.reported == [None, JOB_ID, None]
    assert not machine.stop.is_set()


def test_the_answer_sets_the_interval() -> None:
    machine = Machine(orders(heartbeat_interval_s=7), orders(heartbeat_interval_s=0))
    assert machine.heartbeats.beat() == 7
    assert machine.heartbeats.beat() == 1, "no answer makes the thread spin"


def test_a_drain_is_a_preemption_with_its_reason() -> None:
    machine = Machine(orders(state=MachineState.DRAINING, drain=True, reason="the budget is spent"))
    machine.beat()
    assert machine.stop.level is ShutdownLevel.DRAIN
    assert machine.stop.reason == "the fleet takes this machine back: the budget is spent"
    assert machine.stop.remaining_s() is None, "the checkpoint gets the grace of the job"
    machine.beat(3)
    assert machine.stop.level is ShutdownLevel.DRAIN, "a repeated order does not hurry"


@pytest.mark.parametrize(
    "error",
    [
        refusal(ErrorCode.KEY_REVOKED, 403),
        refusal(ErrorCode.KEY_EXPIRED, 403),
        refusal(ErrorCode.MACHINE_UNKNOWN, 404),
    ],
    ids=str,
)
def test_a_machine_that_was_given_back_leaves(error: BatonError) -> None:
    machine = Machine(error)
    machine.beat()
    assert machine.stop.reason.startswith("the fleet has given this machine back")


@pytest.mark.parametrize(
    "error", [DOWN, foreign(403), foreign(404), refusal(ErrorCode.CONFLICT), refusal("invalid_value", 422)], ids=str
)
def test_the_dead_man_waits_for_alone_s(error: BatonError, caplog: pytest.LogCaptureFixture) -> None:
    """Refusals by a proxy are no news of this machine."""
    machine = Machine(orders(alone_s=600), error)
    with caplog.at_level(logging.INFO):
        machine.beat()
        assert 600 <= 60 + machine.alone_after_s() <= 600 + 60
    assert machine.stop.reason == "the control plane has not answered for 600 s"
    assert caplog.text.count("no answer to this machine's heartbeat") == 1, "an outage is one line, not a thousand"


def test_without_any_answer_the_dead_man_waits_as_long_as_he_knows() -> None:
    assert ALONE_S <= Machine(DOWN).alone_after_s() <= ALONE_S + 60


def test_an_answer_in_time_makes_the_outage_harmless() -> None:
    machine = Machine(*[DOWN] * 15, orders(), *[DOWN] * 15, orders())
    machine.beat(32)
    assert machine.clock() - 1000 > ALONE_S
    assert not machine.stop.is_set()


def test_the_dead_man_waits_for_the_end_of_a_running_lease() -> None:
    """Answers to the job's heartbeats are answers, too: their renewed lease holds the dead man off."""
    machine = Machine(DOWN)
    with machine.heartbeats.holding(JOB_ID, lease_s=300):
        for _ in range(10):
            machine.clock.advance(200)
            machine.heartbeats.renew(300)
            machine.heartbeats.beat()
        assert not machine.stop.is_set()
        assert 300 + ALONE_S <= machine.alone_after_s() <= 300 + ALONE_S + 60


def test_a_retry_comes_soon_and_then_each_interval() -> None:
    machine = Machine(DOWN)
    pauses = [machine.heartbeats.beat() for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 2 and pauses[-1] == 60


def test_a_change_is_reported_at_once_and_the_last_one_before_the_end() -> None:
    """The thread itself: its pauses last a minute, yet each change of the job goes out within milliseconds."""
    machine = Machine()
    with machine.heartbeats:
        soon(lambda: machine.reported == [None])
        with machine.heartbeats.holding(JOB_ID, lease_s=90):
            soon(lambda: machine.reported == [None, JOB_ID])
    assert machine.reported == [None, JOB_ID, None]
    assert "machine-heartbeats" not in {thread.name for thread in threading.enumerate()}


def test_the_dead_man_needs_no_error_of_the_api() -> None:
    machine = Machine(ValueError("a bug"))
    assert ALONE_S <= machine.alone_after_s(machine.heartbeats._beat_safely) <= ALONE_S + 60


def test_an_error_in_the_agent_does_not_end_the_dead_man(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    failures = [RuntimeError("a bug")]
    send = machine.heartbeats._send

    def failing(request: MachineHeartbeat) -> MachineOrders:
        if failures:
            raise failures.pop()
        return send(request)

    machine.heartbeats._send = failing
    with machine.heartbeats:
        soon(lambda: not failures)
        with machine.heartbeats.holding(JOB_ID, lease_s=90):
            soon(lambda: machine.reported == [JOB_ID])
    assert "a bug" in caplog.text


def test_a_machine_whose_agent_hangs_after_the_drain_is_given_back_by_force() -> None:
    for answer in (DOWN, orders(state=MachineState.DRAINING, drain=True)):
        machine = Machine(answer)
        decided_s = machine.alone_after_s()
        began = machine.clock() - decided_s
        while machine.clock() < began + decided_s + HUNG_S:
            assert machine.given_back_at == []
            machine.beat()
        machine.beat()
        assert machine.given_back_at[:1] >= [began + decided_s + HUNG_S]


def test_a_machine_that_works_is_not_given_back() -> None:
    machine = Machine()
    machine.beat(100)
    assert (machine.clock() > 2 * HUNG_S, machine.given_back_at) == (True, [])
