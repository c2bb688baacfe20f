"""Telling whose key a request carries: the authorizer's decision, with the stores handed in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from functions.domain.access.api_keys import ApiKey, KeyReader, authenticate
from functions.domain.access.ring_tokens import (
    RingLease,
    RingLeaseReader,
    authenticate_ring_token,
    is_ring_token,
    parse_job_id,
)
from functions.domain.errors import StorageUnavailable

logger = logging.getLogger("baton.api")


def authorize(event: Mapping[str, Any], keys: KeyReader, now: int, leases: RingLeaseReader) -> dict[str, Any]:
    """Answer one HTTP API authorizer event (payload version 2.0) with a simple response.

    A refused key is let through with the reason in its context, and so is one that could not be looked up: the caller
    reads our error (dispatch.py gives it before any route is called) instead of the gateway's bare 403 or 500.

    `leases`: of jobs whose processes may come with a token for rings instead of a key.
    """
    headers = {str(name).lower(): value for name, value in (event.get("headers") or {}).items()}
    presented = str(headers.get("x-api-key", ""))
    try:
        if is_ring_token(presented):
            return {
                "isAuthorized": True,
                "context": _of_job(authenticate_ring_token(leases, presented, now), presented),
            }
        found = authenticate(keys, presented, now)
    except StorageUnavailable:
        logger.exception("storage is unavailable", extra={"action": "authorize"})
        found = ErrorCode.UNAVAILABLE
    if isinstance(found, ApiKey):
        known = {"tenant": found.tenant, "key_id": found.id, "scopes": ",".join(found.scopes)}
        return {"isAuthorized": True, "context": known}
    return {"isAuthorized": True, "context": {"auth_error": found.value}}


def _of_job(found: RingLease | ErrorCode, presented: str) -> dict[str, str]:
    if isinstance(found, ErrorCode):
        return {"auth_error": found.value}
    said = {"tenant": found.tenant, "key_id": f"job {parse_job_id(presented)}", "scopes": Scope.RING.value}
    return {**said, "rings": ",".join(found.rings)}
