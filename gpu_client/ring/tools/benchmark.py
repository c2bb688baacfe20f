"""Measure the speed of a ring at a place, beside the limits of the place and the machine: `baton ring bench`.

The benchmark measures the ring and the raw operations in turns, sample by sample, so that a shared machine slows both
equally. The benchmark makes and removes a ring of its own below the place and does not touch other rings.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.ring import delete_contents, make_ring
from gpu_client.ring.format.manifest import ObjectId
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import IN_PLACE_BYTES, TEMPORARY
from gpu_client.ring.store.protocol import RemovingStore
from gpu_client.ring.store.uri import open_store

Array = np.ndarray[Any, np.dtype[Any]]
_WRITER, _RAW_EPOCH = "bench", 99_999_999
_RAW_TEMPORARY = f"{TEMPORARY}/raw"
_LOOPBACK_PIECE_BYTES = 1024 * 1024


@dataclass
class BenchmarkTurn:
    """Seconds for one sample by each operation."""

    raw_put_s: float
    """Seconds to write the bytes to a new file; outside directories, to a new object."""
    put_s: float
    """Seconds of `RingWriter.put` (store and claim)."""
    raw_get_s: float = 0.0
    """Seconds to map and hash; outside directories, to fetch and hash."""
    get_s: float = 0.0
    """Seconds of `RingReader.sample` (verify and rebuild)."""


@dataclass
class BenchmarkRates:
    """Measurements of one place. `size_bytes`: size of a sample."""

    size_bytes: int
    turns: list[BenchmarkTurn] = field(default_factory=list)

    def per_s(self, name: str) -> float:
        """Return samples per second of the median turn."""
        return 1 / float(median(getattr(turn, name) for turn in self.turns))

    def of_raw(self, name: str) -> float:
        """Return the share of the raw limit that `put` or `get` reaches: the median of the turns' ratios."""
        return float(median(getattr(turn, f"raw_{name}_s") / getattr(turn, f"{name}_s") for turn in self.turns))


def make_sample(size_bytes: int, seed: int = 0) -> dict[str, Array]:
    """Make an incompressible image and label of `size_bytes` bytes in total."""
    half = size_bytes // 2
    chance = np.random.default_rng(seed)
    return {
        "image": chance.integers(0, 256, half, np.uint8),
        "label": chance.integers(0, 256, size_bytes - half, np.uint8),
    }


class StoreBenchmark:
    """Temporary ring below a place; a context manager."""

    def __init__(
        self,
        place: str,
        sample: dict[str, Array],
        samples: int,
        *,
        settings: RingSettings | None = None,
        raw_put: Callable[[Path, Sequence[memoryview]], object] | None = None,
    ) -> None:
        """`samples`: number of samples in a round. `raw_put`: baseline in a directory, default `write_new_file`.

        Raises RingMismatch for an unusable place.
        """
        self._new_file = raw_put or write_new_file
        self.sample, self.samples = sample, samples
        self.size_bytes = sum(array.nbytes for array in sample.values())
        self.place = _name_bench_place(place)
        self._directory = _directory_of(self.place)
        self._made = [] if self._directory is None else [one for one in self._directory.parents if not one.exists()]
        self._store = open_store(self.place, make=True)
        # With this `cap`, writers never wait for readers, and no sample is replaced before its read.
        self._settings = settings or RingSettings(cap=4 * samples)
        # Raw files are made where the store makes its files. ext4 without a journal keeps inodes of removed files for a
        # minute and skips all of them for each new file nearby: recently removed files would slow down only one of two
        # directories.
        self._raw_temporary = None if self.size_bytes * self._settings.pack < IN_PLACE_BYTES else _RAW_TEMPORARY
        self.ring = make_ring(self.place, self._settings)
        self._writer = RingWriter(self.ring, _WRITER)
        self._raw_first = False
        self._raws: list[str] = []
        self._rounds = 0

    def run_round(self) -> list[BenchmarkTurn]:
        """Put and read the samples of one round, each beside the raw operation."""
        # Stores may keep objects apart from records, therefore the raw keys are object keys. The collector may delete
        # unclaimable objects of other writers, therefore the keys have a later epoch of the same writer.
        raws = [ObjectId(_WRITER, _RAW_EPOCH, self._rounds * self.samples + at).key for at in range(self.samples)]
        self._rounds += 1
        if self._directory is not None:
            for key in raws:
                (self._directory / key).parent.mkdir(parents=True, exist_ok=True)
        self._raws += raws
        pieces = [array.reshape(-1).view(np.uint8).data for array in self.sample.values()]
        turns = []
        first = self._writer.put_samples
        for key in raws:
            turns.append(
                BenchmarkTurn(
                    *self._time_pair(partial(self._raw_put, key, pieces), partial(self._writer.put, self.sample))
                )
            )
            if self._directory is not None and self._raw_temporary is not None:
                (self._directory / self._raw_temporary).rename(self._directory / key)
        self._writer.swap()
        with RingReader(self.ring) as reader:
            slots = reader.newest().slots[-(self._writer.put_samples - first) :]
            for turn, key, slot in zip(turns, raws, slots, strict=True):
                turn.raw_get_s, turn.get_s = self._time_pair(partial(self._raw_get, key), partial(reader.sample, slot))
        self._store.delete(raws)
        self._raws.clear()
        GarbageCollector(self.ring).collect()
        return turns

    def close(self) -> None:
        """Remove the ring."""
        try:
            self._writer.close()
        finally:
            self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _remove(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory)
            for parent in self._made:
                parent.rmdir()
            return
        self._store.delete(self._raws)
        if isinstance(self._store, RemovingStore):
            self._store.remove()
        else:
            delete_contents(self._store)
        self._store.close()

    def _time_pair(self, raw: Callable[[], object], ring_action: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of both operations; alternate the first, because the second finds warmer caches."""
        self._raw_first = not self._raw_first
        if self._raw_first:
            return _time(raw), _time(ring_action)
        ring_s = _time(ring_action)
        return _time(raw), ring_s

    def _raw_put(self, key: str, pieces: Sequence[memoryview]) -> None:
        if self._directory is None:
            self._store.create(key, pieces)
        else:
            self._new_file(self._directory / (self._raw_temporary or key), pieces)

    def _raw_get(self, key: str) -> None:
        if self._directory is not None:
            map_and_hash(self._directory / key)
            return
        data = self._store.read(key)
        assert data is not None
        xxhash.xxh3_64_intdigest(data)


def run_benchmark(place: str, *, size_bytes: int, samples: int, rounds: int) -> BenchmarkRates:
    """Measure `rounds` rounds after one warm-up round. Raises RingMismatch, StoreFull, and OSError."""
    rates = BenchmarkRates(size_bytes)
    with StoreBenchmark(place, make_sample(size_bytes), samples) as there:
        for number in range(rounds + 1):
            turns = there.run_round()
            rates.turns += turns if number else []
    return rates


def write_new_file(path: Path, pieces: Sequence[memoryview]) -> None:
    """Write the bytes to a new file: the raw limit of `put`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            left = piece
            while len(left):
                left = left[os.write(fd, left) :]
    finally:
        os.close(fd)


def map_and_hash(path: Path) -> int:
    """Map a file and hash every byte: the raw limit of `get`."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return xxhash.xxh3_64_intdigest(data)


def measure_machine(size_bytes: int, tries: int = 5) -> dict[str, float]:
    """Return the median bytes per second that one thread copies, hashes, and sends over loopback."""
    source = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    target = np.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, source),
        "xxh3": lambda: xxhash.xxh3_64_intdigest(source.data),
        "loopback": lambda: _send_over_loopback(source.data),
    }
    return {name: size_bytes / median(_time(way) for _ in range(tries)) for name, way in ways.items()}


def _send_over_loopback(data: memoryview) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        sending = threading.Thread(target=sender.sendall, args=(data,))
        sending.start()
        buffer, left = bytearray(_LOOPBACK_PIECE_BYTES), len(data)
        while left:
            left -= receiver.recv_into(buffer)
        sending.join()


def _name_bench_place(place: str) -> str:
    return f"{place.rstrip('/')}{'-' if _names_no_path(place) else '/'}bench-{secrets.token_hex(4)}"


def _names_no_path(place: str) -> bool:
    return place.startswith(("memory:", "baton:"))


def _directory_of(place: str) -> Path | None:
    kind, colon, rest = place.partition(":")
    return Path(rest if colon else place).expanduser() if not colon or kind == "fs" else None


def _time(action: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    action()
    return time.perf_counter() - began_at
