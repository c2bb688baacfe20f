"""Store accounts at providers and logins at registries: in AWS Secrets Manager when deployed, else in a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from botocore.exceptions import ClientError

from functions.fleet.accounts import SecretsFull, StoredSecrets, dump_secrets, load_secrets
from functions.storage.failures import error_code, failures_translated

MAX_BYTES = 65_536
"""Largest secret of AWS Secrets Manager."""


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

    def read(self) -> StoredSecrets:
        try:
            with failures_translated():
                text = self._client.get_secret_value(SecretId=self._name)["SecretString"]
        except ClientError as error:
            if error_code(error) != "ResourceNotFoundException":
                raise
            return StoredSecrets()
        return load_secrets(text, f"the secret {self._name}")

    def write(self, secrets: StoredSecrets) -> None:
        text = dump_secrets(secrets)
        if len(text) > MAX_BYTES:
            raise SecretsFull(f"all accounts and logins together have {len(text)} of {MAX_BYTES} bytes")
        try:
            with failures_translated():
                self._client.put_secret_value(SecretId=self._name, SecretString=text)
        except ClientError as error:
            if error_code(error) != "ResourceNotFoundException":
                raise
            description = "Accounts at GPU providers and registries, by 'baton fleet login'"
            with failures_translated():
                self._client.create_secret(Name=self._name, SecretString=text, Description=description)


class FileAccounts:
    """ProviderAccounts in a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> StoredSecrets:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return StoredSecrets()
        return load_secrets(text, str(self._path))

    def write(self, secrets: StoredSecrets) -> None:
        # A temporary file has mode 0600 from the start, and the rename leaves either document whole.
        with NamedTemporaryFile("w", dir=self._path.parent, prefix=f".{self._path.name}-", delete=False) as file:
            file.write(dump_secrets(secrets))
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(self._path)
