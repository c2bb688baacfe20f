"""A call of the API from outside that takes the way of heartbeats.

The way leads through DNS, API Gateway with its throttling, the authorizer, the table of keys, and the function that
serves heartbeats. The table of heartbeats has no part in the call: the sweeper writes its watch to that table, and a
sweep that cannot write counts as an outage.
"""

from __future__ import annotations

import http.client
import json
import logging
import secrets
import urllib.error
import urllib.request

from baton.contract.errors import ErrorCode
from baton.contract.names import KEY_PREFIX

PROBED_PATH = "/heartbeat/probe"
"""The path names no job: the API refuses the key before it reads the path."""
TIMEOUT_S = 5.0
"""An API that takes longer to answer is as good as away for a fleet's heartbeats."""
_MAX_BYTES = 65_536

logger = logging.getLogger("baton.sweeping")


def answers(url: str | None) -> bool:
    """Return True if a heartbeat to `url` with an unknown API key is refused for the key, or if `url` is None."""
    if url is None:
        return True
    # The gateway remembers what the authorizer said of a key, therefore each call has another one.
    key = f"{KEY_PREFIX}_{secrets.token_hex(10)}_{secrets.token_hex(32)}"
    request = urllib.request.Request(url, method="POST", headers={"x-api-key": key})  # noqa: S310
    try:
        # The address is the deployment's own, from its settings.
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            status, body = answer.status, b""
    except urllib.error.HTTPError as refusal:
        with refusal:
            status, body = refusal.code, _body_of(refusal)
    except (OSError, http.client.HTTPException) as error:
        # OSError covers timeouts, refused connections, and TLS failures.
        logger.warning("%s cannot be reached: %s", url, error)
        return False
    if _code_of(body) == ErrorCode.KEY_UNKNOWN:
        return True
    logger.warning("%s answers %s instead of refusing an unknown key", url, status)
    return False


def _body_of(refusal: urllib.error.HTTPError) -> bytes:
    try:
        return refusal.read(_MAX_BYTES)
    except (OSError, http.client.HTTPException):
        return b""


def _code_of(body: bytes) -> str | None:
    """Return the code of an error as the API writes it; None for what a gateway or a proxy writes."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None
