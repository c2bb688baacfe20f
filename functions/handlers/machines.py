"""Lambda entry point of the privilege group `machines`: fleets, and the calls of rented machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from functions.api.http.dispatch import dispatch
from functions.api.http.route import routes_of
from functions.handlers.startup import start_logging
from functions.handlers.wiring import build_context, build_fleet

start_logging()
routes_of("machines")  # loads the routes at the cold start, not with the first event
_fleet = build_fleet()
context = replace(
    build_context(dynamodb=_fleet.dynamodb), fleet=_fleet.store, accounts=_fleet.accounts, drivers=_fleet.drivers
)


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one API Gateway event."""
    return dispatch(event, context, "machines")
