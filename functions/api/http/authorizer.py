"""The authorizer's decision: identify the owner of a request's API key or ring token."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from baton.contract.errors import ErrorCode
from baton.contract.names import KeyKind, Scope
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

    The authorizer admits also a refused key and a key that could not be read, with the reason in the context. Therefore
    the caller reads Baton's error, which dispatch.py raises before any route, instead of the gateway's bare 403 or 500.

    `leases`: the leases of the jobs whose processes send a ring token instead of a key.
    """
    headers = {str(name).lower(): value for name, value in (event.get("headers") or {}).items()}
    presented = str(headers.get("x-api-key", ""))
    try:
        if is_ring_token(presented):
            return {
                "isAuthorized": True,
                "context": _describe_ring_lease(authenticate_ring_token(leases, presented, now), presented),
            }
        found = authenticate(keys, presented, now)
    except StorageUnavailable:
        logger.exception("storage is unavailable", extra={"action": "authorize"})
        found = ErrorCode.UNAVAILABLE
    if isinstance(found, ApiKey):
        # The id of the session, which the list of keys has, not of the token.
        key_id = found.parent if found.kind is KeyKind.TOKEN and found.parent else found.id
        known = {"tenant": found.tenant, "key_id": key_id, "scopes": ",".join(found.scopes)}
        if found.machine:
            known["machine"] = found.machine
        if found.queues is not None:
            known["queues"] = ",".join(found.queues)
        if found.job is not None:
            known["job"] = found.job
        if found.tags is not None:
            known["tags"] = json.dumps(dict(found.tags))
        return {"isAuthorized": True, "context": known}
    return {"isAuthorized": True, "context": {"auth_error": found.value}}


def _describe_ring_lease(found: RingLease | ErrorCode, presented: str) -> dict[str, str]:
    if isinstance(found, ErrorCode):
        return {"auth_error": found.value}
    return {
        "tenant": found.tenant,
        "key_id": f"job {parse_job_id(presented)}",
        "scopes": Scope.RING.value,
        "rings": ",".join(found.rings),
    }
