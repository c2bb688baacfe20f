"""Names that both sides know. Imports nothing but the standard library, as errors.py does."""

from __future__ import annotations

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


class Scope(StrEnum):
    """What a key may do."""

    SUBMIT = "submit"
    WORKER = "worker"
    ADMIN = "admin"
