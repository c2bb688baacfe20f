"""Give back the rented machine from within, the last guard of the money when no control plane does.

A container that ends stays billed at Vast.ai (its disk in any case), and RunPod deletes no pod by itself. Both give
each container a key that reaches the container's own machine and nothing else.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

import requests

from baton.contract.fleets.fleet import MAX_INSTANCE_CHARACTERS

logger = logging.getLogger("baton.agent")

TIMEOUT_S = 15.0
TRIES = 20
PAUSE_S = 15.0
"""Pause between two tries; Vast.ai refuses a destroy that comes within 3 s of the last one."""


@dataclass(frozen=True)
class OwnMachineApi:
    """API by which a container destroys its own machine, and the variables that the provider sets in the container."""

    name: str
    machine: str
    key: str
    address: str
    """Variable with the address of the API in place of `default_address`."""
    default_address: str
    path: str


OWN_MACHINE_APIS = (
    OwnMachineApi(
        name="Vast.ai",
        machine="CONTAINER_ID",
        key="CONTAINER_API_KEY",
        address="VAST_URL",
        default_address="https://console.vast.ai",
        path="/api/v0/instances/{}/",
    ),
    OwnMachineApi(
        name="RunPod",
        machine="RUNPOD_POD_ID",
        key="RUNPOD_API_KEY",
        address="RUNPOD_API_BASE_URL",
        default_address="https://api.runpod.io",
        path="/v2/pods/{}",
    ),
)


def find_instance(environ: Mapping[str, str]) -> str | None:
    """Return the id of this container at its provider; None where the provider names none.

    A longer value than a provider's id is a variable of the machine's owner with the same name.
    """
    named = (environ.get(one.machine, "") for one in OWN_MACHINE_APIS)
    return next((name for name in named if 0 < len(name) <= MAX_INSTANCE_CHARACTERS), None)


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
    owner = next((one for one in OWN_MACHINE_APIS if environ.get(one.machine) and environ.get(one.key)), None)
    if owner is None:
        return False
    path = owner.path.format(quote(environ[owner.machine], safe=""))
    address = f"{environ.get(owner.address) or owner.default_address}{path}"
    for left in reversed(range(TRIES)):
        problem = _destroy(address, environ[owner.key], timeout_s)
        if not problem:
            logger.warning("this machine is given back to %s", owner.name)
            return True
        logger.error("this machine cannot be given back to %s, %d tries are left: %s", owner.name, left, problem)
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
