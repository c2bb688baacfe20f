"""Whether a token that follows from a lease opens rings. Loads as little as api_keys.py: the authorizer needs it."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from typing import Protocol

from baton.contract.errors import ErrorCode
from baton.contract.names import RING_TOKEN_PREFIX
from functions.domain.access.api_keys import token_digest

RING_TOKEN_GRACE_S = 3600
"""A lease that ran out and was not taken back may be proved again (leases.REPROOF_WINDOW_S): its rings stay open."""

_TOKEN = re.compile(rf"{RING_TOKEN_PREFIX}_([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})_([0-9a-f]{{64}})")


class RingLease(Protocol):
    """What of a lease matters here."""

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
    """Where leases are looked up. May raise StorageUnavailable."""

    def get(self, job_id: str) -> RingLease | None: ...


def is_ring_token(presented: str) -> bool:
    """Whether this is meant to be one, rather than an API key."""
    return presented.startswith(f"{RING_TOKEN_PREFIX}_")


def parse_job_id(presented: str) -> str:
    """The job that a token names; empty for what is none."""
    found = _TOKEN.fullmatch(presented)
    return found[1] if found else ""


def authenticate_ring_token(leases: RingLeaseReader, presented: str, now: int) -> RingLease | ErrorCode:
    """The lease whose rings are opened, or why none is. Who does not know the secret learns no more than "unknown"."""
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
