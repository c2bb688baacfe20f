"""Hand out integer seeds to all generators of a ring, each at most once, whichever process dies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Self

import numpy as np

from gpu_client.ring.errors import RingMismatch, SampleRefused
from gpu_client.ring.format.records import SEEDS, Versioned, decode_checksummed, encode_checksummed
from gpu_client.ring.store.protocol import RingBackend

_MAX_BATCH = 1024
_BATCH_LASTS_S = 1.0
"""Approximate time for which a batch of seeds lasts (s); a kill skips at most one batch."""


class SeedSource:
    """Endless iterator of seeds. Fetches batches ahead; unused seeds of a dead process are never used."""

    def __init__(self, store: RingBackend, first: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`first`: minimum seed."""
        self._store = store
        self._first = first
        self._clock = clock
        self._next = self._end = 0
        self._size = 1
        self._fetched_at: float | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        """Return the next seed. Raises RingMismatch for an unreadable record: counting anew would repeat seeds."""
        if self._next == self._end:
            self._fetch()
        self._next += 1
        return self._next - 1

    def _fetch(self) -> None:
        now = self._clock()
        if self._fetched_at is not None:
            lasted_s = max(now - self._fetched_at, 1e-6)
            self._size = max(1, min(int(self._size * _BATCH_LASTS_S / lasted_s), 2 * self._size, _MAX_BATCH))
        self._fetched_at = now
        while True:
            record = self._store.record(SEEDS)
            begin = max(_decode_next(record), self._first)
            data = encode_checksummed({"next": begin + self._size})
            if self._store.swap(SEEDS, data, record.version if record else None) is not None:
                self._next, self._end = begin, begin + self._size
                return


def _decode_next(record: Versioned | None) -> int:
    if record is None:
        return 0
    try:
        found = decode_checksummed(record.data)["next"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise RingMismatch("the record of seeds cannot be read", "Remove the file seeds and begin with an unused seed")
    return found


def to_json_seed(seed: object) -> object:
    """Convert a seed to a JSON value. Raises SampleRefused if there is none."""
    if seed is None or type(seed) in (int, str):
        return seed  # fast path: encoding takes as long as hashing a small sample
    if isinstance(seed, np.generic):
        seed = seed.item()
    try:
        json.dumps(seed)
    except (TypeError, ValueError) as error:
        raise SampleRefused(
            f"the seed cannot be encoded ({error})", "Use numbers and texts, and lists or dicts of them"
        ) from error
    return seed
