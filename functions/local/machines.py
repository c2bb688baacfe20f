"""The rented machines at the end of the local stack: name those that go on, or end those that no later stack knows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from baton.contract.fleets.fleet import MachineState
from functions.fleet.drivers.protocol import Driver
from functions.fleet.records import Machine
from functions.fleet.store import DamagedRecord, FleetStore
from functions.fleet.ticks.tick import FORESEEN, NO_ANSWER

logger = logging.getLogger("baton.fleet")

TRIES_S = 120.0
"""Time for which a provider is asked again after the last machine whose end it accepted. A machine of EC2 is listed for
one or two minutes after that."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
"""Pause between the first two lists of a provider, which doubles, and its limit."""


def end_machines(
    drivers: Mapping[str, Driver],
    prefix: str,
    pause: Callable[[float], object] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Destroy the machines whose token begins with `prefix`, until each provider's list is complete and empty."""
    for name, driver in drivers.items():
        left = _end_machines(driver, prefix, pause, now)
        if left:
            told = "machines at %s may still run and cost money, %s: end them at the provider; the names begin with %s"
            logger.error(told, name, left, prefix)


def list_machines(store: FleetStore, damaged: list[DamagedRecord]) -> list[Machine]:
    """Return the machines of all fleets whose providers may bill them; append fleets without readable records."""
    found: list[Machine] = []
    for fleet in store.fleets(damaged=damaged):
        try:
            found += store.machines(fleet.tenant, fleet.spec.name)
        except DamagedRecord as error:
            damaged.append(error)
    return [one for one in found if not one.state.ended and one.state is not MachineState.PLANNED]


def describe_machines(machines: Sequence[Machine], damaged: Sequence[DamagedRecord] = ()) -> str:
    """Return what a user who ends the stack must know about machines that go on; empty if there can be none."""
    return "\n".join([*filter(None, [_describe(machines)]), *(f"{one}; its machines go on" for one in damaged)])


def _describe(machines: Sequence[Machine]) -> str:
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


def _end_machines(driver: Driver, prefix: str, pause: Callable[[float], object], now: Callable[[], float]) -> str:
    """Destroy all listed machines until none is listed; return which may be left, empty for none."""
    interval_s = driver.min_interval_s.get("destroy", 0.0)
    left, accepted, until, pause_s = "unknown ones", set[str](), now() + TRIES_S, FIRST_PAUSE_S
    while True:
        try:
            listed = driver.inventory(prefix, 0)
        except NO_ANSWER as error:
            _warn(f"the machines at {driver.name} cannot be listed yet", error)
        else:
            if listed.complete and not listed.sightings:
                return ""
            left = ", ".join(one.handle for one in listed.sightings) or "unknown ones"
            for machine in listed.sightings:
                pause(interval_s)
                if _destroy(driver, machine.handle) and machine.handle not in accepted:
                    accepted.add(machine.handle)
                    until = now() + TRIES_S
        if now() >= until:
            return left
        pause(max(interval_s, pause_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _destroy(driver: Driver, handle: str) -> bool:
    """Ask for the end of one machine. One that cannot be destroyed must not keep the others alive."""
    try:
        return driver.destroy(handle)
    except NO_ANSWER as error:
        _warn(f"machine {handle} at {driver.name} cannot be given back yet", error)
        return False


def _warn(told: str, error: Exception) -> None:
    logger.warning("%s: %s", told, error, exc_info=None if isinstance(error, FORESEEN) else error)
