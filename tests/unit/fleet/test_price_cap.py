"""The price cap around the create: RunPod takes none, therefore the price is read before, and in each answer after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import MachineState as State
from fakes.server import FakeAnswer, FakeCall
from tests.conformance.drivers.driven_runpod import RunpodDriven
from tests.unit.fleet.night import TENANT, Killed
from tests.unit.fleet.rented import FOREIGN, HAPPY, RentedNight
from tests.unit.fleet.test_fleet_nights import make_night

DEAR, CAP = 5.0, 1.0
PRICES = (0.69, 0.40, 2.99, 2.49)


@pytest.fixture
def runpod(tmp_path: Path) -> Iterator[RunpodDriven]:
    driven = RunpodDriven(tmp_path)
    yield driven
    driven.close()


def set_prices(driven: RunpodDriven, *usd: float) -> None:
    for gpu, price in zip(driven.fake.gpus, usd, strict=True):
        gpu.secure = price


def rise_before(driven: RunpodDriven, patch: pytest.MonkeyPatch, step: str) -> None:
    """Let all prices rise above the cap immediately before the next `step` of the fake."""
    original: Callable[[FakeCall], FakeAnswer] = getattr(driven.fake, step)

    def rise(call: FakeCall) -> FakeAnswer:
        set_prices(driven, *[DEAR] * 4)
        return original(call)

    patch.setattr(driven.fake, step, rise)


def test_a_price_that_rises_after_the_quote_prevents_the_create(
    runpod: RunpodDriven, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = RentedNight(runpod, max_usd_per_hour=CAP, regions=["RO"])
    night.night.submit(hours=0.2)
    quote = runpod.driver.quote
    monkeypatch.setattr(runpod.driver, "quote", lambda spec: [quote(spec), set_prices(runpod, *[DEAR] * 4)][0])
    night.step()
    (failed,) = night.machines()
    assert (failed.state, failed.spent_usd, night.creates(), night.usd()) == (State.FAILED, 0, 0, 0)
    assert "costs 5.002 USD/h now, more than the cap of 1 USD/h" in failed.reason
    monkeypatch.undo()
    set_prices(runpod, *PRICES)
    night.finish("planned requested failed", HAPPY)


def test_a_pod_whose_answer_states_a_price_above_the_cap_is_deleted_in_the_same_tick(
    runpod: RunpodDriven, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = RentedNight(runpod, max_usd_per_hour=CAP, regions=["RO"])
    night.night.submit(hours=0.2)
    rise_before(runpod, monkeypatch, "_create")
    night.step()
    (machine,) = night.machines()
    assert machine.state is State.TERMINATING and "exceeds the cap 1 USD/h" in machine.reason
    assert runpod.existing() == [FOREIGN] and night.usd() == 0
    night.step(3)
    assert night.creates() == 1 and "no offer fits" in night.waits()
    monkeypatch.undo()
    set_prices(runpod, *PRICES)
    night.finish("planned requested terminating gone", HAPPY, over_usd=2 * DEAR / 60)


def test_a_pod_whose_answer_is_lost_costs_no_more_than_a_minute_above_the_cap(
    runpod: RunpodDriven, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = RentedNight(runpod, max_usd_per_hour=CAP, regions=["RO"])
    night.night.submit(hours=0.2)
    rise_before(runpod, monkeypatch, "_create")
    runpod.inject("lost_answers")
    night.step(2)
    assert runpod.existing() == [FOREIGN] and 0 < night.usd() <= (DEAR + 0.1) / 60
    monkeypatch.undo()
    set_prices(runpod, *PRICES)
    night.finish("planned requested ambiguous terminating gone", HAPPY, over_usd=2 * DEAR / 60)


def test_a_planned_machine_is_not_created_once_the_document_lowers_the_cap() -> None:
    night = make_night()
    night.submit(hours=1)

    def die(call: str) -> None:
        if call == "issue":
            raise Killed

    night.interrupt = die
    night.step()
    night.now += 40  # The lease of the dead controller is over, the deadline of the plan is not.
    night.interrupt = lambda _: None
    (fleet,) = night.store.fleets()
    spec = fleet.spec.model_copy(update={"max_usd_per_hour": 0.1})
    night.store.put_fleet(fleet.model_copy(update={"spec": spec, "version": 2}))
    night.step(2)
    (machine,) = night.machines()
    assert machine.state is State.FAILED and machine.reason == "the price 0.2 USD/h exceeds the cap 0.1 USD/h"
    assert night.providers["loopback"].creates == [] and night.store.ledger(TENANT, "nights").spent_usd == 0
