"""Store and authenticate API keys.

The module imports only the standard library and names, because the authorizer starts without pydantic.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Protocol

from baton.contract.errors import ErrorCode
from baton.contract.names import KEY_ID_PATTERN, KEY_PREFIX, Scope


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """API key at rest, with the SHA-256 of the secret only."""

    id: str
    tenant: str
    name: str
    secret_sha256: str
    scopes: tuple[Scope, ...]
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    machine: str | None = None
    """The rented machine that presents the key, as `<fleet>/<token>`; None for the keys of users."""
    queues: tuple[str, ...] | None = None
    """The only queues from which the key claims; None: every queue of the tenant."""


class KeyReader(Protocol):
    """Reader of API keys; may raise StorageUnavailable."""

    def get_key(self, key_id: str) -> ApiKey | None: ...


def token_digest(token: str) -> str:
    """Return the hexadecimal SHA-256 of a token or a secret. 256 random bits need no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def authenticate(keys: KeyReader, presented: str, now: int) -> ApiKey | ErrorCode:
    """Return the key that was presented, or the error code of the refusal.

    Unknown ids cost the same comparison as wrong secrets, and only a caller with the secret learns more than "unknown".
    """
    prefix, _, rest = presented.partition("_")
    key_id, _, secret = rest.partition("_")
    well_formed = prefix == KEY_PREFIX and re.fullmatch(KEY_ID_PATTERN, key_id) is not None and 16 <= len(secret) <= 128
    key = keys.get_key(key_id) if well_formed else None
    expected = key.secret_sha256 if key else token_digest("")
    if not hmac.compare_digest(token_digest(secret), expected) or key is None:
        return ErrorCode.KEY_UNKNOWN
    if key.revoked_at is not None:
        return ErrorCode.KEY_REVOKED
    if key.expires_at is not None and key.expires_at <= now:
        return ErrorCode.ENROLMENT_EXPIRED if key.machine and Scope.ENROLL in key.scopes else ErrorCode.KEY_EXPIRED
    return key
