"""Fleets and machines of a test, stored past the controller."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState
from functions.api.operations.cloudwatch_metrics import CloudWatchMetrics
from functions.fleet.accounts import CachedAccounts
from functions.fleet.drivers.configured import ConfiguredDrivers
from functions.fleet.records import Machine, Offer
from tests.kits.api.harness import NOW, TENANT, Api
from tests.twins.accounts import MemoryAccounts

DOCUMENT: dict[str, Any] = {
    "name": "nights",
    "providers": ["loopback"],
    "max_usd_per_hour": 0.5,
    "budget": {"total_usd": 20},
}
OFFER = Offer(
    provider="loopback", ref="o1", machine_ref="h1", gpu_model="RTX 4090", vram_gib=24, disk_gib=80, usd_per_hour=0.4
)


def make_machine(token: str, state: MachineState, **changes: Any) -> Machine:
    """Make a machine of the fleet `nights`; an ended machine has the values of a receipt."""
    gone = {"spent_usd": 0.31, "absences": [NOW + 3600, NOW + 3660]} if state is MachineState.GONE else {}
    fields: dict[str, Any] = {
        "id": token,
        "tenant": TENANT,
        "fleet": "nights",
        "version": 1,
        "state": state,
        "since": NOW,
        "offer": OFFER,
        "cap_usd_per_hour": 0.5,
        "handle": f"h-{token}",
        "requested_at": NOW,
        "created_at": NOW,
        "ends_by": NOW + 24 * 3600,
        "usd_per_hour": 0.4,
        "reserved_usd": 0.0 if state.ended else 0.4,
        **gone,
    }
    return Machine(**{**fields, **changes})


def put_machine(api: Api, machine: Machine) -> None:
    write(api, machine=machine)


def write(api: Api, **values: Any) -> None:
    """Write as the controller does."""
    store = api.context.fleet
    assert store is not None
    fence = store.acquire("test", api.clock.now(), 1)
    assert fence is not None
    store.write(fence, TENANT, "nights", **values)
    store.release(fence)


def machine_of(api: Api, token: str) -> Machine:
    """Return the stored machine."""
    store = api.context.fleet
    assert store is not None
    found = store.machine(TENANT, "nights", token)
    assert found is not None
    return found


def deploy_controller(api: Api, patch: pytest.MonkeyPatch) -> None:
    """Let the deployed function run on the API's stores and clock, with the drivers of the stored accounts."""
    # The import of a handler starts the log, which the replay of an event must not have.
    from functions.handlers import fleet

    accounts = CachedAccounts(MemoryAccounts(), api.clock.now)
    drivers = ConfiguredDrivers(accounts, loopback_directory=None, now=api.clock.now)
    api.context = replace(api.context, accounts=accounts, drivers=drivers)
    for name, value in {
        "context": api.context,
        "store": api.context.fleet,
        "accounts": accounts,
        "drivers": drivers,
        "metrics": CloudWatchMetrics(None, sys.stderr, api.clock),
        "now": api.clock.now,
    }.items():
        patch.setattr(fleet, name, value)
    patch.setitem(api.context.settings.__dict__, "fleet_api_url", "https://api.example.com")
