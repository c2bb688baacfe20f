"""Groups that rules scale, under disturbance: each decision is carried out once, within its bounds."""

from __future__ import annotations

from tests.properties.profiles import machine_settings
from tests.properties.scaling_machine import ScaledGroup

TestScaledGroup = ScaledGroup.TestCase
TestScaledGroup.settings = machine_settings(runs=40, steps=20)


def test_a_copy_that_is_not_created_yet_does_not_replace_a_job() -> None:
    """The function dies between the decision and the copies; the other rule shrinks the group before the sweep."""
    state = ScaledGroup()
    state.begin()
    state.heartbeat(by=0, wants=(1.0, 0.0), dies_at=2, behind=False, between="", claimed=False)
    state.bounds_hold()
    state.heartbeat(by=1, wants=(0.0, 1.0), dies_at=0, behind=False, between="", claimed=False)
    state.bounds_hold()
    state.teardown()
