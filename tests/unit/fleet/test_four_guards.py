"""Each of the four guards of the money bounds the bill alone: in each test the other three fail.

The account is unlimited, each job is endless, and the workers hang: they call, but obey no drain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineHeartbeat, MachineOrders
from baton.contract.fleets.fleet import MachineState as State
from fakes.vast.market import FakeAsk
from functions.fleet import lifecycle
from functions.fleet.ledger import Bound
from functions.fleet.records import Machine
from functions.fleet.ticks.tick import Tick
from gpu_client.agent.app import program
from gpu_client.agent.app.machine_heartbeats import ALONE_S, HUNG_S, MachineHeartbeats
from gpu_client.agent.app.own_machine import give_back
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.agent.app.shutdown import ShutdownRequest
from gpu_client.transport.errors import Unreachable
from tests.conformance.drivers.driven_vast import VastDriven
from tests.unit.agent.agent_kit import JOB_ID
from tests.unit.fleet.night import Night
from tests.unit.fleet.rented import RentedNight

MACHINES = 2
CAP_USD_PER_HOUR, BUDGET_USD, MAX_HOURS = 1.0, 24.0, 2.0
CHEAP, DEAR = 0.4, 5.0
"""Prices of the market, in USD/h: one host is below the cap, all others are above."""
STORAGE = 0.01
"""Bound of a disk's price, in USD per hour."""
NEVER = 2**40
LONGEST_LEASE_S = 1800


@pytest.fixture
def vast(tmp_path: Path) -> Iterator[VastDriven]:
    driven = VastDriven(tmp_path)
    yield driven
    driven.close()


def night_with(guard: str, vast: VastDriven, patch: pytest.MonkeyPatch) -> RentedNight:
    """Return a night in which no guard works besides `guard`."""
    cap = CAP_USD_PER_HOUR if guard == "cap" else 1000
    if guard != "ledger":
        endless = Bound(name="total_usd", period="", cap_usd=math.inf, spent_usd=0)
        patch.setattr(Tick, "tightest", lambda *_: (endless, math.inf))
    if guard != "deadline":
        patch.setattr(lifecycle, "end_of", lambda *_: NEVER)
        patch.setattr(lifecycle, "DEADLINES", {})
        patch.setattr(lifecycle, "DEAD_WORKER_S", NEVER)
    work = Night._worker

    def hang(night: Night, machine: Machine, *more: Any, **options: Any) -> Machine:
        if machine.state in (State.BUSY, State.DRAINING):
            return machine.model_copy(update={"seen_at": night.now})
        return work(night, machine, *more, **options)

    # The workers of a night have no dead man.
    patch.setattr(Night, "_worker", hang)
    made = RentedNight(
        vast,
        market="on-demand",
        max=MACHINES,
        max_usd_per_hour=cap,
        max_hours=MAX_HOURS,
        budget={"total_usd": BUDGET_USD},
    )
    made.fake.credit = math.inf
    made.fake.asks = [FakeAsk(at, at, usd_per_hour=DEAR if at else CHEAP) for at in range(20)]
    for _ in range(MACHINES):
        made.night.submit(hours=NEVER)
    return made


def rented(night: RentedNight) -> list[str]:
    """Return the handles of all machines that the fleet has ever rented."""
    return [one.handle for one in night.fake.instances if one.handle != night.foreign]


def test_without_any_guard_the_bill_grows_for_ever(vast: VastDriven, monkeypatch: pytest.MonkeyPatch) -> None:
    night = night_with("", vast, monkeypatch)
    night.step(5 * 60)
    night.night.trainings.clear()
    early = night.usd()
    assert early > BUDGET_USD and early > 5 * MACHINES * CAP_USD_PER_HOUR
    night.step(5 * 60)
    assert night.usd() == pytest.approx(2 * early, rel=0.02)
    assert max(map(night.fake.meter.usd, rented(night))) > 9 * DEAR
    night.skip(24 * 3600)
    assert night.usd() > early + 24 * DEAR
    assert len(night.billing()) == 1 + MACHINES


def test_the_price_cap_alone_bounds_the_price(vast: VastDriven, monkeypatch: pytest.MonkeyPatch) -> None:
    night = night_with("cap", vast, monkeypatch)
    night.step(5 * 60)
    assert 0 < night.usd() <= 5 * (CHEAP + STORAGE)
    assert len(rented(night)) == 1
    assert "sells nothing now that the document permits" in night.waits()


def test_the_ledger_alone_bounds_the_sum(vast: VastDriven, monkeypatch: pytest.MonkeyPatch) -> None:
    night = night_with("ledger", vast, monkeypatch)
    night.step(8 * 60)
    assert 0.9 * BUDGET_USD < night.usd() <= BUDGET_USD
    assert night.billing() == [night.foreign]
    assert "total_usd has" in night.waits()


@pytest.mark.parametrize(
    ("works_until", "hours"),
    [(None, MAX_HOURS), (State.BOOTING, 0.25), (State.BUSY, 1)],
    ids=["hangs", "boots", "silent"],
)
def test_the_deadline_alone_bounds_the_life_of_each_machine(
    vast: VastDriven, monkeypatch: pytest.MonkeyPatch, works_until: State | None, hours: float
) -> None:
    """Boot, grace of the drain and one tick come on top. works_until: state in which the worker calls no more."""
    night = night_with("deadline", vast, monkeypatch)
    work = Night._worker

    def fall_silent(night: Night, machine: Machine, *more: Any, **options: Any) -> Machine:
        return machine if machine.state is works_until else work(night, machine, *more, **options)

    monkeypatch.setattr(Night, "_worker", fall_silent)
    night.step(3 * 60)
    night.night.trainings.clear()
    night.step(3 * 60)
    assert len(rented(night)) >= 2 * MACHINES
    assert max(map(night.fake.meter.usd, rented(night))) <= (DEAR + STORAGE) * (hours + 10 / 60)
    assert night.billing() == [night.foreign]


@pytest.mark.parametrize("hangs", [False, True])
def test_the_dead_man_alone_ends_the_bill(vast: VastDriven, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    """No tick runs any more, and no call of the container is answered. hangs: the agent does not end its job."""
    night = night_with("dead man", vast, monkeypatch)
    night.fake.asks = night.fake.asks[1:2]
    night.step_until(State.BUSY)
    before = night.usd()
    (owner,) = [one for one in night.fake.instances if one.handle != night.foreign]
    container = {**owner.environment, "VAST_URL": night.fake.url}

    def call(_: MachineHeartbeat) -> MachineOrders:
        raise Unreachable("no route")

    def work(stop: ShutdownRequest) -> None:
        heartbeats = MachineHeartbeats(
            call, stop, interval_s=60, give_back=partial(give_back, container), clock=vast.clock
        )
        with heartbeats.holding(JOB_ID, LONGEST_LEASE_S):
            while night.billing() != [night.foreign] and (hangs or not stop.is_set()):
                night.skip(math.ceil(heartbeats.beat()))
                assert night.usd() < before + 24 * DEAR, "the container never ends its bill"

    def run(_: AgentSettings, stop: ShutdownRequest) -> int:
        work(stop)
        return 0

    if hangs:
        work(ShutdownRequest(vast.clock))
    else:
        monkeypatch.delenv("BATON_API_KEY", raising=False)
        for name, value in {**container, "BATON_API_URL": "http://127.0.0.1:9"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(program, "_run", run)
        assert program.main() == 0
    assert night.billing() == [night.foreign]
    billed = night.usd()
    alone_s = LONGEST_LEASE_S + ALONE_S + (HUNG_S if hangs else 0) + 2 * 60
    assert billed - before <= (DEAR + STORAGE) * alone_s / 3600
    night.skip(24 * 3600)
    assert night.usd() == pytest.approx(billed)
