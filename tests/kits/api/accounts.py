"""Accounts at a provider whose driver lives in memory, configured in place of Vast's driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.contract.fleets.providers import VastAccount, reveal
from functions.fleet.accounts import CachedAccounts, ProviderAccounts
from functions.fleet.drivers import configured
from functions.fleet.drivers.configured import ConfiguredDrivers
from functions.fleet.drivers.protocol import AccountReport, Leftover, ProviderRefused, ProviderUnavailable, RefusalKind
from functions.fleet.records import Inventory
from tests.kits.api.harness import Api
from tests.twins.accounts import MemoryAccounts
from tests.twins.provider import VirtualProvider

KEY = "canary-5e1f0c2d9b7a4e3f"


class AccountProvider(VirtualProvider):
    """Provider of one key; an account with another key has machines of its own."""

    def __init__(self, key: str) -> None:
        super().__init__(name="vast")
        self.key = key
        self.report = AccountReport(account=f"owner of {key[:6]}", balance_usd=10.0)
        self.refusal: ProviderRefused | ProviderUnavailable | None = None
        self.removed: list[Leftover] = []

    def _answer(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def inventory(self, prefix: str, now: int) -> Inventory:
        self._answer()
        return super().inventory(prefix, now)

    def examine(self, prefix: str) -> AccountReport:
        self._answer()
        return self.report

    def remove_leftover(self, leftover: Leftover) -> None:
        self._answer()
        self.removed.append(leftover)


class Market:
    """The providers behind all keys, in place of Vast. Only keys in `accounts` are valid."""

    def __init__(self, api: Api, store: ProviderAccounts) -> None:
        self.accounts = {key: AccountProvider(key) for key in (KEY, "another-key")}
        self.store = store
        cached = CachedAccounts(store, api.clock.now)
        drivers = ConfiguredDrivers(cached, loopback_directory=None, now=api.clock.now)
        api.context = replace(api.context, accounts=cached, drivers=drivers)

    def driver(self, account: VastAccount, *, now: object) -> AccountProvider:
        key = reveal(account)["api_key"]
        if key not in self.accounts:
            refused = AccountProvider(key)
            # Providers repeat a key in their answers; the HTTP client of the drivers removes the key.
            refused.refusal = ProviderRefused(RefusalKind.KEY, "GET /users/current was answered 401: Invalid user key")
            return refused
        return self.accounts[key]


@contextmanager
def market(api: Api, patch: pytest.MonkeyPatch, store: ProviderAccounts | None = None) -> Iterator[Market]:
    """Configure the market's driver for Vast accounts."""
    made = Market(api, store or MemoryAccounts())
    patch.setattr(configured, "build_driver", lambda provider, account, *, now: made.driver(account, now=now))
    patch.setattr("functions.api.fleet.account_calls.build_driver", configured.build_driver)
    patch.setitem(configured.DRIVERS, "vast", ("", ""))
    yield made


def log_in(api: Api, key: str = KEY) -> dict[str, Any]:
    view: dict[str, Any] = api.call("PUT", "/providers/vast", {"api_key": key}).ok()
    return view
