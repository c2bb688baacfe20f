"""How fast a place is as a ring, beside what it and the machine could do at best: `baton ring bench`.

What is compared is measured sample by sample in turns, so that a machine that is shared is as slow for one as for the
other. A ring of its own is made below the place and removed afterwards; a ring that is there is not touched.
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

from gpu_client.ring.core.garbage_collector import Collector
from gpu_client.ring.core.ring import emptied, make_ring
from gpu_client.ring.format.manifest import ObjectId
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import BESIDE
from gpu_client.ring.store.protocol import RemovingStore
from gpu_client.ring.store.uri import store_at

Array = np.ndarray[Any, np.dtype[Any]]
_WRITER, _RAW_EPOCH = "bench", 99_999_999
_RAW_BESIDE = f"{BESIDE}/raw"
_LOOPBACK_PIECE_BYTES = 1024 * 1024


@dataclass
class Turn:
    """Seconds for one sample each, in turns."""

    raw_put_s: float
    """Its bytes into a new file; elsewhere than in directories, into a new object."""
    put_s: float
    """As a writer of a ring does it: stored and claimed."""
    raw_get_s: float = 0.0
    """Mapped and hashed; elsewhere than in directories, fetched and hashed."""
    get_s: float = 0.0
    """As a reader of a ring does it: verified, and put together."""


@dataclass
class Rates:
    """What was measured of one place. `size_bytes`: of a sample."""

    size_bytes: int
    turns: list[Turn] = field(default_factory=list)

    def per_s(self, name: str) -> float:
        """Samples per second, by the median turn."""
        return 1 / float(median(getattr(turn, name) for turn in self.turns))

    def of_raw(self, name: str) -> float:
        """`put` or `get`: the part of the raw limit that is reached, by the median of the turns' ratios."""
        return float(median(getattr(turn, f"raw_{name}_s") / getattr(turn, f"{name}_s") for turn in self.turns))


def sample_of(size_bytes: int, seed: int = 0) -> dict[str, Array]:
    """An image and a label of together so many bytes, which nothing can compress."""
    half = size_bytes // 2
    chance = np.random.default_rng(seed)
    return {
        "image": chance.integers(0, 256, half, np.uint8),
        "label": chance.integers(0, 256, size_bytes - half, np.uint8),
    }


class PlaceBench:
    """A ring of its own below a place, while it is entered."""

    def __init__(
        self,
        place: str,
        sample: dict[str, Array],
        samples: int,
        *,
        settings: RingSettings | None = None,
        raw_put: Callable[[Path, Sequence[memoryview]], object] | None = None,
    ) -> None:
        """`samples`: how many a round has. `raw_put`: the baseline in a directory, `new_file` unless given.

        Raises RingMismatch where there can be no ring.
        """
        self._new_file = raw_put or new_file
        self.sample, self.samples = sample, samples
        self.size_bytes = sum(array.nbytes for array in sample.values())
        self.place = _beside(place)
        self._directory = _directory_of(self.place)
        self._made = [] if self._directory is None else [one for one in self._directory.parents if not one.exists()]
        self._store = store_at(self.place, make=True)
        # Nobody waits for readers, and nothing is replaced before it was read.
        self._settings = settings or RingSettings(cap=4 * samples)
        self.ring = make_ring(self.place, self._settings)
        self._writer = RingWriter(self.ring, _WRITER)
        self._raw_first = False
        self._raws: list[str] = []
        self._rounds = 0

    def round(self) -> list[Turn]:
        """Put so many samples and read them, each once beside the raw way."""
        # Named as objects are, which stores may keep elsewhere than all the rest: of an epoch that the writer never
        # reaches, for what no living writer could claim may be collected.
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
                Turn(*self._in_turn(partial(self._raw_put, key, pieces), partial(self._writer.put, self.sample)))
            )
            if self._directory is not None:
                (self._directory / _RAW_BESIDE).rename(self._directory / key)
        self._writer.swap()
        with RingReader(self.ring) as reader:
            slots = reader.newest().slots[-(self._writer.put_samples - first) :]
            for turn, key, slot in zip(turns, raws, slots, strict=True):
                turn.raw_get_s, turn.get_s = self._in_turn(partial(self._raw_get, key), partial(reader.sample, slot))
        self._store.delete(raws)
        self._raws.clear()
        Collector(self.ring).collect()
        return turns

    def close(self) -> None:
        """Remove all of it."""
        try:
            self._writer.close()
        finally:
            self._removed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _removed(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory)
            for parent in self._made:
                parent.rmdir()
            return
        self._store.delete(self._raws)
        if isinstance(self._store, RemovingStore):
            self._store.remove()
        else:
            emptied(self._store)
        self._store.close()

    def _in_turn(self, raw: Callable[[], object], ours: Callable[[], object]) -> tuple[float, float]:
        """Seconds of both. Each is first every other time: the second finds other memory free, and other caches."""
        self._raw_first = not self._raw_first
        if self._raw_first:
            return _timed(raw), _timed(ours)
        ours_s = _timed(ours)
        return _timed(raw), ours_s

    def _raw_put(self, key: str, pieces: Sequence[memoryview]) -> None:
        if self._directory is None:
            self._store.create(key, pieces)
        else:
            # In the directory in which the store makes its files. ext4 without a journal keeps inodes of removed files
            # for a minute, and passes over all of them for each new file near by: files that were removed a moment ago
            # would slow down one of two directories only.
            self._new_file(self._directory / _RAW_BESIDE, pieces)

    def _raw_get(self, key: str) -> None:
        if self._directory is not None:
            mapped_and_hashed(self._directory / key)
            return
        data = self._store.read(key)
        assert data is not None
        xxhash.xxh3_64_intdigest(data)


def bench(place: str, *, size_bytes: int, samples: int, rounds: int) -> Rates:
    """The first round is not counted. Raises RingMismatch, StoreFull, and OSError."""
    rates = Rates(size_bytes)
    with PlaceBench(place, sample_of(size_bytes), samples) as there:
        for number in range(rounds + 1):
            turns = there.round()
            rates.turns += turns if number else []
    return rates


def new_file(path: Path, pieces: Sequence[memoryview]) -> None:
    """The raw limit of putting: these bytes in a new file, and nothing else."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            left = piece
            while len(left):
                left = left[os.write(fd, left) :]
    finally:
        os.close(fd)


def mapped_and_hashed(path: Path) -> int:
    """The raw limit of getting: a file mapped, and every byte hashed once."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return xxhash.xxh3_64_intdigest(data)


def machine_limits(size_bytes: int, tries: int = 5) -> dict[str, float]:
    """Bytes per second that one thread of this machine copies, hashes, and sends to itself; medians."""
    source = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    target = np.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, source),
        "xxh3": lambda: xxhash.xxh3_64_intdigest(source.data),
        "loopback": lambda: _sent_to_itself(source.data),
    }
    return {name: size_bytes / median(_timed(way) for _ in range(tries)) for name, way in ways.items()}


def _sent_to_itself(data: memoryview) -> None:
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


def _beside(place: str) -> str:
    return f"{place.rstrip('/')}{'-' if _names_no_path(place) else '/'}bench-{secrets.token_hex(4)}"


def _names_no_path(place: str) -> bool:
    return place.startswith(("memory:", "baton:"))


def _directory_of(place: str) -> Path | None:
    kind, colon, rest = place.partition(":")
    return Path(rest if colon else place).expanduser() if not colon or kind == "fs" else None


def _timed(what: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    what()
    return time.perf_counter() - began_at
