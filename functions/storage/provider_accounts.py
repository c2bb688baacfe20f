"""Store accounts at providers and logins at registries: in AWS Secrets Manager when deployed, else in a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from botocore.exceptions import ClientError

from functions.domain.errors import WriteConflict
from functions.fleet.accounts import SecretsFull, StoredSecrets, dump_secrets, load_secrets
from functions.storage.failures import error_code, failures_translated

MAX_BYTES = 65_536
"""Largest secret of AWS Secrets Manager."""
CURRENT = "AWSCURRENT"
"""Label of the version that counts."""
NEXT = "BATON_NEXT"
"""Label of the last version that a write stored, because Secrets Manager makes a version without a label the current
one, and may delete a version that loses its last label."""
CONFLICTS = frozenset(
    (
        ("CreateSecret", "ResourceExistsException"),
        ("UpdateSecretVersionStage", "InvalidParameterException"),
        ("UpdateSecretVersionStage", "ResourceNotFoundException"),
    )
)
"""Operations and codes of a write that finds another current version than the one that was read."""


class SecretsManagerAccounts:
    """ProviderAccounts in one secret, which the first login creates.

    A write stores a version beside the current one, then moves the label CURRENT from the version that was read.
    Secrets Manager refuses the move if another version is the current one by now.

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
                found = self._client.get_secret_value(SecretId=self._name, VersionStage=CURRENT)
        except ClientError as error:
            if error_code(error) != "ResourceNotFoundException":
                raise
            return StoredSecrets()
        secrets = load_secrets(found["SecretString"], f"the secret {self._name}")
        return replace(secrets, version=found["VersionId"])

    def write(self, secrets: StoredSecrets) -> None:
        text = dump_secrets(secrets)
        if len(text) > MAX_BYTES:
            raise SecretsFull(f"all accounts and logins together have {len(text)} of {MAX_BYTES} bytes")
        try:
            with failures_translated():
                self._replace(secrets.version, text)
        except ClientError as error:
            if (error.operation_name, error_code(error)) not in CONFLICTS:
                raise
            raise WriteConflict from error

    def _replace(self, version: str | None, text: str) -> None:
        try:
            stored = self._client.put_secret_value(SecretId=self._name, SecretString=text, VersionStages=[NEXT])
        except self._client.exceptions.ResourceNotFoundException:
            description = "Accounts at GPU providers and registries, by 'baton fleet login'"
            self._client.create_secret(Name=self._name, SecretString=text, Description=description)
            return
        move = {"MoveToVersionId": stored["VersionId"]} | ({"RemoveFromVersionId": version} if version else {})
        self._client.update_secret_version_stage(SecretId=self._name, VersionStage=CURRENT, **move)


class FileAccounts:
    """ProviderAccounts of one process, in a file that only its owner can read."""

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
        descriptor, name = mkstemp(dir=self._path.parent, prefix=f".{self._path.name}-")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(dump_secrets(secrets))
                file.flush()
                os.fsync(descriptor)
            Path(name).replace(self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)  # The file holds secrets, and no later write would remove it.
            raise
