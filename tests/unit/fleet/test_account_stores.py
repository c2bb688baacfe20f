"""Accounts at providers: stores, cache, drivers that follow the accounts."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import boto3
import pytest
from moto import mock_aws
from pydantic import SecretStr

from baton.contract.fleets.providers import ACCOUNTS, ProviderView, SaladAccount, SshAccount, VastAccount, reveal
from baton.contract.fleets.registries import RegistryLogin
from functions.domain.errors import StorageUnavailable
from functions.fleet.accounts import (
    CHANGE_TRIES,
    RELOAD_S,
    RETRY_S,
    AccountsUnreadable,
    CachedAccounts,
    ProviderAccounts,
    SecretsFull,
    StoredAccount,
    StoredLogin,
    StoredSecrets,
    dump_secrets,
    load_secrets,
    no_account,
)
from functions.fleet.drivers import configured
from functions.fleet.drivers.configured import ConfiguredDrivers
from functions.handlers.wiring import build_accounts
from functions.settings import ControlPlaneSettings
from functions.storage.provider_accounts import FileAccounts, SecretsManagerAccounts
from tests.twins.accounts import MemoryAccounts
from tests.twins.provider import VirtualProvider

KEY = "canary-5e1f0c2d9b7a4e3f"

LOGIN = StoredLogin(login=RegistryLogin(username="acme", password=SecretStr(KEY)), stored_at=5)


def stored(provider: str = "vast", **fields: Any) -> StoredAccount:
    account = ACCOUNTS[provider].model_validate({"api_key": KEY, **fields})  # type: ignore[index]
    view = ProviderView(provider=provider, account="me", checked_at=5)  # type: ignore[arg-type]
    return StoredAccount(account=account, view=view)


class Clock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


class AccountProvider(VirtualProvider):
    """Driver that a test configures in place of a provider's driver."""

    def __init__(self, account: VastAccount, *, now: object) -> None:
        super().__init__(name="vast")
        self.account = account


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        yield FileAccounts(tmp_path / "providers.json")
        return
    with mock_aws():
        client = boto3.client("secretsmanager", region_name="us-east-1")
        yield SecretsManagerAccounts(lambda: client, "baton-test-providers")


@pytest.mark.parametrize("store", ["file", "secret"], indirect=True)
def test_a_store_keeps_accounts_with_their_secrets(store: ProviderAccounts) -> None:
    assert store.read() == StoredSecrets()
    first = StoredSecrets(accounts={"vast": stored()})
    store.write(first)
    assert store.read() == first
    second = replace(
        store.read(),
        accounts={**first.accounts, "salad": stored("salad", organization="acme", project="p")},
        logins={"acme": {"ghcr.io": LOGIN}, "rival": {"docker.io": LOGIN, "r.example:5000": LOGIN}},
    )
    store.write(second)
    found = store.read()
    assert found == second and isinstance(found.accounts["salad"].account, SaladAccount)
    assert reveal(found.accounts["vast"].account)["api_key"] == KEY
    assert reveal(found.logins["acme"]["ghcr.io"].login) == {"username": "acme", "password": KEY}
    assert KEY not in repr(found)
    store.write(replace(found, accounts={}, logins={}))
    assert store.read() == StoredSecrets()


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "providers.json"
    path.touch(mode=0o644)
    FileAccounts(path).write(StoredSecrets(accounts={"vast": stored()}))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["providers.json"]


def test_a_failed_write_leaves_the_file_before_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileAccounts(tmp_path / "providers.json")
    before = StoredSecrets(accounts={"vast": stored()})
    store.write(before)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        store.write(StoredSecrets())
    assert [one.name for one in tmp_path.iterdir()] == ["providers.json"] and store.read() == before


def test_an_account_of_ssh_is_stored_whole() -> None:
    host = {"name": "desk", "address": "10.0.0.7", "user": "u", "host_key": "ssh-ed25519 AAAA"}
    account = SshAccount.model_validate({"private_key": "-----BEGIN\nx\n", "hosts": [host]})
    view = ProviderView(provider="ssh", account="1 host", checked_at=1)
    secrets = StoredSecrets(accounts={"ssh": StoredAccount(account=account, view=view)})
    assert load_secrets(dump_secrets(secrets), "s") == secrets


@pytest.mark.parametrize("text", ["", "[]", f'"{KEY}"', f'{{"vast": "{KEY}'])
def test_a_damaged_document_is_reported_without_its_contents(text: str) -> None:
    with pytest.raises(AccountsUnreadable, match="the secret x") as raised:
        load_secrets(text, "the secret x")
    assert KEY not in repr(raised.value) and raised.value.__cause__ is None


@pytest.mark.parametrize("entry", [None, {}, [1], {"account": {"api_key": KEY, "extra": 1}, "view": {}}])
def test_an_invalid_account_leaves_the_others_usable(caplog: pytest.LogCaptureFixture, entry: object) -> None:
    document = dump_secrets(StoredSecrets(accounts={"vast": stored()}))[:-1]
    with caplog.at_level(logging.ERROR, "baton.fleet"):
        found = load_secrets(f'{document}, "runpod": {json.dumps(entry)}}}', "s")
    assert set(found.accounts) == {"vast"}
    assert "the account of runpod is invalid" in caplog.text and KEY not in caplog.text


@pytest.mark.parametrize("entry", [None, {}, {"username": "acme", "password": [KEY], "stored_at": 1}])
def test_an_invalid_login_leaves_the_others_usable(caplog: pytest.LogCaptureFixture, entry: object) -> None:
    document = json.loads(dump_secrets(StoredSecrets(logins={"acme": {"ghcr.io": LOGIN}})))
    document["registries"]["acme"]["docker.io"] = entry
    document["registries"]["rival"] = entry
    with caplog.at_level(logging.ERROR, "baton.fleet"):
        found = load_secrets(json.dumps(document), "s")
    assert found.logins == {"acme": {"ghcr.io": LOGIN}}
    assert "the login of acme at docker.io is invalid" in caplog.text and KEY not in caplog.text


def test_secrets_that_a_secret_cannot_hold_are_not_stored() -> None:
    with mock_aws():
        store = SecretsManagerAccounts(lambda: boto3.client("secretsmanager", region_name="us-east-1"), "s")
        many = {f"r{number}.example": LOGIN for number in range(1000)}
        with pytest.raises(SecretsFull, match=r"have \d+ of 65536 bytes"):
            store.write(StoredSecrets(logins={"acme": many}))
        assert store.read() == StoredSecrets()


class OvertakenStore(SecretsManagerAccounts):
    """Store in which `overtake` runs between a read and the write after it."""

    overtake: Callable[[], object] = staticmethod(lambda: None)

    def read(self) -> StoredSecrets:
        found = super().read()
        self.overtake()
        return found


@pytest.fixture
def overtaken() -> Iterator[tuple[OvertakenStore, CachedAccounts]]:
    """Return a store, and the accounts of another process in the same secret."""
    with mock_aws():
        client = boto3.client("secretsmanager", region_name="us-east-1")
        other = CachedAccounts(SecretsManagerAccounts(lambda: client, "s"), Clock())
        yield OvertakenStore(lambda: client, "s"), other


@pytest.mark.parametrize("exists", [False, True])
def test_logins_of_two_processes_at_once_are_both_stored(
    overtaken: tuple[OvertakenStore, CachedAccounts], exists: bool
) -> None:
    store, other = overtaken
    if exists:
        other.put("runpod", stored("runpod"))

    def overtake() -> None:
        store.overtake = lambda: None
        other.put("salad", stored("salad", organization="acme", project="p"))
        other.put_login("acme", "ghcr.io", LOGIN)
        other.remove("runpod")

    store.overtake = overtake
    CachedAccounts(store, Clock()).put("vast", stored())
    found = store.read()
    assert (set(found.accounts), found.logins) == ({"salad", "vast"}, {"acme": {"ghcr.io": LOGIN}})


def test_a_change_that_others_overtake_each_time_is_given_up_and_stores_nothing(
    overtaken: tuple[OvertakenStore, CachedAccounts],
) -> None:
    store, other = overtaken
    rounds: list[str] = []

    def overtake() -> None:
        rounds.append(f"r{len(rounds)}.example")
        other.put_login("acme", rounds[-1], LOGIN)

    store.overtake = overtake
    cached = CachedAccounts(store, Clock())
    with pytest.raises(StorageUnavailable):
        cached.put("vast", stored())
    store.overtake = lambda: None
    found = store.read()
    assert (dict(found.accounts), list(found.logins["acme"])) == ({}, rounds) and len(rounds) == CHANGE_TRIES
    cached.put("vast", stored())
    assert set(store.read().accounts) == {"vast"} == set(cached.read())


def test_a_login_is_found_by_the_image_of_its_own_tenant_alone() -> None:
    store = MemoryAccounts()
    cached = CachedAccounts(store, Clock())
    cached.put("vast", stored())
    cached.put_login("acme", "ghcr.io", LOGIN)
    cached.put_login("acme", "docker.io", StoredLogin(login=LOGIN.login, stored_at=6))
    assert (
        cached.find_login("acme", "ghcr.io/acme/trainer:1") == LOGIN.login == cached.find_login("acme", "acme/trainer")
    )
    for tenant, image in (("rival", "ghcr.io/acme/trainer:1"), ("acme", "quay.io/acme/trainer"), ("acme", None)):
        assert cached.find_login(tenant, image) is None
    for registry in ("ghcr.io", "ghcr.io", "docker.io"):
        cached.remove_login("acme", registry)
    assert (store.logins, set(cached.read())) == ({}, {"vast"})


def test_the_cache_reads_its_store_every_five_minutes_and_after_a_change_at_once() -> None:
    store, clock = MemoryAccounts(), Clock()
    cached = CachedAccounts(store, clock)
    assert store.reads == 0
    for _ in range(3):
        assert cached.read() == {}
    assert store.reads == 1
    cached.put("vast", stored())
    assert set(cached.read()) == {"vast"} and store.reads == 2
    store.accounts = {}
    clock.at += RELOAD_S - 1
    assert set(cached.read()) == {"vast"}
    clock.at += 1
    assert cached.read() == {}
    cached.remove("vast")
    cached.put("vast", stored())
    cached.remove("vast")
    assert cached.read() == store.accounts == {}


def test_an_outage_of_the_store_keeps_the_known_accounts() -> None:
    store, clock = MemoryAccounts(), Clock()
    store.available = False
    cached = CachedAccounts(store, clock)
    with pytest.raises(StorageUnavailable):
        cached.read()
    store.available, store.accounts = True, {"vast": stored()}
    assert set(cached.read()) == {"vast"}
    store.available = False
    clock.at += RELOAD_S
    for _ in range(3):
        assert set(cached.read()) == {"vast"}
    assert store.reads == 3
    store.available, store.accounts = True, {}
    clock.at += RETRY_S
    assert cached.read() == {}


def test_a_login_during_a_read_is_in_force_at_once() -> None:
    store, reading, go_on = MemoryAccounts(), Event(), Event()
    cached = CachedAccounts(store, Clock())

    class SlowStore:
        write = store.write

        def read(self) -> StoredSecrets:
            found = store.read()
            reading.set()
            assert go_on.wait(60)
            return found

    cached._store = SlowStore()
    reader = Thread(target=cached.read)
    reader.start()
    assert reading.wait(60)
    writer = Thread(target=cached.put, args=("vast", stored()))
    writer.start()
    go_on.set()
    for one in (reader, writer):
        one.join(60)
    assert set(cached.read()) == {"vast"}


@pytest.mark.parametrize(
    ("settings", "store"),
    [
        ({}, None),
        ({"provider_file": "providers.json"}, FileAccounts),
        ({"provider_secret": "s", "provider_file": "providers.json"}, SecretsManagerAccounts),
    ],
)
def test_the_settings_name_the_place_of_the_accounts(settings: dict[str, str], store: type | None) -> None:
    built = build_accounts(ControlPlaneSettings.model_validate(settings))
    assert built is None if store is None else isinstance(built, CachedAccounts) and type(built._store) is store


def test_drivers_follow_the_accounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(configured.DRIVERS, "vast", (__name__, "AccountProvider"))
    store = MemoryAccounts()
    cached = CachedAccounts(store, Clock())
    drivers = ConfiguredDrivers(cached, loopback_directory=str(tmp_path / "machines"), now=Clock())
    assert store.reads == 0 and drivers["loopback"].name == "loopback" and store.reads == 0
    assert list(drivers) == ["loopback"] and drivers.get("vast") is None
    cached.put("vast", stored())
    first = drivers["vast"]
    assert isinstance(first, AccountProvider) and reveal(first.account)["api_key"] == KEY
    assert drivers["vast"] is first and set(drivers) == {"loopback", "vast"} and len(drivers) == 2
    cached.put("vast", stored(api_key="another"))
    assert drivers["vast"] is not first
    cached.remove("vast")
    assert "vast" not in drivers


def test_a_deployment_without_a_store_of_accounts_has_no_driver() -> None:
    assert dict(ConfiguredDrivers(None, loopback_directory=None, now=Clock())) == {}


def test_every_provider_without_an_account_names_the_remedy() -> None:
    assert no_account("vast") == "vast: no account is stored; run 'baton fleet login vast'"
    assert "login" not in no_account("loopback")
