"""The state machine of packs, on the twins in memory and, more briefly, on the emulated cloud."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from functions.local.emulator import Emulator
from tests.kits.api.harness import emulated_api, memory_api
from tests.properties.packs_machine import PackMachine
from tests.properties.profiles import machine_settings


class MemoryPackMachine(PackMachine):
    """Packs on dictionaries under one lock."""

    fresh = staticmethod(memory_api)


TestPackMachine = MemoryPackMachine.TestCase
TestPackMachine.settings = machine_settings(runs=100, steps=25)


@pytest.mark.emulator
def test_packs_on_the_emulated_cloud(emulator: Emulator) -> None:
    machine = type("EmulatedPackMachine", (PackMachine,), {"fresh": staticmethod(lambda: emulated_api(emulator))})
    run_state_machine_as_test(machine, settings=machine_settings(runs=3, steps=20))
