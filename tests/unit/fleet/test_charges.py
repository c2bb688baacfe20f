"""A provider's charge for an ended machine that is far from the observed cost is an event of the fleet."""

from __future__ import annotations

import pytest

from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.drivers.protocol import ProviderUnavailable
from functions.fleet.ledger import describe_charge
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import spec
from tests.unit.fleet.test_machine_states import make_machine


def ended_night(monkeypatch: pytest.MonkeyPatch, factor: float | None) -> tuple[Night, list[str]]:
    """Play a night whose provider charges `factor` times its meter, None for no answer; return the told charges."""
    provider = VirtualProvider()
    charge = provider.charged_usd

    def charged_usd(handle: str) -> float | None:
        if factor is None:
            raise ProviderUnavailable("502")
        charged = charge(handle)
        return None if charged is None else charged * factor

    monkeypatch.setattr(provider, "charged_usd", charged_usd)
    night = Night(spec(), {"loopback": provider})
    night.submit(hours=5)
    night.step(6 * 60)
    events = night.store.events(TENANT, night.spec.name, limit=1000)
    return night, [one.reason for one in events if one.type == "charge.differs"]


@pytest.mark.parametrize("factor", [1.0, 1.04, 0.97, None])
def test_a_charge_near_the_observed_cost_tells_nothing(monkeypatch: pytest.MonkeyPatch, factor: float | None) -> None:
    night, told = ended_night(monkeypatch, factor)
    assert [one.state for one in night.machines()] == [State.GONE] and told == []


@pytest.mark.parametrize(("factor", "share"), [(1.5, "50 % more"), (0.5, "50 % less")])
def test_a_charge_far_from_the_observed_cost_is_told_once(
    monkeypatch: pytest.MonkeyPatch, factor: float, share: str
) -> None:
    night, (told,) = ended_night(monkeypatch, factor)
    (machine,) = night.machines()
    assert machine.charged_usd is not None
    assert told == (
        f"loopback charges {machine.charged_usd:.4f} USD, {share} than the observed {machine.spent_usd:.4f} USD; "
        "compare the receipt with the provider's bill"
    )


@pytest.mark.parametrize(
    ("spent_usd", "charged_usd", "told"),
    [
        (0.02, 0.03, False),
        (0.02, 0.035, True),
        (1.0, 1.04, False),
        (1.0, 1.06, True),
        (1.0, 0.94, True),
        (1.0, None, False),
        (0.0, 0.03, True),
    ],
)
def test_two_minutes_or_a_twentieth_are_no_difference(spent_usd: float, charged_usd: float | None, told: bool) -> None:
    """A tick sees begin and end of a machine a minute late each."""
    machine = make_machine(State.GONE, spent_usd=spent_usd, charged_usd=charged_usd, usd_per_hour=0.36)
    assert bool(describe_charge(machine)) == told
