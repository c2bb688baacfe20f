"""Clocks of providers that differ by five minutes. Workers send no times, therefore their clocks do not matter."""

from __future__ import annotations

import pytest

from baton.contract.fleets.fleet import MachineState as State
from tests.twins.provider import Faults
from tests.unit.fleet.test_fleet_nights import make_night, require_clean_end


@pytest.mark.parametrize("skew_s", [-300, 300])
def test_the_clock_of_a_provider_decides_nothing(skew_s: int) -> None:
    night = make_night(Faults(lost_answers=1, hidden=1))
    night.skew_s = skew_s
    night.providers["loopback"].now += skew_s
    training = night.submit(hours=1)
    night.step(100)
    assert training.left_s <= 0
    assert len(night.providers["loopback"].creates) == 1
    (machine,) = night.machines()
    assert machine.state is State.GONE and machine.created_at is not None
    assert machine.requested_at is not None and machine.created_at - machine.requested_at <= 120
    require_clean_end(night)
