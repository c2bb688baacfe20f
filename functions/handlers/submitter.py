"""Lambda entry point of the privilege group `submitter`: submit, read and control jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from functions.api.http.dispatch import dispatch
from functions.api.http.route import routes_of
from functions.handlers.startup import start_logging
from functions.handlers.wiring import build_context, build_fleet_store
from functions.storage.clients import dynamodb_client

start_logging()
routes_of("submitter")  # loads the routes at the cold start, not with the first event
_dynamodb = dynamodb_client()
# A job that rents its machine is stored with its fleet.
context = replace(build_context(dynamodb=_dynamodb), fleet=build_fleet_store(_dynamodb))


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one API Gateway event."""
    return dispatch(event, context, "submitter")
