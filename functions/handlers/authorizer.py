"""Lambda authorizer: says whose key the request carries. The routes decide what that key may do.

The first call after a pause waits for this function and then for the route's, so it loads little: neither pydantic nor
what the routes need. It reads one table, whose name is the only setting of it.
"""

from __future__ import annotations

import os
from typing import Any

from functions.api.authorizing import authorize
from functions.api.defaults import TABLE_PREFIX
from functions.handlers.starting import ServerClock, start_logging
from functions.storage.clients import dynamodb_client
from functions.storage.dynamo_keys import DynamoKeyReader

start_logging()
clock = ServerClock()
keys = DynamoKeyReader(dynamodb_client(), os.environ.get("BATON_TABLE_PREFIX") or TABLE_PREFIX)


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one HTTP API authorizer event (payload version 2.0, simple response)."""
    return authorize(event, keys, clock.now())
