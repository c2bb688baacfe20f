"""Accounts that cannot be read: machines still follow the clock and the money, and known accounts stay in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.providers import ProviderView, VastAccount
from functions.fleet.accounts import (
    RELOAD_S,
    RETRY_S,
    AccountsUnreadable,
    CachedAccounts,
    StoredAccount,
    StoredSecrets,
)
from functions.fleet.drivers import configured
from functions.fleet.drivers.configured import ConfiguredDrivers
from functions.fleet.records import Machine
from functions.fleet.ticks.controller import FleetController
from functions.storage.provider_accounts import FileAccounts
from tests.twins.accounts import MemoryAccounts
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import spec
from tests.unit.fleet.test_fleet_providers import waits

VIEW = ProviderView(provider="vast", account="me", checked_at=5)
ACCOUNTS: Any = {"vast": StoredAccount(account=VastAccount.model_validate({"api_key": "key"}), view=VIEW)}
DAMAGED = AccountsUnreadable("the secret x holds no JSON object with accounts by provider")
FAILURES = [DAMAGED, PermissionError(13, "Permission denied"), RuntimeError("AccessDeniedException: KMS")]


class Store(MemoryAccounts):
    """Store of accounts that answers a read with `failure`, if there is one."""

    failure: Exception | None = None

    def read(self) -> StoredSecrets:
        found = super().read()
        if self.failure is not None:
            raise self.failure
        return found


class Clock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: type(one).__name__)
def test_a_store_that_cannot_be_read_any_more_keeps_the_known_accounts(failure: Exception) -> None:
    store, clock = Store(), Clock()
    store.accounts = ACCOUNTS
    cached = CachedAccounts(store, clock)
    assert cached.known() == ACCOUNTS
    store.failure = failure
    clock.at += RELOAD_S
    for _ in range(3):
        assert cached.known() == ACCOUNTS and cached.find_login("acme", "ghcr.io/acme/trainer") is None
    assert store.reads == 2, "the next try is a minute later"
    for strict in (cached.read, lambda: cached.logins("acme")):
        with pytest.raises(type(failure)):
            strict()
    store.failure = None
    assert cached.read() == ACCOUNTS, "an admin who has mended the store does not wait"
    store.accounts = {}
    clock.at += RELOAD_S
    assert cached.known() == {}


def test_a_damage_is_found_again_after_a_minute() -> None:
    store, clock = Store(), Clock()
    cached = CachedAccounts(store, clock)
    cached.known()
    store.failure = DAMAGED
    clock.at += RELOAD_S
    cached.known()
    store.failure, store.accounts = None, ACCOUNTS
    clock.at += RETRY_S - 1
    assert cached.known() == {}
    clock.at += 1
    assert cached.known() == ACCOUNTS


def test_a_login_ends_the_damage_of_a_store() -> None:
    store, clock = Store(), Clock()
    cached = CachedAccounts(store, clock)
    cached.known()
    store.failure = DAMAGED
    clock.at += RELOAD_S
    cached.known()
    with pytest.raises(AccountsUnreadable):
        cached.put("vast", ACCOUNTS["vast"])
    store.failure = None
    cached.put("vast", ACCOUNTS["vast"])
    assert cached.read() == ACCOUNTS


@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: type(one).__name__)
def test_a_process_that_has_read_no_account_yet_says_so(failure: Exception) -> None:
    store = Store()
    store.failure = failure
    with pytest.raises(type(failure)):
        CachedAccounts(store, Clock()).known()


def test_a_file_that_is_no_text_keeps_the_known_accounts(tmp_path: Path) -> None:
    path, clock = tmp_path / "providers.json", Clock()
    store = FileAccounts(path)
    store.write(StoredSecrets(accounts=ACCOUNTS))
    cached = CachedAccounts(store, clock)
    before = cached.known()
    path.write_bytes(b"\xff\xfe{")
    clock.at += RELOAD_S
    assert cached.known() == before and set(before) == {"vast"}


class AccountNight(Night):
    """Night whose controller finds its drivers by stored accounts, anew in each tick, as after a cold start."""

    accounts: Store
    own: dict[str, VirtualProvider]

    def controller(self) -> FleetController:
        made = super().controller()
        cached = CachedAccounts(self.accounts, lambda: self.now)
        drivers = ConfiguredDrivers(cached, loopback_directory=None, now=lambda: self.now)
        drivers._own.update(self.own)  # type: ignore[arg-type]
        made._drivers = drivers
        made._find_login = cached.find_login
        return made


def make_night(monkeypatch: pytest.MonkeyPatch, provider: str, **changes: Any) -> AccountNight:
    one = VirtualProvider(name=provider)
    night = AccountNight(spec(providers=[provider], image="me/trainer:1", **changes), {provider: one})
    night.accounts = Store()
    night.accounts.accounts = ACCOUNTS
    night.own = {provider: one} if provider == "loopback" else {}
    monkeypatch.setattr(configured, "build_driver", lambda *_, **__: one)
    return night


def only(night: Night) -> Machine:
    (found,) = night.machines()
    return found


@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: type(one).__name__)
def test_machines_reach_their_ends_while_no_account_can_be_read(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """A machine drains by the answer to its heartbeat; only its destroy needs the account."""
    night = make_night(monkeypatch, "vast", max_hours=1)
    night.submit(hours=5)
    night.step(10)
    assert only(night).state is State.BUSY
    night.accounts.failure = failure
    while night.now < only(night).ends_by:
        night.step()
    night.step(5)
    assert only(night).state is State.TERMINATING and len(night.billing()) == 1
    report = night.reports[-1]
    (told,) = [one for one in report.failures if one.startswith("the accounts at providers cannot be read: ")]
    assert (str(DAMAGED) in told) == (failure is DAMAGED) and "KMS" not in told
    assert f"vast: {told}" in waits(night), "not the remedy of an account that is missing"
    assert report.finished
    night.accounts.failure = None
    night.trainings.clear()
    night.step(5)
    assert night.billing() == [] and {one.state for one in night.machines()} == {State.GONE}


def test_the_local_provider_needs_no_readable_account(monkeypatch: pytest.MonkeyPatch) -> None:
    night = make_night(monkeypatch, "loopback")
    night.accounts.failure = DAMAGED
    night.submit(hours=0.2)
    night.step()
    assert only(night).state is State.PLANNED, "the login at the image's registry is unknown"
    night.accounts.failure = None
    night.step(2)
    assert only(night).state is State.BOOTING and len(night.providers["loopback"].creates) == 1
    night.accounts.failure = DAMAGED
    night.step(60)
    assert night.trainings[0].left_s <= 0 and night.billing() == []
    assert only(night).state is State.GONE


def test_a_tick_reads_the_accounts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    night = make_night(monkeypatch, "vast", max=3)
    for _ in range(3):
        night.submit(hours=5)
    night.step(10)
    assert len(night.store.machines(TENANT, "nights")) == 3
    night.accounts.failure = DAMAGED
    before = night.accounts.reads
    night.step()
    assert night.accounts.reads == before + 1
