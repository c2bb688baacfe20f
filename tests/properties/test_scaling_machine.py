"""Groups that rules scale, under disturbance: what is decided is done once, within its bounds."""

from __future__ import annotations

from tests.properties.profiles import machine_settings
from tests.properties.scaling_machine import ScaledGroup

TestScaledGroup = ScaledGroup.TestCase
TestScaledGroup.settings = machine_settings(runs=40, steps=20)
