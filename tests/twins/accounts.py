"""The store of accounts in memory."""

from __future__ import annotations

from functions.domain.errors import StorageUnavailable
from functions.fleet.accounts import AccountsUnreadable, StoredAccounts, StoredLogins, StoredSecrets


class MemoryAccounts:
    """Twin of the stores in functions/storage/provider_accounts.py, which counts its reads."""

    def __init__(self) -> None:
        self.accounts: StoredAccounts = {}
        self.logins: StoredLogins = {}
        self.reads = 0
        self.available = True
        self.damaged = False

    def read(self) -> StoredSecrets:
        self.reads += 1
        if not self.available:
            raise StorageUnavailable("the store of accounts is away")
        if self.damaged:
            raise AccountsUnreadable("the secret x holds no JSON object with accounts by provider")
        return StoredSecrets(accounts=self.accounts, logins=self.logins)

    def write(self, secrets: StoredSecrets) -> None:
        self.accounts, self.logins = secrets.accounts, secrets.logins
