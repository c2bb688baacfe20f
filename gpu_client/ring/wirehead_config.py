"""Wirehead's config.yaml: the keys that count on a ring, and a note about the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import yaml

from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.places import make_ring
from gpu_client.ring.ring import Ring
from gpu_client.ring.settings import RingSettings

logger = logging.getLogger("baton.ring")

_USED = ("SWAP_CAP", "SAMPLE", "DBNAME", "RING")
_OF_MONGODB = (
    "MONGOHOST", "PORT", "CHUNKSIZE", "WRITE_COLLECTION", "READ_COLLECTION", "TEMP_COLLECTION", "COUNTER_COLLECTION",
    "LOCK_COLLECTION",
)  # fmt: skip


class Config(NamedTuple):
    """What the file says."""

    name: str
    place: str
    cap: int
    kinds: tuple[str, ...]

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """Raises RingMismatch for a file that is none."""
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RingMismatch(f"{path} cannot be read ({error})", "Name Wirehead's config.yaml") from error
        if not isinstance(content, dict):
            raise RingMismatch(f"{path} is no Wirehead configuration", "It has keys like SWAP_CAP and DBNAME")
        ignored = [key for key in _OF_MONGODB if key in content]
        if ignored:
            # A warning: of a script that sets up no logging nothing less is shown.
            logger.warning("%s: there is no MongoDB here, so these are ignored: %s", path, ", ".join(ignored))
        unknown = [str(key) for key in content if key not in (*_USED, *_OF_MONGODB)]
        if unknown:
            logger.warning("%s: not known, and ignored: %s", path, ", ".join(unknown))
        cap, name = content.get("SWAP_CAP"), content.get("DBNAME", "wirehead")
        kinds = content.get("SAMPLE", ["data", "label"])
        if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
            raise RingMismatch(f"{path}: SWAP_CAP is {cap!r}", "Say how many samples make a generation: SWAP_CAP: 1000")
        if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            raise RingMismatch(f"{path}: SAMPLE is {kinds!r}", 'Name what a sample has: SAMPLE: ["data", "label"]')
        place = content.get("RING") or Path(path).resolve().parent / f"{name}.ring"
        return cls(str(name), str(place), cap, tuple(kinds))

    def ring(self) -> Ring:
        """The ring, made if it is not there."""
        return make_ring(self.place, RingSettings(cap=self.cap, mode="generation", shapes="any", finite=False))
