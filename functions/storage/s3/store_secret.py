"""Read the credentials of an object store outside AWS from AWS Secrets Manager.

The secret is JSON, `{"access_key_id": "...", "secret_access_key": "..."}`. A function reads the secret before its first
signature, and again before `LIFE` ends. Therefore the old credentials must stay valid for `LIFE` after a rotation; a
function with refused credentials reads the new credentials at the end of `LIFE` or at its next cold start.
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
    """The secret contains no credentials; the message names the secret and nothing of its contents."""


def keep_credentials_in(secret: str, session: Any) -> None:
    """Make the secret the only source of credentials for the clients of a botocore session."""
    session.register_component("credential_provider", CredentialResolver([_FromSecret(secret)]))


def read_secret(secret: str, client: Any | None = None) -> tuple[str, str]:
    """Return access key id and secret access key. Raises StoreSecretError, and botocore's errors."""
    text = (client or _secrets_client()).get_secret_value(SecretId=secret).get("SecretString", "")
    try:
        found = json.loads(text)
        values = found["access_key_id"], found["secret_access_key"]
    except (ValueError, TypeError, KeyError):
        values = None, None
    if not all(isinstance(value, str) and value for value in values):
        # The error has no cause, because the parser's error quotes the secret.
        raise StoreSecretError(
            f'secret {secret!r}: JSON with the texts "access_key_id" and "secret_access_key" is needed'
        ) from None
    return values


class _FromSecret(CredentialProvider):  # type: ignore[misc]
    """Credential provider for botocore, which requests new credentials before the old credentials expire."""

    METHOD = CANONICAL_NAME = "store-secret"

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def load(self) -> DeferredRefreshableCredentials:
        """Return credentials that read the secret at the first signature."""
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
