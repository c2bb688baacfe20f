"""Provide each driver with a provider behind it whose clock, faults and machines a test controls."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from pydantic import SecretStr

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.money import Budget
from baton.contract.fleets.registries import RegistryLogin
from functions.fleet.drivers.loopback import LoopbackDriver, LoopbackFaults, LoopbackMarket
from functions.fleet.drivers.protocol import CreateIntent, CreateResult, Driver
from functions.fleet.records import Inventory
from tests.conformance.drivers.driven_ec2 import Ec2Driven
from tests.conformance.drivers.driven_runpod import RunpodDriven
from tests.conformance.drivers.driven_salad import SaladDriven
from tests.conformance.drivers.driven_ssh import SshDriven
from tests.conformance.drivers.driven_vast import VastDriven
from tests.kits.clock import Clock
from tests.twins.provider import VirtualProvider

PREFIX = "dep10000-"
SPEC = FleetSpec(
    name="nights", providers=["loopback"], disk_gib=1, max_usd_per_hour=5, max=4, budget=Budget(total_usd=100)
)
IMAGE = "registry.example/baton-agent:0.1.0"
SECRET = "baton_enrolment_verysecret"
PASSWORD = "ghp_registry5e1f0c2d9b7a4e3f"
LOGIN = RegistryLogin(username="acme", password=SecretStr(PASSWORD))
ENVIRONMENT = MappingProxyType({"BATON_API_URL": "http://control.plane", "BATON_ENROLMENT_TOKEN": SECRET})


class DrivenProvider(Protocol):
    """A provider under test."""

    @property
    def driver(self) -> Driver: ...

    @property
    def charges(self) -> bool:
        """False for a provider whose bill comes too late for a receipt: `charged_usd` is None."""

    def now(self) -> int:
        """Return the provider's time."""

    def advance(self, seconds: int) -> None: ...

    def inject(self, fault: str) -> None:
        """Let the next suitable call meet a fault, by the names of `tests.twins.provider.Faults`."""

    def existing(self) -> list[str]:
        """Return the tokens of the machines that exist, without the driver."""

    def end(self, token: str) -> None:
        """End a machine without a destroy."""

    def close(self) -> None: ...


class VirtualDriven:
    """The provider in virtual time, which is its own driver."""

    charges = True

    def __init__(self, directory: Path) -> None:
        self.driver = VirtualProvider(now=1_700_000_000)

    def now(self) -> int:
        return self.driver.now

    def advance(self, seconds: int) -> None:
        self.driver.now += seconds

    def inject(self, fault: str) -> None:
        setattr(self.driver.faults, fault, 1)

    def existing(self) -> list[str]:
        return [one.token for one in self.driver.alive()]

    def end(self, token: str) -> None:
        self.driver.vanish(next(one for one in self.driver.alive() if one.token == token))

    def close(self) -> None:
        for one in self.driver.alive():
            self.driver.destroy(one.handle)


class LoopbackDriven:
    """The loopback driver, with a shell in place of the agent."""

    charges = True
    PROGRAM = ("/bin/sh", "-c", "echo started; exec sleep 600")

    def __init__(self, directory: Path, program: tuple[str, ...] = PROGRAM) -> None:
        self.clock = Clock(1_700_000_000)
        self.directory = directory
        self.driver = LoopbackDriver(directory, now=self.clock, program=program)

    def now(self) -> int:
        return int(self.clock())

    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)

    def inject(self, fault: str) -> None:
        LoopbackMarket(faults=LoopbackFaults(**{fault: 1})).save(self.directory)

    def existing(self) -> list[str]:
        return [one.token for one in self.driver.machines() if self.driver.runs(one)]

    def pid_of(self, token: str) -> int:
        return next(one.pid for one in self.driver.machines() if one.token == token)

    def end(self, token: str) -> None:
        os.killpg(self.pid_of(token), signal.SIGKILL)

    def close(self) -> None:
        LoopbackMarket().save(self.directory)
        for one in self.driver.machines():
            self.driver.destroy(one.handle)


PROVIDERS: dict[str, Callable[[Path], DrivenProvider]] = {
    "virtual": VirtualDriven,
    "loopback": LoopbackDriven,
    "runpod": RunpodDriven,
    "ec2": Ec2Driven,
    "salad": SaladDriven,
    "ssh": SshDriven,
    "vast": VastDriven,
}


def create(
    provider: DrivenProvider,
    token: str = f"{PREFIX}nights-1",
    environment: Mapping[str, str] = ENVIRONMENT,
    login: RegistryLogin | None = None,
) -> CreateResult:
    """Create a machine on the cheapest offer."""
    offer = min(provider.driver.quote(SPEC), key=lambda one: one.usd_per_hour)
    intent = CreateIntent(
        token=token,
        offer=offer,
        image=IMAGE,
        disk_gib=SPEC.disk_gib,
        environment=environment,
        max_usd_per_hour=SPEC.max_usd_per_hour,
        login=login,
    )
    return provider.driver.create(intent)


def inventory(provider: DrivenProvider, prefix: str = PREFIX) -> Inventory:
    """List the machines of the deployment."""
    return provider.driver.inventory(prefix, provider.now())
