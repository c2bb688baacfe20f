"""Derive a job's ring token from its lease, and verify a token. The authorizer loads no pydantic."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from typing import Protocol

from baton.contract.errors import ErrorCode
from baton.contract.names import RING_TOKEN_PREFIX
from functions.domain.access.api_keys import token_digest

RING_TOKEN_GRACE_S = 3600
"""Time after the end of a lease in which its rings stay open, because a heartbeat may still prove the lease again
(leases.REPROOF_WINDOW_S)."""

_TOKEN = re.compile(rf"{RING_TOKEN_PREFIX}_([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})_([0-9a-f]{{64}})")


class RingLease(Protocol):
    """Fields of a lease that the authentication of a ring token reads."""

    @property
    def tenant(self) -> str: ...

    @property
    def ring_token_sha256(self) -> str | None: ...

    @property
    def rings(self) -> Sequence[str]: ...

    @property
    def closed(self) -> str: ...

    @property
    def expires_at(self) -> int: ...


class RingLeaseReader(Protocol):
    """Reader of leases. May raise StorageUnavailable."""

    def get(self, job_id: str) -> RingLease | None: ...


def is_ring_token(presented: str) -> bool:
    """Return True if the presented text has the prefix of ring tokens."""
    return presented.startswith(f"{RING_TOKEN_PREFIX}_")


def parse_job_id(presented: str) -> str:
    """Return the job id in a token; "" for a malformed token."""
    found = _TOKEN.fullmatch(presented)
    return found[1] if found else ""


def authenticate_ring_token(leases: RingLeaseReader, presented: str, now: int) -> RingLease | ErrorCode:
    """Return the lease whose rings the token opens, or an error code; "unknown" for a caller without the secret."""
    found = _TOKEN.fullmatch(presented)
    lease = leases.get(found[1]) if found else None
    expected = (lease.ring_token_sha256 if lease else None) or token_digest("")
    if not hmac.compare_digest(token_digest(found[2] if found else ""), expected) or lease is None or found is None:
        return ErrorCode.KEY_UNKNOWN
    if lease.closed:
        return ErrorCode.KEY_REVOKED
    if lease.expires_at + RING_TOKEN_GRACE_S <= now:
        return ErrorCode.KEY_EXPIRED
    return lease
