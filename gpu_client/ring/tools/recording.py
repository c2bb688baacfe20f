"""From a ring to a data set that stays: shuffled, in shards, with where each sample came from.

    <directory>/index.json       {"version": 1, "shards": [{"name", "samples", "size_bytes", "xxh3"}], "seed", "xxh3"}
    <directory>/shards/00000     an object as rings store them (`objects.py`), with many samples

The index is written last: a directory without one is no data set yet.
"""

from __future__ import annotations

import json
import mmap
import os
import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from gpu_client.ring.errors import ObjectDamaged, RingError, RingMismatch
from gpu_client.ring.format.manifest import Manifest, Slot
from gpu_client.ring.format.objects import Provenance, StoredSamples, encode
from gpu_client.ring.format.sample_tree import Taken, take_apart
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.store.filesystem import DirectoryStore

INDEX = "index.json"
SHARDS = "shards/"
_OPEN_SHARDS = 128
"""Each takes a descriptor, of which a process has few."""


def record(
    reader: RingReader,
    directory: Path,
    samples: int,
    *,
    shard: int = 256,
    shuffle: int = 4096,
    seed: int = 0,
    told: Callable[[int], object] = lambda _: None,
) -> int:
    """Take each new sample of the ring once, until there are so many; how many damaged ones were left out.

    shard: samples in one. shuffle: so many are held in memory, from which the next one is taken at random. told: is
    given how many were taken. Raises RingMismatch where something is already, WaitedTooLong, StoreFull, RingError for
    numbers that mean nothing.
    """
    if samples < 1 or shard < 1 or shuffle < 0:
        raise RingError(f"{samples} samples in shards of {shard} are none", "Both are at least 1, shuffle at least 0")
    if (directory / INDEX).exists():
        raise RingMismatch(f"{directory} has a data set already", "Name another directory")
    if any((directory / SHARDS).glob("*")):
        raise RingMismatch(f"{directory} has a part of a data set", "Remove it, or name another directory")
    store = DirectoryStore(directory)
    writer = _ShardWriter(store, shard, reader.name)
    chance = random.Random(seed)  # noqa: S311 - an order, not a secret
    held: list[tuple[Taken, Any]] = []
    damaged = 0
    taken = 0
    for slot in _new_slots(reader):
        try:
            sample = reader.sample(slot)
        except ObjectDamaged:
            damaged += 1
            continue
        # Thousands are held, and each would keep its object open.
        held.append((take_apart(sample).copied(), reader.provenance(slot)))
        reader.took(1)
        taken += 1
        told(taken)
        if len(held) > shuffle:
            writer.put(*_drawn(held, chance))
        if taken == samples:
            break
    while held:
        writer.put(*_drawn(held, chance))
    writer.finish(seed)
    return damaged


class Recorded:
    """A recorded data set, by index: a map-style data set for torch, or for anything else."""

    def __init__(self, directory: str | Path) -> None:
        """Raises RingMismatch for a directory that is none."""
        self._directory = Path(directory)
        try:
            index = json.loads((self._directory / INDEX).read_text(encoding="utf-8"))
            self._shards: list[dict[str, Any]] = index["shards"]
            self._ends = list(accumulate(int(one["samples"]) for one in self._shards))
            if "xxh3" in index and index.pop("xxh3") != _digest_of(index):
                raise ValueError(f"{INDEX} was altered")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RingMismatch(
                f"{directory} has no recorded data set ({error})", "Make one with baton ring record"
            ) from error
        self._open: OrderedDict[int, StoredSamples] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        """Raises IndexError, and ObjectDamaged for one whose bytes were altered."""
        stored, number = self._at(index)
        return stored.sample(number)

    def provenance(self, index: int) -> Any:
        """Who made it, and from what."""
        stored, number = self._at(index)
        return stored.seed(number)

    def verify(self) -> None:
        """Read everything. Raises ObjectDamaged."""
        for place, one in enumerate(self._shards):
            stored = self._shard(place)
            stored.verify()
            if xxhash.xxh3_64_hexdigest(_mapped(self._directory / one["name"])) != one["xxh3"]:
                raise ObjectDamaged(f"{one['name']} is another one than was recorded", "Record it again")
            if len(stored) != one["samples"]:
                raise ObjectDamaged(f"{one['name']} has {len(stored)} samples", f"The index says {one['samples']}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _at(self, index: int) -> tuple[StoredSamples, int]:
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
            found = self._open[place] = StoredSamples(str(path), _mapped(path))
            while len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(place)
        return found


class _ShardWriter:
    def __init__(self, store: DirectoryStore, size: int, name: str) -> None:
        self._store, self._size, self._name = store, size, name
        self._held: list[tuple[Taken, Any]] = []
        self._written: list[dict[str, Any]] = []

    def put(self, sample: Taken, provenance: Any) -> None:
        self._held.append((sample, provenance))
        if len(self._held) == self._size:
            self._flush()

    def finish(self, seed: int) -> None:
        self._flush()
        index: dict[str, Any] = {"version": 1, "seed": seed, "shards": self._written}
        index["xxh3"] = _digest_of(index)
        if not self._store.create(INDEX, [memoryview(json.dumps(index, indent=1).encode())]):
            raise RingMismatch("somebody else has recorded there at the same time", "Name an empty directory")

    def _flush(self) -> None:
        if not self._held:
            return
        number = len(self._written)
        name = f"{SHARDS}{number:05d}"
        made = encode(
            [sample for sample, _ in self._held],
            Provenance(self._name, 1, number, 0.0, "recorded"),
            seeds=[provenance for _, provenance in self._held],
        )
        if not self._store.create(name, made):
            raise RingMismatch(f"{name} is there already", "Name an empty directory")
        digest = xxhash.xxh3_64()
        for piece in made:
            digest.update(piece)
        self._written.append(
            {"name": name, "samples": len(self._held), "size_bytes": made.size_bytes, "xxh3": digest.hexdigest()}
        )
        self._held.clear()


def _new_slots(reader: RingReader) -> Iterator[Slot]:
    """Every sample once, as it becomes readable; those that are there at first, too."""
    seen = 0

    def ready() -> Manifest | None:
        newest = reader.newest()
        return newest if newest.inserted > seen else None

    while True:
        manifest: Manifest = reader.wait(ready, "no new samples came")
        reader.keep_only([manifest.number])
        for slot in manifest.slots:
            if slot.inserted >= seen:
                yield slot
        seen = manifest.inserted


def _digest_of(index: dict[str, Any]) -> str:
    """Of an index without its digest."""
    return xxhash.xxh3_64_hexdigest(json.dumps(index, sort_keys=True).encode())


def _mapped(path: Path) -> memoryview:
    """A file, from anywhere: data sets often lie where nobody may write. Raises ObjectDamaged if it is not there."""
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            # Private: arrays of it can be written to, and nobody else sees it.
            return memoryview(mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_COPY) if size_bytes else b"")
    except FileNotFoundError as error:
        raise ObjectDamaged(f"{path} is not there", "Record it again") from error


def _drawn(held: list[tuple[Taken, Any]], chance: random.Random) -> tuple[Taken, Any]:
    place = chance.randrange(len(held))
    held[place], held[-1] = held[-1], held[place]
    return held.pop()
