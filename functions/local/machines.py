"""End the rented machines of a control plane that keeps no state: no later one knows them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from functions.fleet.drivers.protocol import Driver, ProviderRefused, ProviderUnavailable

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
