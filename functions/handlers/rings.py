"""Lambda entry point of the privilege group `rings`: records, URLs of samples, deletion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from functions.api.http.dispatch import dispatch
from functions.api.http.route import routes_of
from functions.handlers.startup import start_logging
from functions.handlers.wiring import build_context, build_rings
from functions.storage.clients import dynamodb_client

start_logging()
routes_of("rings")  # loads the routes at the cold start, not with the first event
_dynamodb = dynamodb_client()
context = replace(build_context(dynamodb=_dynamodb), rings=build_rings(_dynamodb))


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one API Gateway event."""
    return dispatch(event, context, "rings")
