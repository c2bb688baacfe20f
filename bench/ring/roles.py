"""Roles of the processes of the ring's bench. No torch here, so processes start at once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.ring.population import Counters
from gpu_client.ring.core.ring import Ring, open_ring
from gpu_client.ring.errors import WriterFenced
from gpu_client.ring.format.records import INBOX, SAMPLES, Versioned
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.reading.batch_stream import BatchStream
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.store.protocol import RingBackend
from gpu_client.ring.store.uri import open_store

T = TypeVar("T")
WRITES = ("made", "put", "first_us", "at_us", "waited_us", "fenced")
READS = ("manifests", "samples", "errors", "retries", "missing", "doubled", "backwards")


class DyingStore:
    """Store whose process kills itself before or after an operation."""

    def __init__(self, store: RingBackend, dies: Callable[[str, str], bool], *, behind: bool) -> None:
        """Wrap a store; `dies` gets the operation's name and key each time."""
        self._store, self._dies, self._behind = store, dies, behind

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        return self._do("create", key, lambda: self._store.create(key, pieces))

    def read(self, key: str) -> memoryview | None:
        return self._do("read", key, lambda: self._store.read(key))

    def record(self, key: str) -> Versioned | None:
        return self._do("record", key, lambda: self._store.record(key))

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        return self._do("swap", key, lambda: self._store.swap(key, data, seen))

    def keys(self, prefix: str) -> list[str]:
        return self._do("keys", prefix, lambda: self._store.keys(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        # One after the other, as a directory does it: it may die between two of them.
        for key in keys:
            self._do("delete", key, lambda key=key: self._store.delete([key]))  # type: ignore[misc]

    def tidy(self, older_than_s: float) -> int:
        return self._store.tidy(older_than_s)

    def close(self) -> None:
        self._store.close()

    def _do(self, name: str, key: str, operation: Callable[[], T]) -> T:
        dies = self._dies(name, key)
        if dies and not self._behind:
            os.kill(os.getpid(), signal.SIGKILL)
        found = operation()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class NotingStore(DyingStore):
    """Store that records missing objects."""

    def __init__(self, store: RingBackend, missing: Callable[[], None]) -> None:
        super().__init__(store, lambda name, key: False, behind=False)
        self._missing = missing

    def read(self, key: str) -> memoryview | None:
        found = super().read(key)
        if found is None and key.startswith(SAMPLES):
            self._missing()
        return found


def sample_of(number: int, made: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Make a small sample with the content `made`."""
    return {"x": np.full(64, made), "by": np.array([number])}


def ring_in(place: str, dies: Callable[[str, str], bool], *, behind: bool) -> Ring:
    """Open a ring whose process kills itself."""
    return Ring.open(DyingStore(open_store(place, make=False), dies, behind=behind))


def generate(
    place: str,
    number: int,
    counters: Counters,
    *,
    every_s: float,
    samples: int | None = None,
    dies_every: int = 0,
    stop: Event | None = None,
) -> None:
    """Make and put a sample at an interval; `dies_every`: every n-th process death between storing and claiming.

    `counters`: samples made and put, when the last was put, how long was waited. Whoever takes it up makes the rest.
    """
    ring = ring_in(place, lambda name, key: _is_claim(name, key) and _due(counters, number, dies_every), behind=False)
    with RingWriter(ring) as writer:
        while not (stop is not None and stop.is_set()):
            if samples is not None and counters.of("made", number) >= samples:
                break
            time.sleep(every_s)
            counters.add("made", number)
            made = counters.of("made", number)
            waited_s = writer.waited_s
            writer.put(sample_of(number, made), seed=[number, made])
            counters.add("put", number)
            counters.add("waited_us", number, int((writer.waited_s - waited_s) * 1e6))
            counters.put("at_us", number, int(time.monotonic() * 1e6))
            if not counters.of("first_us", number):
                counters.put("first_us", number, counters.of("at_us", number))


def generate_some(place: str, number: int, counters: Counters, every_s: float, samples: int, dies_every: int) -> None:
    """Run `generate` at a place."""
    generate(place, number, counters, every_s=every_s, samples=samples, dies_every=dies_every)


def _is_claim(name: str, key: str) -> bool:
    """Recognize the claim of a sample; the claim of a beginning has sequence 0."""
    return name == "create" and key.startswith(INBOX) and int(key.split(".")[2]) > 0


def _due(counters: Counters, number: int, dies_every: int) -> bool:
    return bool(dies_every) and counters.of("made", number) % dies_every == 0


def write_for_ever(place: str, number: int, counters: Counters, every_s: float) -> None:
    """Put samples until killed. A writer that a busy machine made look dead begins anew."""
    while True:
        try:
            generate(place, number, counters, every_s=every_s)
        except WriterFenced:
            counters.add("fenced", number)


def read_for_ever(place: str, number: int, counters: Counters, every_s: float, stop: Event) -> None:
    """Read every sample of each newest manifest and count errors."""
    ring = open_ring(place)
    ring.store = NotingStore(ring.store, lambda: counters.add("missing", number))
    with RingReader(ring) as reader:
        reader.wait(lambda: reader.newest() or None, "nothing came")
        last = 0
        while not stop.is_set():
            try:
                newest = reader.newest()
                reader.keep_only([newest.number])
                counters.add("backwards", number, newest.number < last)
                last = newest.number
                counters.add("doubled", number, len(newest) - len({slot.id for slot in newest.slots}))
                for slot in newest.slots:
                    sample = reader.sample(slot)
                    if not (sample["x"] == reader.provenance(slot)["seed"][1]).all():
                        raise ValueError(f"{slot.id} is another sample")
                counters.add("samples", number, len(newest))
            except Exception as error:
                counters.add("errors", number)
                print(f"reader {number}: {error!r}", flush=True)
            counters.add("manifests", number)
            counters.add("retries", number, reader.retries)
            reader.retries = 0
            time.sleep(every_s)


def publish_for_ever(place: str, every_s: float, stop: Event) -> None:
    """Publish beside the writers, which publish too."""
    ring = open_ring(place)
    while not stop.is_set():
        ring.publish()
        time.sleep(every_s)


def publish_and_die(place: str, step: int, behind: bool, reached: Event) -> None:
    """Publish up to operation number `step` of one publication and die there; `reached` is set before.

    Ends well if publications have not so many operations.
    """
    operations = 0

    def dies(name: str, key: str) -> bool:
        nonlocal operations
        operations += 1
        if operations - 1 == step:
            reached.set()
            return True
        return False

    ring = ring_in(place, dies, behind=behind)
    operations = 0
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        operations = 0
        if ring.publish() is not None:
            return


def leave_an_orphan(place: str, name: str) -> None:
    """Put samples, then die between storing another and claiming it."""
    ring = ring_in(place, lambda operation, key: operation == "create" and key.endswith("-0000000003"), behind=True)
    with RingWriter(ring, name) as writer:
        while True:
            writer.put(sample_of(0, 0))


def consume(place: str, per_s: float, batch_size: int) -> None:
    """Take batches at a limited rate until killed, waiting as the ring demands."""
    with RingReader(open_ring(place)) as reader:
        stream = BatchStream(reader, BatchShape(batch_size, policy="latest"))
        due_at = time.monotonic()
        while True:
            stream.next_batch()
            due_at = max(due_at + batch_size / per_s, time.monotonic() - 1.0)
            time.sleep(max(due_at - time.monotonic(), 0.0))


def produce(place: str, per_s: float, waited: Counters) -> None:
    """Put samples at a limited rate until killed."""
    with RingWriter(open_ring(place)) as writer:
        due_at = time.monotonic()
        while True:
            waited.add("made", 0)
            writer.put({"x": np.zeros(16)})
            waited.add("put", 0)
            waited.put("waited_us", 0, int(writer.waited_s * 1e6))
            due_at = max(due_at + 1 / per_s, time.monotonic() - 1.0)
            time.sleep(max(due_at - time.monotonic(), 0.0))


def train(place: str, group: str, trace: Path, batches: int, killed_after: int) -> None:
    """Read batches; write the samples and position of each to a file whose last line is a checkpoint.

    With `killed_after`, the process kills itself after so many.
    """
    lines = trace.read_text().splitlines() if trace.exists() else []
    with RingReader(open_ring(place)) as reader, trace.open("a", buffering=1) as file:
        stream = BatchStream(reader, BatchShape(4, policy=3), group=group, forgets=False)
        if lines:
            stream.load_state_dict(json.loads(lines[-1])["state"])
        for number in range(len(lines), batches):
            slots, _ = stream.next_batch()
            file.write(json.dumps({"ids": [slot.id for slot in slots], "state": stream.state_dict()}) + "\n")
            if killed_after and number + 1 - len(lines) == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
