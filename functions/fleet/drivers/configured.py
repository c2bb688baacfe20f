"""Build the drivers of the providers that a deployment has configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

from baton.contract.fleets.providers import Account
from baton.contract.names import ProviderName
from functions.fleet.accounts import CachedAccounts
from functions.fleet.drivers.protocol import Driver

DRIVERS: dict[ProviderName, tuple[str, str]] = {
    "ec2": ("functions.fleet.drivers.ec2.driver", "Ec2Driver"),
    "runpod": ("functions.fleet.drivers.runpod", "RunpodDriver"),
    "ssh": ("functions.fleet.drivers.ssh.driver", "SshDriver"),
    "salad": ("functions.fleet.drivers.salad.driver", "SaladDriver"),
    "vast": ("functions.fleet.drivers.vast.driver", "VastDriver"),
}
"""Module and class of the drivers by provider. A function loads the drivers of stored accounts only."""


def build_driver(provider: ProviderName, account: Account, *, now: Callable[[], float]) -> Driver:
    """Return the driver of an account. Raises KeyError for a provider without a driver."""
    module, name = DRIVERS[provider]
    driver: Driver = getattr(import_module(module), name)(account, now=now)
    return driver


class ConfiguredDrivers(Mapping[str, Driver]):
    """Drivers by the names of their providers; reads the accounts at the first access, and notices their changes.

    accounts: None for a deployment without a store of accounts. loopback_directory: None for no loopback provider.
    now: clock of the fleets in seconds.
    """

    def __init__(
        self, accounts: CachedAccounts | None, *, loopback_directory: str | None, now: Callable[[], float]
    ) -> None:
        self._accounts = accounts
        self._now = now
        self._built: dict[ProviderName, tuple[Account, Driver]] = {}
        self._own: dict[str, Driver] = {}
        if loopback_directory is not None:
            # The deployed functions do not load the driver that starts processes.
            from functions.fleet.drivers.loopback import LoopbackDriver

            self._own[LoopbackDriver.name] = LoopbackDriver(Path(loopback_directory), now=now)

    def __getitem__(self, provider: str) -> Driver:
        # The local provider needs no account, therefore no read of the accounts either.
        return self._own[provider] if provider in self._own else self._current()[provider]

    def __iter__(self) -> Iterator[str]:
        # First the local provider, which is there also while the accounts cannot be read.
        yield from self._own
        yield from (provider for provider in self._current() if provider not in self._own)

    def __len__(self) -> int:
        return len(self._current())

    def _current(self) -> Mapping[str, Driver]:
        """Return all drivers; a driver lives as long as its account does not change."""
        accounts = self._accounts.known() if self._accounts else {}
        kept: dict[ProviderName, tuple[Account, Driver]] = {}
        for provider, stored in accounts.items():
            before = self._built.get(provider)
            if before is not None and before[0] == stored.account:
                kept[provider] = before
            elif provider in DRIVERS:
                kept[provider] = stored.account, build_driver(provider, stored.account, now=self._now)
        self._built = kept
        return {**self._own, **{provider: driver for provider, (_, driver) in kept.items()}}
