"""Lambda entry point of the console's files. The role of the function permits neither DynamoDB nor S3."""

from __future__ import annotations

import os
from typing import Any

from functions.api.http.dispatch import dispatch
from functions.api.http.route import routes_of
from functions.handlers.startup import start_logging
from functions.handlers.wiring import build_context

start_logging()
routes_of("console")  # loads the routes at the cold start, not with the first event
# The page's policy names the hosts of the buckets, which contain the function's own region.
context = build_context({"BATON_S3_REGION": os.environ.get("AWS_REGION", ""), **os.environ})


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one API Gateway event."""
    return dispatch(event, context, "console")
