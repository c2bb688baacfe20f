"""Telling the job that something of its ring is damaged: its agent makes an event of it.

Any process of a job does, whatever it is: a worker of a loader, a rank of a training, a program without a session. So
it has a connection to the agent of its own, for one line (`gpu_client/training/protocol.py`). Elsewhere there is nobody
to be told.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Mapping

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.records import QUARANTINE

logger = logging.getLogger("baton.ring")

PATIENCE_S = 2.0
"""For so long the agent may not answer: who reads goes on."""
_MAX_CHARS = 512
_MAX_SAID_CHARS = 1000


def tell_job(ring: str, key: str, why: str, environment: Mapping[str, str] = os.environ) -> bool:
    """An object of the ring at this place is damaged, and is done without; whether that could be said. Never raises.

    The agent tells it once for each object, however many processes say it.
    """
    path = environment.get("BATON_CHANNEL", "")
    if not path:
        return False
    rank = environment.get("RANK", "")
    message = {
        "type": "quarantined",
        "ring": (ring or "a ring")[:_MAX_CHARS],
        "object": key[:_MAX_CHARS],
        "message": why[:_MAX_SAID_CHARS],
        "rank": int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 5 else 0,
    }
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(path)
            connection.sendall(json.dumps(message).encode() + b"\n")
    except (OSError, ValueError) as error:
        logger.warning("the agent cannot be told of the damage: %s", error)
        return False
    return True


def quarantine_key(key: str) -> str:
    """Where it is noted that the object of this key is damaged."""
    return QUARANTINE + key.replace("/", ".")


def quarantined_key(note: str) -> str:
    """The key of the object that such a note is about: writers' names have no dots."""
    return note.removeprefix(QUARANTINE).replace(".", "/")


def quarantined(ring: Ring) -> dict[str, str]:
    """Damaged objects that any reader has met: why, by their key."""
    found = {}
    for key in ring.store.keys(QUARANTINE):
        said = ring.store.read(key)
        found[quarantined_key(key)] = bytes(said).decode() if said is not None else ""
    return found
