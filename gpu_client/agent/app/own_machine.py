"""Give back the rented machine from within, the last guard of the money when no control plane does.

A container that ends stays billed at Vast.ai: its disk in any case. Vast.ai therefore gives each container a key that
can destroy the container's own instance and nothing else (`CONTAINER_ID`, `CONTAINER_API_KEY`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote

import requests

logger = logging.getLogger("baton.agent")

VAST_URL = "https://console.vast.ai"
TIMEOUT_S = 15.0
TRIES = 20
PAUSE_S = 15.0
"""Pause between two tries; Vast.ai refuses a destroy that comes within 3 s of the last one."""


def give_back(
    environ: Mapping[str, str] = os.environ,
    *,
    pause: Callable[[float], object] = time.sleep,
    timeout_s: float = TIMEOUT_S,
) -> bool:
    """Destroy the instance that this container is; return True if the provider has accepted, False if none can.

    Without the provider's variables, nothing happens: the machine belongs to somebody, or its provider ends the bill
    with the process.
    """
    instance, key = environ.get("CONTAINER_ID"), environ.get("CONTAINER_API_KEY")
    if not instance or not key:
        return False
    address = f"{environ.get('VAST_URL') or VAST_URL}/api/v0/instances/{quote(instance, safe='')}/"
    for left in reversed(range(TRIES)):
        problem = _destroy(address, key, timeout_s)
        if not problem:
            logger.warning("this machine is given back to Vast.ai")
            return True
        logger.error("this machine cannot be given back to Vast.ai, %d tries are left: %s", left, problem)
        if left:
            pause(PAUSE_S)
    return False


def _destroy(address: str, key: str, timeout_s: float) -> str:
    """Ask once; return what is wrong, empty if the instance is or was destroyed."""
    try:
        answer = requests.delete(
            address, json={}, headers={"Authorization": f"Bearer {key}"}, timeout=timeout_s, allow_redirects=False
        )
    except requests.RequestException as error:
        return type(error).__name__
    return "" if answer.ok or answer.status_code == requests.codes.not_found else f"status {answer.status_code}"
