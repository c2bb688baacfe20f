"""Names that both sides know. Imports nothing but the standard library, as errors.py does."""

from __future__ import annotations

import hashlib
import hmac
import re
from enum import StrEnum

DATA_BUCKET = "training-data"
CHECKPOINTS_BUCKET = "training-checkpoints"
BUCKETS = (DATA_BUCKET, CHECKPOINTS_BUCKET)
"""As the API names them; what they are called where they are stored is up to a deployment."""

SHARED_DIR = ".baton/shared"
"""Below the data directory: what earlier jobs have shared with this one. Hidden, so that nobody takes it for data."""

SHARED_PARTS = ".parts"
"""Added to the path of a shared file: the directory of its parts. What an attempt shows there while it makes the file,
a later attempt at the job finds below SHARED_DIR in `<path>.parts/<attempt>/`."""

KEY_PREFIX = "baton"
KEY_ID_PATTERN = r"^[a-z0-9]{8,32}$"
"""An API key is `<prefix>_<id>_<secret>`."""

RING_TOKEN_PREFIX = "batonring"
"""A token for rings (`ring_token`) is `<prefix>_<job>_<secret>`."""
RING_TOKEN_VARIABLE = "BATON_RING_TOKEN"
"""Where a job's processes find theirs."""
RING_NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
MAX_RINGS = 16
"""Of one job."""
RING_PLACE = "baton:"
"""Begins the place of a ring that lies with the control plane."""
RINGS_PREFIX = "rings/"
"""Below it lie the objects of rings in the data bucket: the calls for rings alone write and remove them."""
_RING_OBJECT = re.compile(rf"{RINGS_PREFIX}[a-z0-9][a-z0-9-]{{0,62}}/[0-9a-f]{{16,32}}/")
RING_SETTINGS = "ring.json"
"""The record that a ring begins with: its version is the ring's id."""


def in_a_ring(key: str) -> bool:
    """Whether an object of the data bucket lies in a ring. Who may use the ring may read it."""
    return _RING_OBJECT.match(key) is not None


def ring_secret(lease_token: str) -> str:
    """What a job's processes prove to use its rings. It leads to nothing else, and not back to the lease token."""
    return hmac.new(lease_token.encode(), b"rings", hashlib.sha256).hexdigest()


def ring_token(job_id: str, lease_token: str) -> str:
    """That secret as it is sent, in place of an API key."""
    return f"{RING_TOKEN_PREFIX}_{job_id}_{ring_secret(lease_token)}"


class Scope(StrEnum):
    """What a key may do."""

    SUBMIT = "submit"
    WORKER = "worker"
    ADMIN = "admin"
    RING = "ring"
    """Samples of rings, and nothing else."""
