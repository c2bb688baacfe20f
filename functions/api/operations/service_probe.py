"""A probe of the API from outside, on the path of heartbeats.

The path leads through DNS, API Gateway with its throttling, the authorizer, the table of keys, and the function that
serves heartbeats. The probe does not use the table of heartbeats: the sweeper writes its watermark to that table, and
a sweep that cannot write counts as an outage.
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
"""Path of a heartbeat that names no job: the API refuses the key before the API reads the path."""
TIMEOUT_S = 5.0
"""Time limit of the probe: a slower API is an outage for a fleet's heartbeats."""
_MAX_BYTES = 65_536

logger = logging.getLogger("baton.sweeping")


def probe_api(url: str | None) -> bool:
    """Return True if a heartbeat to `url` with an unknown API key is refused for the key, or if `url` is None."""
    if url is None:
        return True
    # API Gateway caches the authorizer's answer for a key, therefore each probe sends another key.
    key = f"{KEY_PREFIX}_{secrets.token_hex(10)}_{secrets.token_hex(32)}"
    request = urllib.request.Request(url, method="POST", headers={"x-api-key": key})  # noqa: S310
    try:
        # The address is the deployment's own and comes from the settings.
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            status, body = answer.status, b""
    except urllib.error.HTTPError as refusal:
        with refusal:
            status, body = refusal.code, _read_body(refusal)
    except (OSError, http.client.HTTPException) as error:
        # OSError covers timeouts, refused connections, and TLS failures.
        logger.warning("%s cannot be reached: %s", url, error)
        return False
    if _parse_code(body) == ErrorCode.KEY_UNKNOWN:
        return True
    logger.warning("%s answers %s instead of refusing an unknown key", url, status)
    return False


def _read_body(refusal: urllib.error.HTTPError) -> bytes:
    try:
        return refusal.read(_MAX_BYTES)
    except (OSError, http.client.HTTPException):
        return b""


def _parse_code(body: bytes) -> str | None:
    """Return the code in an error body of the API; None for a body of a gateway or a proxy."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None
