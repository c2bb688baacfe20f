"""A generator for tests of trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.ring import make_ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings


class Generator:
    """Put numbered samples into a ring in a directory, on request."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.place = str(place)
        self.ring = make_ring(self.place, RingSettings(**{"cap": 8, "retain": 2, "max_ahead": 10_000, **settings}))
        self.writer = RingWriter(self.ring, "w", threads=False)
        self.next = 0

    def put(self, count: int) -> None:
        for number in range(self.next, self.next + count):
            self.writer.put({"x": torch.full((3,), float(number))}, seed=number)
        self.next += count
        while self.ring.publish() is not None:
            pass

    def replace_all(self) -> None:
        """Collect everything that is not pinned."""
        for _ in range(4):
            self.put(8)
        GarbageCollector(self.ring).collect()
