"""Store and authenticate API keys.

The module imports only the standard library and names, because the authorizer starts without pydantic.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.contract.errors import ErrorCode
from baton.contract.names import KEY_ID_PATTERN, KEY_PREFIX, KeyKind, Scope

CALLERS = frozenset({None, KeyKind.TOKEN, KeyKind.SHARE})
"""Kinds of keys that make calls with the header x-api-key."""


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
    tags: Mapping[str, str] | None = None
    """Tags of the only jobs that the key claims; None: jobs with any tags."""
    kind: KeyKind | None = None
    """None: an ordinary key."""
    parent: str | None = None
    """Id of the key with which this key ends; None: this key depends on no other."""
    job: str | None = None
    """The only job that the key reads; None: the scopes alone confine the key."""

    @property
    def listed(self) -> bool:
        """Return True if the tenant's list of keys has this key; links and tokens live too short."""
        return self.kind not in (KeyKind.LINK, KeyKind.TOKEN)

    def valid(self, now: int) -> bool:
        """Return True if the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class KeyReader(Protocol):
    """Reader of API keys; may raise StorageUnavailable."""

    def get_key(self, key_id: str) -> ApiKey | None: ...


def token_digest(token: str) -> str:
    """Return the hexadecimal SHA-256 of a token or a secret. 256 random bits need no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def authenticate(
    keys: KeyReader, presented: str, now: int, *, kinds: Collection[KeyKind | None] = CALLERS
) -> ApiKey | ErrorCode:
    """Return the key that was presented, or the error code of the refusal. A key of another kind is unknown.

    Unknown ids cost the same comparison as wrong secrets, and only a caller with the secret learns more than "unknown".
    """
    prefix, _, rest = presented.partition("_")
    key_id, _, secret = rest.partition("_")
    well_formed = prefix == KEY_PREFIX and re.fullmatch(KEY_ID_PATTERN, key_id) is not None and 16 <= len(secret) <= 128
    key = keys.get_key(key_id) if well_formed else None
    expected = key.secret_sha256 if key else token_digest("")
    if not hmac.compare_digest(token_digest(secret), expected) or key is None or key.kind not in kinds:
        return ErrorCode.KEY_UNKNOWN
    if key.revoked_at is not None:
        return ErrorCode.KEY_REVOKED
    if not key.valid(now):
        return ErrorCode.ENROLMENT_EXPIRED if key.machine and Scope.ENROLL in key.scopes else ErrorCode.KEY_EXPIRED
    if _parents_valid(keys, key, now):
        return key
    return ErrorCode.KEY_REVOKED if key.kind is KeyKind.SHARE else ErrorCode.SESSION_OVER


def _parents_valid(keys: KeyReader, key: ApiKey, now: int) -> bool:
    """Return True if each key on which this key depends is valid. A parent is older than its child: the walk ends."""
    while key.parent is not None:
        parent = keys.get_key(key.parent)
        if parent is None or not parent.valid(now):
            return False
        key = parent
    return True
