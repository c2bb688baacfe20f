"""API keys at rest, and whether one that is presented opens anything.

Imports nothing but the standard library and names: the authorizer starts without pydantic.
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
    """An API key at rest: the secret's SHA-256 only."""

    id: str
    tenant: str
    name: str
    secret_sha256: str
    scopes: tuple[Scope, ...]
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None


class KeyReader(Protocol):
    """Where keys are looked up. May raise StorageUnavailable."""

    def get_key(self, key_id: str) -> ApiKey | None: ...


def token_digest(token: str) -> str:
    """SHA-256, hex, of a token or of a key's secret: all that is kept of it. 256 random bits need no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def authenticate(keys: KeyReader, presented: str, now: int) -> ApiKey | ErrorCode:
    """Whose key this is, or why it is refused.

    Unknown ids cost the same comparison as wrong secrets, and only who knows the secret learns more than "unknown".
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
        return ErrorCode.KEY_EXPIRED
    return key
