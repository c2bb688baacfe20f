"""Define the accounts at providers and the logins at registries of a deployment, and the port of their stores."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Protocol, TypeVar

from pydantic import ValidationError

from baton.contract.fleets.providers import ACCOUNTS, Account, ProviderView, reveal
from baton.contract.fleets.registries import RegistryLogin, registry_of
from baton.contract.names import ProviderName
from functions.domain.errors import StorageUnavailable, WriteConflict

logger = logging.getLogger("baton.fleet")

K = TypeVar("K")
V = TypeVar("V")

RELOAD_S = 300
"""Time after which another process has noticed a login or a logout."""
RETRY_S = 60
"""Time between two reads of a store that is unavailable."""
CHANGE_TRIES = 5
"""Tries of a change, one of which fails for each write of another process in between."""
LOGINS = "registries"
"""Key of the logins in the document of a store, beside the names of providers."""


@dataclass(frozen=True, kw_only=True)
class StoredAccount:
    """Account with the view that its last check found."""

    account: Account
    view: ProviderView


@dataclass(frozen=True, kw_only=True)
class StoredLogin:
    """Login at a registry, and the time at which it was stored."""

    login: RegistryLogin
    stored_at: int


StoredAccounts = Mapping[ProviderName, StoredAccount]
StoredLogins = Mapping[str, Mapping[str, StoredLogin]]
"""Logins by tenant and registry. Of its own tenant alone, because a login opens the tenant's private images."""


@dataclass(frozen=True, kw_only=True)
class StoredSecrets:
    """Contents of a store."""

    accounts: StoredAccounts = field(default_factory=dict)
    logins: StoredLogins = field(default_factory=dict)
    version: str | None = field(default=None, compare=False)
    """Version that a store read, by which the store refuses the write after a write in between; None without one."""


class SecretsFull(Exception):  # noqa: N818 - names the store's state, not a fault of the caller
    """The document of all secrets is larger than its store permits; nothing was stored."""


class AccountsUnreadable(Exception):  # noqa: N818 - names the store's state, not a fault of the caller
    """The store holds no valid document. The message names the store and nothing of its contents."""


class ProviderAccounts(Protocol):
    """Store of all secrets. A write replaces the whole document."""

    def read(self) -> StoredSecrets:
        """Return all secrets. Raises AccountsUnreadable, StorageUnavailable."""

    def write(self, secrets: StoredSecrets) -> None:
        """Store all secrets in place of those that were read as `secrets.version`.

        Raises WriteConflict after a write of another process in between, SecretsFull, StorageUnavailable.
        """


class CachedAccounts:
    """Secrets of a store, which is read at most every RELOAD_S. Thread-safe. now: clock in seconds."""

    def __init__(self, store: ProviderAccounts, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._found = StoredSecrets()
        self._read_at: float | None = None
        self._failure: Exception | None = None
        """Why the store cannot be read now, although the store answers; None for a store that was read or is away."""
        self._lock = RLock()

    def read(self) -> StoredAccounts:
        """Return all accounts. Raises AccountsUnreadable, StorageUnavailable."""
        return self._require_readable().accounts

    def known(self) -> StoredAccounts:
        """Return all accounts; those before a damage of the store, because their machines go on costing money.

        Raises AccountsUnreadable, StorageUnavailable if this process has read none yet.
        """
        return self._current().accounts

    def put(self, provider: ProviderName, stored: StoredAccount) -> None:
        """Store one account in place of an earlier one."""
        self._change(lambda found: replace(found, accounts={**found.accounts, provider: stored}))

    def remove(self, provider: ProviderName) -> None:
        """Remove one account; idempotent."""
        self._change(lambda found: replace(found, accounts=_without(found.accounts, provider)))

    def logins(self, tenant: str) -> Mapping[str, StoredLogin]:
        """Return the logins of a tenant by registry. Raises AccountsUnreadable, StorageUnavailable."""
        return self._require_readable().logins.get(tenant, {})

    def find_login(self, tenant: str, image: str | None) -> RegistryLogin | None:
        """Return the login by which a tenant's machines pull an image, as `known`; None without one."""
        found = self._current().logins.get(tenant, {}).get(registry_of(image)) if image else None
        return found.login if found else None

    def put_login(self, tenant: str, registry: str, stored: StoredLogin) -> None:
        """Store one login in place of an earlier one."""
        self._change(lambda found: _with_logins(found, tenant, {**found.logins.get(tenant, {}), registry: stored}))

    def remove_login(self, tenant: str, registry: str) -> None:
        """Remove one login; idempotent."""
        self._change(lambda found: _with_logins(found, tenant, _without(found.logins.get(tenant, {}), registry)))

    def _current(self) -> StoredSecrets:
        with self._lock:
            if self._read_at is None or self._now() >= self._read_at + RELOAD_S:
                self._reload()
            return self._found

    def _require_readable(self) -> StoredSecrets:
        with self._lock:
            if self._failure is not None:
                self._reload()
            found = self._current()
            if self._failure is not None:
                raise self._failure
            return found

    def _change(self, change: Callable[[StoredSecrets], StoredSecrets]) -> None:
        with self._lock:
            for _ in range(CHANGE_TRIES):
                changed = change(self._store.read())
                try:
                    self._store.write(changed)
                except WriteConflict:
                    continue
                self._found, self._read_at, self._failure = changed, self._now(), None
                return
        raise StorageUnavailable(f"{CHANGE_TRIES} writes of other processes came before this change of the secrets")

    def _reload(self) -> None:
        try:
            self._found = self._store.read()
        except Exception as error:  # also a permission that was taken away, or a key of the secret that is disabled
            if self._read_at is None:
                raise
            # Machines must be looked after in the meantime, and a store that is away must not slow every tick.
            self._failure = None if isinstance(error, StorageUnavailable) else error
            level = logging.ERROR if self._failure else logging.WARNING
            logger.log(level, "the accounts cannot be read again, the former ones stay in use: %s", error)
            self._read_at = self._now() - RELOAD_S + RETRY_S
        else:
            self._read_at, self._failure = self._now(), None


def _without(found: Mapping[K, V], key: K) -> dict[K, V]:
    return {name: value for name, value in found.items() if name != key}


def _with_logins(found: StoredSecrets, tenant: str, logins: Mapping[str, StoredLogin]) -> StoredSecrets:
    return replace(found, logins={**found.logins, tenant: logins} if logins else _without(found.logins, tenant))


def no_account(provider: str) -> str:
    """Return why a provider cannot be used, and the remedy."""
    if provider not in ACCOUNTS:
        return f"{provider}: this deployment has no driver for the provider"
    return f"{provider}: no account is stored; run 'baton fleet login {provider}'"


def dump_secrets(secrets: StoredSecrets) -> str:
    """Return the document of a store, which contains the secrets."""
    document: dict[str, object] = {
        name: {"account": reveal(stored.account), "view": stored.view.model_dump(mode="json")}
        for name, stored in sorted(secrets.accounts.items())
    }
    if secrets.logins:
        document[LOGINS] = {
            tenant: {name: {**reveal(one.login), "stored_at": one.stored_at} for name, one in sorted(logins.items())}
            for tenant, logins in sorted(secrets.logins.items())
        }
    return json.dumps(document)


def load_secrets(text: str, store: str) -> StoredSecrets:
    """Return the secrets of a store's document; leave out and log accounts and logins that are not valid any more.

    Without a valid account its provider waits for a new login, while the other providers' machines are looked after.
    store: name of the store, for messages. Raises AccountsUnreadable.
    """
    # No error has a cause here, because the errors of parsers quote their text.
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise AccountsUnreadable(f"{store} holds no JSON object with accounts by provider") from None
    found: dict[ProviderName, StoredAccount] = {}
    for name, model in ACCOUNTS.items():
        if name not in document:
            continue
        try:
            entry = document[name]
            found[name] = StoredAccount(
                account=model.model_validate(entry["account"]), view=ProviderView.model_validate(entry["view"])
            )
        except (ValidationError, TypeError, KeyError) as error:
            places = error.errors(include_input=False) if isinstance(error, ValidationError) else []
            fields = ", ".join(".".join(map(str, one["loc"])) for one in places)
            logger.error("%s: the account of %s is invalid (%s); log in again", store, name, fields or "no object")
    return StoredSecrets(accounts=found, logins=_load_logins(document.get(LOGINS), store))


def _load_logins(document: object, store: str) -> StoredLogins:
    found: dict[str, dict[str, StoredLogin]] = {}
    tenants = document if isinstance(document, dict) else {}
    for tenant, logins in tenants.items():
        for registry, entry in logins.items() if isinstance(logins, dict) else ():
            try:
                login = RegistryLogin.model_validate({name: entry[name] for name in RegistryLogin.model_fields})
                stored = StoredLogin(login=login, stored_at=int(entry["stored_at"]))
            except (ValueError, TypeError, KeyError):
                # The text of the error quotes the login.
                logger.error("%s: the login of %s at %s is invalid; log in again", store, tenant, registry)
            else:
                found.setdefault(tenant, {})[registry] = stored
    return found
