"""Reaching the API from outside, as workers do: through DNS, API Gateway with its throttling, and a function."""

from __future__ import annotations

import http.client
import logging
import urllib.request

TIMEOUT_S = 5.0
"""An API that takes longer to say that it lives is as good as away for a fleet's heartbeats."""

logger = logging.getLogger("baton.sweeping")


def answers(url: str | None) -> bool:
    """Return True if a GET of `url` is answered with 200 in time, or if there is no address to ask."""
    if url is None:
        return True
    try:
        # The address is the deployment's own, from its settings.
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException) as error:
        # OSError covers timeouts, refused connections, TLS failures, and statuses such as 429 and 503.
        logger.warning("%s cannot be read: %s", url, error)
        return False
