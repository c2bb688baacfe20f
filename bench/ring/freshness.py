"""Time from `put` to readable (target 5), and the cost of a swap (target 6)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.harness.figures import Figure
from functions.local.emulator import Emulator
from gpu_client.ring.core.ring import Ring, make_ring
from gpu_client.ring.format.manifest import Slot
from gpu_client.ring.format.records import Versioned
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from gpu_client.ring.store.protocol import RingBackend
from tests.kits.ring.bucket import RingBucket

READABLE_S = 1.0
IN_A_BUCKET_S = 2.0
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
SWAP_MS = 5.0
OF_SMALL = 2.0
"""Largest ratio to the time of a sample that is 8,000 times smaller; the times are equal apart from noise."""
REQUESTS = 4
_POLL_S = 0.002
_PATIENCE_S = 60.0
"""Seconds to wait for each sample before the measurement fails."""


def put_to_readable(scratch: Path, *, rounds: int, samples: int) -> list[Figure]:
    """Measure the 95th percentile from the start of `put` to a manifest that lists the sample."""
    rings = [make_ring(str(scratch / f"readable-{number}"), RingSettings(cap=64)) for number in range(rounds)]
    return [_freshness("directory", rings, samples, poll_s=_POLL_S, at_most=READABLE_S)]


def put_to_readable_in_a_bucket(*, rounds: int, samples: int) -> list[Figure]:
    """Measure the same on the emulated S3, with the request interval of docs/ring.md."""
    with Emulator() as emulator, patch.dict(os.environ, _CREDENTIALS), ExitStack() as opened:
        rings = []
        for _ in range(rounds):
            bucket = opened.enter_context(RingBucket.of(emulator))
            rings.append(Ring.make(bucket.opened(time.sleep), RingSettings(cap=64, publish_interval_s=1)))
        return [_freshness("bucket of the emulated S3", rings, samples, poll_s=0.05, at_most=IN_A_BUCKET_S)]


def _freshness(where: str, rings: Sequence[Ring], samples: int, *, poll_s: float, at_most: float) -> Figure:
    rows, medians = [], []
    for ring in rings:
        cuts = quantiles(_waits_s(ring, samples, poll_s), n=20)
        rows.append(cuts[-1])
        medians.append(round(cuts[9], 4))
    interval_s = rings[0].settings.publish_interval_s
    details = {"samples": samples, "medians_s": medians, "publish_interval_s": interval_s}
    return Figure(name=f"put to readable, p95 ({where})", unit="s", rounds=rows, at_most=at_most, details=details)


def _waits_s(ring: Ring, samples: int, poll_s: float) -> list[float]:
    begun: list[float] = []
    seen: dict[int, float] = {}

    def put() -> None:
        with RingWriter(ring) as writer:
            for number in range(samples):
                begun.append(time.perf_counter())
                writer.put({"x": np.full(1 << 17, number)})
                time.sleep(0.03)
            # What is left is published by whoever leaves: that would be sooner.
            while len(seen) < samples and time.perf_counter() - begun[-1] < _PATIENCE_S:
                time.sleep(poll_s)

    writing = threading.Thread(target=put)
    writing.start()
    while len(seen) < samples:
        newest = ring.newest()
        for inserted in {slot.inserted for slot in newest.slots} - seen.keys():
            seen[inserted] = time.perf_counter()
        if not writing.is_alive():
            raise TimeoutError(f"{len(seen)} of {samples} samples could be read")
        time.sleep(poll_s)
    writing.join()
    return [seen[number] - begun[number] for number in range(samples)]


def swap_cost(scratch: Path, *, rounds: int, large_bytes: int) -> list[Figure]:
    """Time one publication of 10 samples into 100 slots; large samples against small ones."""
    small, large = [], []
    for number in range(rounds):
        small.append(1e3 * _publication_s(scratch / f"small-{number}", 1024))
        large.append(1e3 * _publication_s(scratch / f"large-{number}", large_bytes))
    requests, clearing = _requests(publications=20)
    return [
        Figure(name="swap, 100 slots of 1 KiB", unit="ms", rounds=small, at_most=SWAP_MS),
        Figure(
            name=f"swap, 100 slots of {large_bytes >> 20} MiB",
            unit="ms",
            rounds=large,
            baseline_name="1 KiB",
            baseline=small,
            at_most=OF_SMALL,
        ),
        Figure(name=f"  by itself, {large_bytes >> 20} MiB", unit="ms", rounds=large, at_most=SWAP_MS),
        Figure(
            name="swap, in requests to an object store until it can be read",
            unit="",
            rounds=[requests],
            at_most=REQUESTS,
            counted=True,
            details={"and then, to clear away its claims": clearing},
        ),
    ]


def _publication_s(scratch: Path, size_bytes: int) -> float:
    """Time ten publications and return the fastest, in seconds."""
    ring = make_ring(str(scratch), RingSettings(cap=100, max_ahead=1000))
    best = float("inf")
    array = np.zeros(size_bytes, np.uint8)
    with RingWriter(ring, threads=False) as writer:
        for turn in range(20):
            for _ in range(10):
                writer.put({"x": array})
            began_at = time.perf_counter()
            ring.publish()
            if turn >= 10:
                best = min(best, time.perf_counter() - began_at)
            slots: Sequence[Slot] = ring.newest().slots
            assert len(slots) == min(10 * (turn + 1), 100)
    return best


class CountingStore:
    """Store that counts each operation as one request of an object store."""

    def __init__(self, store: RingBackend) -> None:
        self._store = store
        self.operations: list[str] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.operations.append(name)
            return operation(*arguments)

        return counted

    # Named in the protocol, so that it is one.
    def record(self, key: str) -> Versioned | None:
        self.operations.append("record")
        return self._store.record(key)


def _requests(publications: int) -> tuple[int, int]:
    """Count the most requests of a publication but the first: until readable, and for the later cleanup."""
    store = CountingStore(MemoryStore())
    ring = Ring.make(store, RingSettings(cap=100, max_ahead=1000))  # type: ignore[arg-type]
    worst = clearing = 0
    with RingWriter(ring, threads=False) as writer:
        for number in range(publications):
            for _ in range(10):
                writer.put({"x": np.zeros(10)})
            store.operations.clear()
            ring.publish()
            if number:
                clearing = max(clearing, store.operations.count("delete"))
                worst = max(worst, len(store.operations) - store.operations.count("delete"))
    return worst, clearing
