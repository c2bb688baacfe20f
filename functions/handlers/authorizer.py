"""Lambda authorizer: says whose key the request carries. The routes decide what that key may do.

A refused key is let through with the reason in its context, so that the caller reads our error instead of the
gateway's bare "Forbidden"; `functions/api/dispatch.py` answers it before any route is called.
"""

from __future__ import annotations

from typing import Any

from functions.api.keys import authenticate
from functions.domain.ports import Clock, TokenStore
from functions.domain.records import ApiKey
from functions.handlers.wiring import build_context

context = build_context()


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one HTTP API authorizer event (payload version 2.0, simple response)."""
    return authorize(event, context.tokens, context.clock)


def authorize(event: dict[str, Any], tokens: TokenStore, clock: Clock) -> dict[str, Any]:
    """The authorizer's decision, with the stores handed in."""
    headers = {str(name).lower(): value for name, value in (event.get("headers") or {}).items()}
    found = authenticate(tokens, str(headers.get("x-api-key", "")), clock.now())
    if isinstance(found, ApiKey):
        known = {"tenant": found.tenant, "key_id": found.id, "scopes": ",".join(found.scopes)}
        return {"isAuthorized": True, "context": known}
    return {"isAuthorized": True, "context": {"auth_error": found.value}}
