"""Be a container of SaladCloud: prove the identity that Salad signs, and idle at the end.

Salad starts a container that has ended again, and after a failure on another node, and bills the group until the fleet
deletes it. Therefore a rented machine that has nothing to do any more waits without work for its deletion.
"""

from __future__ import annotations

import logging
import os

import requests

from gpu_client.agent.app.settings import AgentSettings
from gpu_client.agent.app.shutdown import ShutdownRequest, stop_on_signals
from gpu_client.transport.errors import Unreachable

logger = logging.getLogger("baton.agent")

METADATA = "http://169.254.169.254"
TIMEOUT_S = 5.0


def is_rented(settings: AgentSettings) -> bool:
    """Return True for a machine of a fleet on Salad."""
    return settings.api_key is None and settings.salad_container_group_id is not None


def read_identity() -> str:
    """Return the identity token of this container, which Salad signs for 5 minutes. Raises Unreachable."""
    # Salad's own worker Kelpie reads the same variable.
    endpoint = (os.environ.get("SALAD_IMDS_URL") or METADATA).rstrip("/")
    session = requests.Session()
    session.trust_env = False  # Salad refuses a call that a proxy forwards.
    try:
        answer = session.get(f"{endpoint}/v1/token", headers={"Metadata": "true"}, timeout=TIMEOUT_S)
        answer.raise_for_status()
        return str(answer.json()["jwt"])
    except (requests.RequestException, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"Salad's metadata service at {endpoint} gives no identity: {error}") from error
    finally:
        session.close()


def wait_for_deletion(stop: ShutdownRequest) -> None:
    """Wait without work until a signal comes; return at once if a signal ended the worker."""
    if stop.signaled:
        return
    logger.warning("this machine takes no more work and waits for its deletion, because Salad would start it again")
    deleted = ShutdownRequest()
    with stop_on_signals(deleted):
        deleted.wait()
