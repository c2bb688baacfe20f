"""Build the drivers of the providers that a deployment has configured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from functions.fleet.drivers.protocol import Driver


def build_drivers(*, loopback_directory: str | None, now: Callable[[], float]) -> dict[str, Driver]:
    """Return the drivers by the names of their providers. `loopback_directory`: None for no loopback provider."""
    if loopback_directory is None:
        return {}
    # The deployed functions do not load the driver that starts processes.
    from functions.fleet.drivers.loopback import LoopbackDriver

    return {LoopbackDriver.name: LoopbackDriver(Path(loopback_directory), now=now)}
