"""Seeds for all generators of a ring: whole numbers, none of which is given out twice, whoever dies and begins anew."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Self

import numpy as np

from gpu_client.ring.errors import RingMismatch, SampleRefused
from gpu_client.ring.format.records import SEEDS, Versioned, sealed, unsealed
from gpu_client.ring.store.protocol import RingStore

_MOST_AT_ONCE = 1024
_LASTS_S = 1.0
"""So long a generator's seeds last before it fetches more, about: a kill passes over no more than those."""


class Seeds:
    """An endless iterator. Seeds are fetched ahead of their use: those that a dead process had left are never used."""

    def __init__(self, store: RingStore, first: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`first`: none is less."""
        self._store = store
        self._first = first
        self._clock = clock
        self._next = self._end = 0
        self._size = 1
        self._fetched_at: float | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        """Raises RingMismatch where the record cannot be read: counting anew would give seeds again."""
        if self._next == self._end:
            self._fetch()
        self._next += 1
        return self._next - 1

    def _fetch(self) -> None:
        now = self._clock()
        if self._fetched_at is not None:
            lasted_s = max(now - self._fetched_at, 1e-6)
            self._size = max(1, min(int(self._size * _LASTS_S / lasted_s), 2 * self._size, _MOST_AT_ONCE))
        self._fetched_at = now
        while True:
            record = self._store.record(SEEDS)
            begin = max(_next_of(record), self._first)
            data = sealed({"next": begin + self._size})
            if self._store.swap(SEEDS, data, record.version if record else None) is not None:
                self._next, self._end = begin, begin + self._size
                return


def _next_of(record: Versioned | None) -> int:
    if record is None:
        return 0
    try:
        found = unsealed(record.data)["next"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise RingMismatch(
            "the record of seeds cannot be read", "Remove the file seeds; begin with a seed that was not used"
        )
    return found


def plain_seed(seed: object) -> object:
    """A seed as JSON has it. Raises SampleRefused for what has no such form."""
    if seed is None or type(seed) in (int, str):
        return seed  # always has a form in JSON: trying takes as long as hashing a small sample
    if isinstance(seed, np.generic):
        seed = seed.item()
    try:
        json.dumps(seed)
    except (TypeError, ValueError) as error:
        raise SampleRefused(
            f"its seed cannot be noted ({error})", "Use numbers, texts, and lists or dicts of them"
        ) from error
    return seed
