"""Store the accounts at providers: in AWS Secrets Manager when deployed, in a file on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from botocore.exceptions import ClientError

from functions.fleet.accounts import StoredAccounts, dump_accounts, load_accounts
from functions.storage.failures import error_code, failures_translated


class SecretsManagerAccounts:
    """ProviderAccounts in one secret, which the first login creates.

    make_client: returns a client of Secrets Manager; called at the first use, because most invocations of the functions
    need no account. name: name of the secret.
    """

    def __init__(self, make_client: Callable[[], Any], name: str) -> None:
        self._make_client = make_client
        self._name = name

    @cached_property
    def _client(self) -> Any:
        return self._make_client()

    def read(self) -> StoredAccounts:
        try:
            with failures_translated():
                text = self._client.get_secret_value(SecretId=self._name)["SecretString"]
        except ClientError as error:
            if error_code(error) != "ResourceNotFoundException":
                raise
            return {}
        return load_accounts(text, f"the secret {self._name}")

    def write(self, accounts: StoredAccounts) -> None:
        text = dump_accounts(accounts)
        try:
            with failures_translated():
                self._client.put_secret_value(SecretId=self._name, SecretString=text)
        except ClientError as error:
            if error_code(error) != "ResourceNotFoundException":
                raise
            description = "Accounts at GPU providers, by 'baton fleet login'"
            with failures_translated():
                self._client.create_secret(Name=self._name, SecretString=text, Description=description)


class FileAccounts:
    """ProviderAccounts in a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> StoredAccounts:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return {}
        return load_accounts(text, str(self._path))

    def write(self, accounts: StoredAccounts) -> None:
        # A temporary file has mode 0600 from the start, and the rename leaves either document whole.
        with NamedTemporaryFile("w", dir=self._path.parent, prefix=f".{self._path.name}-", delete=False) as file:
            file.write(dump_accounts(accounts))
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(self._path)
