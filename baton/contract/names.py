"""Names that the control plane and its clients share. Like errors.py, the module imports the standard library only."""

from __future__ import annotations

import hashlib
import hmac
import re
from enum import StrEnum
from typing import Literal

DATA_BUCKET = "training-data"
CHECKPOINTS_BUCKET = "training-checkpoints"
BUCKETS = (DATA_BUCKET, CHECKPOINTS_BUCKET)
"""Bucket names in the API. A deployment chooses the names of the S3 buckets."""

SHARED_DIR = ".baton/shared"
"""Directory, below the data directory, of the outputs that earlier jobs shared. Hidden, so that no program reads it as
training data."""

SHARED_PARTS = ".parts"
"""Suffix of the directory that holds the parts of a shared file. The parts that an attempt leaves there while it makes
the file are placed for later attempts below SHARED_DIR in `<path>.parts/<attempt>/`."""

KEY_PREFIX = "baton"
KEY_ID_PATTERN = r"^[a-z0-9]{8,32}$"
"""An API key is `<prefix>_<id>_<secret>`."""

OPERATOR_TENANT = "default"
"""Tenant of the first key; its admins manage what all tenants share: accounts at providers, and the fleets' doctor."""

RING_TOKEN_PREFIX = "batonring"
"""A token for rings (`ring_token`) is `<prefix>_<job>_<secret>`."""
RING_TOKEN_VARIABLE = "BATON_RING_TOKEN"
"""Environment variable with the ring token of a job's processes."""
RING_NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
FLEET_NAME_PATTERN = r"^[a-z][a-z0-9-]{0,31}$"
MACHINE_NAME_PATTERN = r"^[a-z0-9-]{1,60}$"
RENT_FLEET_PATTERN = r"^rent-[0-9a-f]{8}$"
"""Names of the fleets of jobs that rent their own machines; documents have other names."""
REGISTRY_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?(:[0-9]{1,5})?$"
"""Host of a container registry, perhaps with a port."""
ProviderName = Literal["loopback", "vast", "salad", "runpod", "ec2", "ssh"]
MAX_RINGS = 16
"""Largest number of rings of one job."""
RING_PLACE = "baton:"
"""Prefix of the place of a ring in the control plane."""
RINGS_PREFIX = "rings/"
"""Key prefix of ring objects in the data bucket. Only the ring calls write and remove these objects."""
_RING_OBJECT = re.compile(rf"{RINGS_PREFIX}[a-z0-9][a-z0-9-]{{0,62}}/[0-9a-f]{{16,32}}/")
RING_SETTINGS = "ring.json"
"""First record of a ring; the record's version is the ring's id."""


def in_a_ring(key: str) -> bool:
    """Return True if a key of the data bucket belongs to a ring. Access to the ring includes access to the object."""
    return _RING_OBJECT.match(key) is not None


def ring_secret(lease_token: str) -> str:
    """Derive the secret of a ring token from a lease token. The secret permits ring calls only; the HMAC is one-way."""
    return hmac.new(lease_token.encode(), b"rings", hashlib.sha256).hexdigest()


def ring_token(job_id: str, lease_token: str) -> str:
    """Return the ring token that the job's processes send in place of an API key."""
    return f"{RING_TOKEN_PREFIX}_{job_id}_{ring_secret(lease_token)}"


class KeyKind(StrEnum):
    """Kind of a record beside ordinary keys in the table of API keys."""

    LINK = "link"
    """One-time link that opens a session."""
    SESSION = "session"
    """Session of a web browser; its cookie issues tokens and makes no other call."""
    TOKEN = "token"
    """Short-lived key of a session."""
    SHARE = "share"
    """Key that shows one job to the bearer of a link."""


class Scope(StrEnum):
    """Permission of a key."""

    SUBMIT = "submit"
    WORKER = "worker"
    ADMIN = "admin"
    RING = "ring"
    """Ring calls only."""
    ENROLL = "enroll"
    """The first call of a rented machine only; the key names the machine."""
    VIEW = "view"
    """The reads of one job only; the key names the job."""
