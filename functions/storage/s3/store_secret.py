"""Credentials of an object store that is not AWS's, from AWS Secrets Manager.

The secret is JSON, `{"access_key_id": "...", "secret_access_key": "..."}`. It is read when something is first signed,
so a function that needs no object never reads it, and again before `LIFE` is over: after a rotation the old credentials
must stay good that long. Until then credentials that the store refuses are only replaced at the next cold start.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.credentials import CredentialProvider, CredentialResolver, DeferredRefreshableCredentials

LIFE = timedelta(hours=1)
CONNECT_TIMEOUT_S = 2
READ_TIMEOUT_S = 5
MAX_ATTEMPTS = 3


class StoreSecretError(Exception):
    """The secret is there, but does not hold what is needed. The message names it and nothing that is in it."""


def keep_credentials_in(secret: str, session: Any) -> None:
    """Let all clients of a botocore session sign with what the secret says, and with nothing else."""
    session.register_component("credential_provider", CredentialResolver([_FromSecret(secret)]))


def read_secret(secret: str, client: Any | None = None) -> tuple[str, str]:
    """Access key id and secret access key. Raises StoreSecretError, and botocore's errors."""
    text = (client or _secrets_client()).get_secret_value(SecretId=secret).get("SecretString", "")
    try:
        found = json.loads(text)
        values = found["access_key_id"], found["secret_access_key"]
    except (ValueError, TypeError, KeyError):
        values = None, None
    if not all(isinstance(value, str) and value for value in values):
        # Not as a cause either: what could not be parsed is the secret itself.
        raise StoreSecretError(
            f'secret {secret!r}: JSON with the texts "access_key_id" and "secret_access_key" is needed'
        ) from None
    return values


class _FromSecret(CredentialProvider):  # type: ignore[misc]
    """Provider of credentials for botocore, which asks again before the credentials expire."""

    METHOD = CANONICAL_NAME = "store-secret"

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def load(self) -> DeferredRefreshableCredentials:
        """Nothing is read before the first signature."""
        return DeferredRefreshableCredentials(refresh_using=self._read, method=self.METHOD)

    def _read(self) -> dict[str, str | None]:
        access_key_id, secret_access_key = read_secret(self._secret)
        return {
            "access_key": access_key_id,
            "secret_key": secret_access_key,
            "token": None,
            "expiry_time": (datetime.now(UTC) + LIFE).isoformat(),
        }


def _secrets_client() -> Any:
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
    )
    return botocore.session.get_session().create_client("secretsmanager", config=config)
