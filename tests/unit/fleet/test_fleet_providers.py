"""Several providers and several fleets in one tick: nobody waits for a provider that cannot serve."""

from __future__ import annotations

from typing import Any

import pytest

from functions.fleet.drivers.protocol import ProviderRefused, RefusalKind
from functions.fleet.records import StoredFleet
from tests.twins.provider import Faults, VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import spec


def make_night(vast: VirtualProvider, ssh: VirtualProvider | None = None, **changes: Any) -> Night:
    """Make a night whose fleet prefers vast to ssh."""
    document: dict[str, Any] = {"providers": ["vast", "ssh"], "choose": "order", "image": "me/trainer:1", **changes}
    return Night(spec(**document), {"vast": vast, "ssh": ssh or VirtualProvider(name="ssh")})


def waits(night: Night, fleet: str = "nights") -> str:
    return night.store.ledger(TENANT, fleet).waits


def creates(night: Night) -> dict[str, int]:
    return {name: len(one.creates) for name, one in night.providers.items()}


def add_fleet(night: Night, **changes: Any) -> None:
    document = spec(**{"providers": ["vast", "ssh"], "image": "me/trainer:1", **changes})
    night.store.put_fleet(
        StoredFleet(tenant=TENANT, spec=document, version=1, created_at=night.now, updated_at=night.now)
    )


@pytest.mark.parametrize("kind", RefusalKind)
def test_a_provider_that_refuses_the_account_is_asked_once_in_a_tick(kind: RefusalKind) -> None:
    night = make_night(VirtualProvider(name="vast", create_refusal=kind))
    night.submit(hours=0.2)
    night.step()
    assert creates(night) == {"vast": 1, "ssh": 1}
    assert waits(night) == ""
    night.step(60)
    assert night.billing() == []


def test_a_fleet_tells_the_code_and_the_remedy_of_the_refusal() -> None:
    night = make_night(VirtualProvider(name="vast", create_refusal=RefusalKind.CREDIT), providers=["vast"], max=3)
    for _ in range(3):
        night.submit(hours=0.2)
    night.step()
    assert creates(night)["vast"] == 1
    assert waits(night) == "vast: provider_credit_exhausted: add credit"
    assert night.spent_usd() == 0


def test_a_refused_image_concerns_one_fleet_and_refused_credit_all() -> None:
    for kind, asked in ((RefusalKind.IMAGE, 2), (RefusalKind.CREDIT, 1)):
        night = make_night(VirtualProvider(name="vast", create_refusal=kind), providers=["vast"])
        add_fleet(night, name="second", providers=["vast"])
        night.submit(hours=0.2)
        night.step()
        assert creates(night)["vast"] == asked
        assert kind in waits(night) and kind in waits(night, "second")


def test_a_refused_key_is_told_and_the_next_provider_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    night = make_night(VirtualProvider(name="vast"))

    def refuse(*_: object) -> None:
        raise ProviderRefused(RefusalKind.KEY, "store a valid key")

    for call in ("inventory", "quote", "create"):
        monkeypatch.setattr(night.providers["vast"], call, refuse)
    night.submit(hours=0.2)
    night.step()
    assert creates(night)["ssh"] == 1
    assert any("provider_key_refused: store a valid key" in one for one in night.reports[-1].failures)


def test_a_create_call_that_fails_in_the_driver_is_ambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    vast = VirtualProvider(name="vast", faults=Faults(lost_answers=1))
    night = make_night(vast, providers=["vast"])
    real = vast.create

    def fail_after(intent: Any) -> None:
        real(intent)
        monkeypatch.undo()
        raise ValueError("the answer has no id")

    monkeypatch.setattr(vast, "create", fail_after)
    training = night.submit(hours=0.2)
    night.step(60)
    assert training.left_s <= 0 and len(vast.creates) == 1
    assert night.billing() == []


@pytest.mark.parametrize(
    "vast",
    [
        VirtualProvider(name="vast", slots=0),
        VirtualProvider(name="vast", faults=Faults(snatched=20)),
        VirtualProvider(name="vast", price=2.0),
        VirtualProvider(name="vast", price=0.9, faults=Faults()),
    ],
    ids=["no offers", "all taken", "too dear", "more than the budget"],
)
def test_a_provider_that_cannot_serve_does_not_hide_the_next_one(vast: VirtualProvider) -> None:
    night = make_night(vast, budget={"total_usd": 0.5})
    night.submit(hours=0.2)
    night.step()
    assert [one.provider for one in night.machines() if one.billed] == ["ssh"]


def test_a_spot_market_without_machines_gives_way_to_on_demand() -> None:
    vast = VirtualProvider(name="vast", spot_slots=20, faults=Faults(snatched=8))
    night = make_night(vast, providers=["vast"])
    training = night.submit(hours=0.2)
    night.step()
    assert [one.offer.spot for one in vast.creates] == [True] * 8 + [False]
    night.step(60)
    assert training.left_s <= 0 and night.billing() == []


def test_a_tick_waits_for_a_short_interval_between_two_calls() -> None:
    vast = VirtualProvider(name="vast", min_interval_s={"create": 4.5, "destroy": 3.0})
    night = make_night(vast, providers=["vast"], max=3, idle_timeout_s=0)
    for _ in range(3):
        night.submit(hours=0.2)
    night.step()
    assert creates(night)["vast"] == 3 and night.paused_s == 10
    night.time_left_s = 23
    night.submit(hours=0.2)
    night.step()
    assert night.paused_s == 10, "no time is left for a pause"


def test_two_fleets_of_one_queue_rent_one_machine_for_one_job() -> None:
    night = make_night(VirtualProvider(name="vast"))
    add_fleet(night, name="second")
    training = night.submit(hours=0.2)
    night.step(60)
    assert [one.fleet for one in night.machines()] == ["nights"]
    assert training.left_s <= 0
    assert night.billing() == []


def test_a_fleet_that_cannot_rent_leaves_the_job_to_the_next_fleet() -> None:
    night = make_night(VirtualProvider(name="vast"), max_usd_per_hour=0.1)
    add_fleet(night, name="second")
    night.submit(hours=0.2)
    night.step()
    assert [one.fleet for one in night.machines()] == ["second"]
    require = waits(night)
    assert require.startswith("no offer fits")
    night.step(60)
    assert night.billing() == []


def test_the_free_machine_of_another_fleet_serves_only_jobs_that_it_can_run() -> None:
    night = make_night(VirtualProvider(name="vast"), min=1)
    night.step(10)
    add_fleet(night, name="a-first", queues=["default", "other"])
    night.submit(hours=0.2)
    night.step()
    assert {one.fleet for one in night.machines()} == {"nights"}
