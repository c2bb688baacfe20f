"""Report damaged objects: a note in the ring, and an event of the job.

Any process of a job can report: a DataLoader worker, a rank, a program without a session. Therefore each report opens
its own connection to the agent for one line (`gpu_client/training/protocol.py`). Without an agent the job has no event.
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
"""Time limit for the agent, so that reading continues (s)."""
_MAX_CHARS = 512
_MAX_MESSAGE_CHARS = 1000


def report_damage(ring: str, key: str, problem: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Report a damaged object to the agent of the job. Never raises.

    Returns False without an agent or after a failed report. The agent makes one event for each object.
    """
    path = environment.get("BATON_CHANNEL", "")
    if not path:
        return False
    rank = environment.get("RANK", "")
    message = {
        "type": "quarantined",
        "ring": (ring or "a ring")[:_MAX_CHARS],
        "object": key[:_MAX_CHARS],
        "message": problem[:_MAX_MESSAGE_CHARS],
        "rank": int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 5 else 0,
    }
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(path)
            connection.sendall(json.dumps(message).encode() + b"\n")
    except (OSError, ValueError) as error:
        logger.warning("the damage cannot be reported to the agent: %s", error)
        return False
    return True


def quarantine_key(key: str) -> str:
    """Return the key of the note about a damaged object."""
    return QUARANTINE + key.replace("/", ".")


def quarantined_key(note: str) -> str:
    """Parse the key of the damaged object from the key of its note; writers' names contain no dots."""
    return note.removeprefix(QUARANTINE).replace(".", "/")


def list_quarantined(ring: Ring) -> dict[str, str]:
    """Read the notes about damaged objects: problem by key."""
    found = {}
    for key in ring.store.keys(QUARANTINE):
        note = ring.store.read(key)
        found[quarantined_key(key)] = bytes(note).decode() if note is not None else ""
    return found
