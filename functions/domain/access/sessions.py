"""Derive keys from keys: a browser's one-time link, session and short-lived tokens, and the key of a shared job.

A derived key never has more scopes, queues or time than the key from which it is derived.
"""

from __future__ import annotations

from baton.contract.names import KeyKind, Scope
from functions.domain.access.api_keys import ApiKey, token_digest

LINK_LIFE_S = 60
SESSION_LIFE_S = 12 * 3600
TOKEN_LIFE_S = 15 * 60
LIVES_S = {KeyKind.LINK: LINK_LIFE_S, KeyKind.SESSION: SESSION_LIFE_S, KeyKind.TOKEN: TOKEN_LIFE_S}
SESSION_SCOPES = frozenset({Scope.SUBMIT, Scope.ADMIN})
"""Scopes of a user. A browser holds no leases; with both submit and worker, a client would count as an original one."""


def derive_key(parent: ApiKey, kind: KeyKind, *, key_id: str, secret: str, now: int) -> ApiKey:
    """Return the record of a key that ends with its parent."""
    expires_at = now + LIVES_S[kind]
    return ApiKey(
        id=key_id,
        tenant=parent.tenant,
        name=f"console of {parent.name}" if parent.kind is None else parent.name,
        secret_sha256=token_digest(secret),
        scopes=tuple(scope for scope in parent.scopes if scope in SESSION_SCOPES),
        created_at=now,
        expires_at=expires_at if parent.expires_at is None else min(expires_at, parent.expires_at),
        queues=parent.queues,
        tags=parent.tags,
        kind=kind,
        parent=parent.id,
    )


def derive_share(parent: ApiKey, job_id: str, *, key_id: str, secret: str, now: int, life_s: int) -> ApiKey:
    """Return the record of a key that reads one job, at most until its parent ends."""
    expires_at = now + life_s
    return ApiKey(
        id=key_id,
        tenant=parent.tenant,
        name=f"job {job_id}",
        secret_sha256=token_digest(secret),
        scopes=(Scope.VIEW,),
        created_at=now,
        expires_at=expires_at if parent.expires_at is None else min(expires_at, parent.expires_at),
        kind=KeyKind.SHARE,
        parent=parent.id,
        job=job_id,
    )


def session_id_of(link: ApiKey) -> str:
    """Return the id of the only session that a link can open: the second one meets the first one's record."""
    return token_digest(f"session of {link.id}")[:20]
