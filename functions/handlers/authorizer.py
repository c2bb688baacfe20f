"""Lambda authorizer: identify the owner of the request's key. The routes decide the permissions of the key.

The first call after a pause waits for two cold starts, of this function and of the route's. Therefore this module loads
neither pydantic nor the routes. The function reads one item: the key, or the lease of the job that a ring token names.
"""

from __future__ import annotations

import os
from typing import Any

from functions.api.http.authorizer import authorize
from functions.domain.table_keys import TABLE_PREFIX
from functions.handlers.startup import ServerClock, start_logging
from functions.storage.clients import dynamodb_client
from functions.storage.dynamodb.api_keys import DynamoKeyReader, DynamoRingLeaseReader

start_logging()
clock = ServerClock()
_prefix = os.environ.get("BATON_TABLE_PREFIX") or TABLE_PREFIX
_dynamodb = dynamodb_client()
keys, leases = DynamoKeyReader(_dynamodb, _prefix), DynamoRingLeaseReader(_dynamodb, _prefix)


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Answer one HTTP API authorizer event (payload version 2.0, simple response)."""
    return authorize(event, keys, clock.now(), leases)
