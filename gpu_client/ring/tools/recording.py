"""Record samples of a ring as a permanent data set: shuffled, in shards, with the origin of each sample.

    <directory>/index.json       {"version": 1, "shards": [{"name", "samples", "size_bytes", "xxh3"}], "seed", "xxh3"}
    <directory>/shards/00000     one object of the ring's format (`format/objects.py`), with many samples

The index is the last written file: a directory without an index is no data set.
"""

from __future__ import annotations

import json
import mmap
import os
import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from gpu_client.ring.errors import ObjectDamaged, RingError, RingMismatch
from gpu_client.ring.format.manifest import RingManifest, Slot
from gpu_client.ring.format.objects import Provenance, StoredSamples, encode
from gpu_client.ring.format.sample_tree import FlattenedSample, flatten
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.store.filesystem import DirectoryStore

INDEX = "index.json"
SHARDS = "shards/"
_OPEN_SHARDS = 128
"""Maximum number of open shards; each takes a file descriptor."""


def record(
    reader: RingReader,
    directory: Path,
    samples: int,
    *,
    shard: int = 256,
    shuffle: int = 4096,
    seed: int = 0,
) -> int:
    """Record `samples` samples of the ring, each once. Returns the number of excluded damaged samples.

    `shard`: samples in one shard. `shuffle`: size of the shuffle buffer in samples. Raises RingMismatch for a used
    directory, WaitedTooLong, StoreFull, RingError for invalid numbers.
    """
    if samples < 1 or shard < 1 or shuffle < 0:
        raise RingError(
            f"{samples} samples in shards of {shard} are empty", "Use at least 1 for both, and at least 0 for shuffle"
        )
    if (directory / INDEX).exists():
        raise RingMismatch(f"{directory} already has a data set", "Name another directory")
    if any((directory / SHARDS).glob("*")):
        raise RingMismatch(f"{directory} has a part of a data set", "Remove it, or name another directory")
    store = DirectoryStore(directory)
    writer = _ShardWriter(store, shard, reader.name)
    chance = random.Random(seed)  # noqa: S311 - an order, not a secret
    buffered: list[tuple[FlattenedSample, Any]] = []
    damaged = 0
    taken = 0
    for slot in _new_slots(reader):
        try:
            sample = reader.sample(slot)
        except ObjectDamaged:
            damaged += 1
            continue
        # The buffer has thousands of samples, and an uncopied sample would keep its object open.
        buffered.append((flatten(sample).copied(), reader.provenance(slot)))
        reader.record_consumed(1)
        taken += 1
        if len(buffered) > shuffle:
            writer.put(*_draw(buffered, chance))
        if taken == samples:
            break
    while buffered:
        writer.put(*_draw(buffered, chance))
    writer.finish(seed)
    return damaged


class Recorded:
    """Recorded data set, map-style, for torch and other libraries."""

    def __init__(self, directory: str | Path) -> None:
        """Open the data set. Raises RingMismatch for a missing data set."""
        self._directory = Path(directory)
        try:
            index = json.loads((self._directory / INDEX).read_text(encoding="utf-8"))
            self._shards: list[dict[str, Any]] = index["shards"]
            self._ends = list(accumulate(int(one["samples"]) for one in self._shards))
            if "xxh3" in index and index.pop("xxh3") != _index_digest(index):
                raise ValueError(f"{INDEX} was altered")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RingMismatch(
                f"{directory} has no recorded data set ({error})", "Make one with baton ring record"
            ) from error
        self._open: OrderedDict[int, StoredSamples] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        """Read a sample. Raises IndexError, and ObjectDamaged for altered bytes."""
        stored, number = self._locate(index)
        return stored.sample(number)

    def provenance(self, index: int) -> Any:
        """Return the origin of a sample."""
        stored, number = self._locate(index)
        return stored.seed(number)

    def verify(self) -> None:
        """Verify all samples. Raises ObjectDamaged."""
        for place, one in enumerate(self._shards):
            stored = self._shard(place)
            stored.verify()
            if xxhash.xxh3_64_hexdigest(_map_private(self._directory / one["name"])) != one["xxh3"]:
                raise ObjectDamaged(f"{one['name']} differs from the recorded shard", "Record the data set again")
            if len(stored) != one["samples"]:
                raise ObjectDamaged(f"{one['name']} has {len(stored)} samples", f"The index says {one['samples']}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _locate(self, index: int) -> tuple[StoredSamples, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} samples, and no {index}")
        index %= len(self)
        place = bisect_right(self._ends, index)
        begin = self._ends[place - 1] if place else 0
        return self._shard(place), index - begin

    def _shard(self, place: int) -> StoredSamples:
        found = self._open.get(place)
        if found is None:
            path = self._directory / self._shards[place]["name"]
            found = self._open[place] = StoredSamples(str(path), _map_private(path))
            while len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(place)
        return found


class _ShardWriter:
    def __init__(self, store: DirectoryStore, size: int, name: str) -> None:
        self._store, self._size, self._name = store, size, name
        self._buffered: list[tuple[FlattenedSample, Any]] = []
        self._written: list[dict[str, Any]] = []

    def put(self, sample: FlattenedSample, provenance: Any) -> None:
        self._buffered.append((sample, provenance))
        if len(self._buffered) == self._size:
            self._flush()

    def finish(self, seed: int) -> None:
        self._flush()
        index: dict[str, Any] = {"version": 1, "seed": seed, "shards": self._written}
        index["xxh3"] = _index_digest(index)
        if not self._store.create(INDEX, [memoryview(json.dumps(index, indent=1).encode())]):
            raise RingMismatch(
                "another process has recorded into the directory at the same time", "Name an empty directory"
            )

    def _flush(self) -> None:
        if not self._buffered:
            return
        number = len(self._written)
        name = f"{SHARDS}{number:05d}"
        made = encode(
            [sample for sample, _ in self._buffered],
            Provenance(self._name, 1, number, 0.0, "recorded"),
            seeds=[provenance for _, provenance in self._buffered],
        )
        if not self._store.create(name, made):
            raise RingMismatch(f"{name} is there already", "Name an empty directory")
        digest = xxhash.xxh3_64()
        for piece in made:
            digest.update(piece)
        self._written.append(
            {"name": name, "samples": len(self._buffered), "size_bytes": made.size_bytes, "xxh3": digest.hexdigest()}
        )
        self._buffered.clear()


def _new_slots(reader: RingReader) -> Iterator[Slot]:
    """Yield every sample once: first the readable samples, then each new sample."""
    seen = 0

    def ready() -> RingManifest | None:
        newest = reader.newest()
        return newest if newest.inserted > seen else None

    while True:
        manifest: RingManifest = reader.wait(ready, "no new samples came")
        reader.keep_only([manifest.number])
        for slot in manifest.slots:
            if slot.inserted >= seen:
                yield slot
        seen = manifest.inserted


def _index_digest(index: dict[str, Any]) -> str:
    """Digest an index without its own digest."""
    return xxhash.xxh3_64_hexdigest(json.dumps(index, sort_keys=True).encode())


def _map_private(path: Path) -> memoryview:
    """Map a file, also in a read-only directory. Raises ObjectDamaged for a missing file."""
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            # The mapping is private, so that the caller may write to the arrays without changing the file.
            return memoryview(mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_COPY) if size_bytes else b"")
    except FileNotFoundError as error:
        raise ObjectDamaged(f"{path} is not there", "Record the data set again") from error


def _draw(buffered: list[tuple[FlattenedSample, Any]], chance: random.Random) -> tuple[FlattenedSample, Any]:
    place = chance.randrange(len(buffered))
    buffered[place], buffered[-1] = buffered[-1], buffered[place]
    return buffered.pop()
