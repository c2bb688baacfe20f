"""The rented machines at the end of the local stack: name those that go on, or end those that no later stack knows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from baton.contract.fleets.fleet import MachineState
from functions.fleet.drivers.protocol import Driver, ProviderRefused, ProviderUnavailable
from functions.fleet.records import Machine
from functions.fleet.store import FleetStore

logger = logging.getLogger("baton.fleet")

ROUNDS = 20
"""Rounds of destroys at one provider. What is left then ends by itself, because no control plane answers any more."""


def end_machines(drivers: Mapping[str, Driver], prefix: str, pause: Callable[[float], object] = time.sleep) -> None:
    """Destroy the machines whose token begins with `prefix`, until each provider's list is complete and empty."""
    for name, driver in drivers.items():
        interval_s = max(driver.min_interval_s.values(), default=0.0)
        for _ in range(ROUNDS):
            if _is_empty(driver, prefix, lambda: pause(interval_s)):  # noqa: B023 - called before the next provider
                break
        else:
            logger.error("machines at %s may still run; `%s...` is the name of each", name, prefix)


def list_machines(store: FleetStore) -> list[Machine]:
    """Return the machines of all fleets whose providers may bill them."""
    return [
        machine
        for fleet in store.fleets()
        for machine in store.machines(fleet.tenant, fleet.spec.name)
        if not machine.state.ended and machine.state is not MachineState.PLANNED
    ]


def describe_machines(machines: Sequence[Machine]) -> str:
    """Return what a user who ends the stack must know about machines that go on; empty without machines."""
    if not machines:
        return ""
    usd_per_hour = sum(one.usd_per_hour for one in machines)
    number = "1 machine is" if len(machines) == 1 else f"{len(machines)} machines are"
    names = [f"  {one.id}  {one.provider}  {one.usd_per_hour:.2f} USD/h" for one in machines]
    fleets = ", ".join(sorted({one.fleet for one in machines}))
    return "\n".join(
        [
            f"{number} still rented, {usd_per_hour:.2f} USD/h:",
            *names,
            "A machine goes on without the control plane, and costs money, until its job's lease has ended and 15 "
            "minutes have passed without an answer; a machine of Salad does not end itself.",
            f"To end the machines: start the control plane again, then run `baton fleet stop NAME` ({fleets}).",
        ]
    )


def _is_empty(driver: Driver, prefix: str, pause: Callable[[], object]) -> bool:
    """Ask for the end of each listed machine; return True for a complete list without a machine."""
    try:
        listed = driver.inventory(prefix, 0)
        for machine in listed.sightings:
            pause()
            driver.destroy(machine.handle)
    except (ProviderUnavailable, ProviderRefused) as error:
        logger.warning("machines cannot be given back yet: %s", error)
        pause()
        return False
    return listed.complete and not listed.sightings
