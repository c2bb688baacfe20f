"""Lambda authorizer: says whose key the request carries. The routes decide what that key may do."""

from __future__ import annotations

from typing import Any

from functions.api.authorizing import authorize
from functions.handlers.wiring import build_context, start_logging

start_logging()
context = build_context()


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one HTTP API authorizer event (payload version 2.0, simple response)."""
    return authorize(event, context.tokens, context.clock)
