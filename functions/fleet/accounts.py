"""Define the accounts at providers that a deployment holds, and the port of the stores that hold them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Protocol

from pydantic import ValidationError

from baton.contract.fleets.providers import ACCOUNTS, Account, ProviderView, reveal
from baton.contract.names import ProviderName
from functions.domain.errors import StorageUnavailable

logger = logging.getLogger("baton.fleet")

RELOAD_S = 300
"""Time after which another process has noticed a login or a logout."""
RETRY_S = 60
"""Time between two reads of a store that is unavailable."""


@dataclass(frozen=True, kw_only=True)
class StoredAccount:
    """Account with the view that its last check found."""

    account: Account
    view: ProviderView


StoredAccounts = Mapping[ProviderName, StoredAccount]


class AccountsUnreadable(Exception):  # noqa: N818 - names the store's state, not a fault of the caller
    """The store holds no valid document. The message names the store and nothing of its contents."""


class ProviderAccounts(Protocol):
    """Store of all accounts. A write replaces the whole document, so that of two concurrent writes the later counts."""

    def read(self) -> StoredAccounts:
        """Return all accounts. Raises AccountsUnreadable, StorageUnavailable."""

    def write(self, accounts: StoredAccounts) -> None:
        """Store all accounts in place of those before. Raises StorageUnavailable."""


class CachedAccounts:
    """ProviderAccounts that reads its store at most every RELOAD_S. Thread-safe. now: clock in seconds."""

    def __init__(self, store: ProviderAccounts, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._found: StoredAccounts = {}
        self._read_at: float | None = None
        self._lock = RLock()

    def read(self) -> StoredAccounts:
        with self._lock:
            if self._read_at is None or self._now() >= self._read_at + RELOAD_S:
                self._reload()
            return self._found

    def write(self, accounts: StoredAccounts) -> None:
        with self._lock:
            self._store.write(accounts)
            self._found, self._read_at = accounts, self._now()

    def put(self, provider: ProviderName, stored: StoredAccount) -> None:
        """Store one account in place of an earlier one."""
        with self._lock:
            self.write({**self._store.read(), provider: stored})

    def remove(self, provider: ProviderName) -> None:
        """Remove one account; idempotent."""
        with self._lock:
            self.write({name: stored for name, stored in self._store.read().items() if name != provider})

    def _reload(self) -> None:
        try:
            self._found = self._store.read()
            self._read_at = self._now()
        except StorageUnavailable as error:
            if self._read_at is None:
                raise
            # Machines must be looked after in the meantime, and a store that is away must not slow every tick.
            logger.warning("the accounts cannot be read again: %s", error)
            self._read_at = self._now() - RELOAD_S + RETRY_S


def no_account(provider: str) -> str:
    """Return why a provider cannot be used, and the remedy."""
    if provider not in ACCOUNTS:
        return f"{provider}: this deployment has no driver for the provider"
    return f"{provider}: no account is stored; run 'baton fleet login {provider}'"


def dump_accounts(accounts: StoredAccounts) -> str:
    """Return the document of a store, which contains the secrets."""
    return json.dumps(
        {
            name: {"account": reveal(stored.account), "view": stored.view.model_dump(mode="json")}
            for name, stored in sorted(accounts.items())
        }
    )


def load_accounts(text: str, store: str) -> StoredAccounts:
    """Return the accounts of a store's document; leave out and log accounts that are not valid any more.

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
    return found
