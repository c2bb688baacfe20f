"""Run the state machines on the emulated DynamoDB: fewer steps, real conditions and transactions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis.stateful import run_state_machine_as_test

from functions.local.emulator import Emulator
from tests.kits.clouds.store_sets import Cloud, MinistackClients
from tests.properties.job_machine import JobMachine
from tests.properties.profiles import machine_settings
from tests.properties.tokens_machine import TokenMachine

pytestmark = pytest.mark.emulator


@pytest.fixture
def fresh(emulator: Emulator) -> Callable[[], Cloud]:
    """Return a function that makes the real stores, on tables of their own."""
    return MinistackClients.of(emulator).cloud


def test_jobs(fresh: Callable[[], Cloud]) -> None:
    machine = type("DynamoJobMachine", (JobMachine,), {"fresh": staticmethod(fresh)})
    run_state_machine_as_test(machine, settings=machine_settings(runs=4, steps=25))


def test_tokens(fresh: Callable[[], Cloud]) -> None:
    machine = type("DynamoTokenMachine", (TokenMachine,), {"fresh": staticmethod(fresh)})
    run_state_machine_as_test(machine, settings=machine_settings(runs=4, steps=25))
