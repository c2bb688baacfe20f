"""Lambda entry point of the privilege group `admin`: API keys, webhooks, health check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from functions.api.http.dispatch import dispatch
from functions.api.http.route import routes_of
from functions.handlers.startup import start_logging
from functions.handlers.wiring import build_context, build_fleet_store
from functions.storage.clients import dynamodb_client

start_logging()
routes_of("admin")  # loads the routes at the cold start, not with the first event
_dynamodb = dynamodb_client()
# A webhook receives events of fleets again.
context = replace(build_context(dynamodb=_dynamodb), fleet=build_fleet_store(_dynamodb))


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one API Gateway event."""
    return dispatch(event, context, "admin")
