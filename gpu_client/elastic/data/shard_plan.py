"""Put the shards of one or several data sets into one order, which is equal on all machines.

A position of the order stands for one shard in one pass over its data set; the control plane knows positions only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b, sha256
from math import gcd, lcm
from pathlib import Path
from typing import Self

from gpu_client.elastic.errors import ElasticSetupError

Source = int | Iterable[str | Path]
"""Number of the shards of a data set, or its files in any order."""
MAX_PERIOD = 1_000_000


@dataclass(frozen=True)
class Shard:
    """Shard to train, from `offset` on.

    source: name of the data set; "" for a single data set. index: place in the data set. path: file, None for a data
    set that is given by its number of shards. offset: part of the shard that is trained already, in the script's unit.
    """

    position: int
    source: str
    index: int
    path: Path | None
    offset: int
    _note: Callable[[int, int], None] = field(repr=False, compare=False)

    def advance(self, offset: int) -> None:
        """Note that the shard is trained up to `offset`. Call before the step that counts the batch."""
        if offset < self.offset:
            raise ElasticSetupError(f"shard {self.position} goes back to offset {offset}", "Train a shard in its order")
        self._note(self.position, offset)


@dataclass(frozen=True)
class _DataSet:
    name: str
    files: tuple[Path, ...] | None
    count: int
    share: int
    """Shards of each period of the mixture."""


class ShardPlan:
    """Order of shards. positions: length of the order; None for endless passes. sha256: digest for comparison."""

    def __init__(self, data_sets: Sequence[_DataSet], seed: int, passes: int | None) -> None:
        self._data_sets = tuple(data_sets)
        self._seed = seed
        self._pattern, self._draws = _mix([one.share for one in data_sets])
        self.positions = None if passes is None else self._count_positions(passes)
        names = [[one.name, one.count, one.share, _relative_names(one.files)] for one in data_sets]
        self.sha256 = sha256(json.dumps([seed, passes, names]).encode()).hexdigest()

    @classmethod
    def make(
        cls,
        data: Source | Mapping[str, Source],
        ratios: Mapping[str, float] | None = None,
        seed: int = 0,
        passes: int | None = 1,
    ) -> Self:
        """Return the order of one data set, or of a mixture: with ratios, shards of data sets alternate by ratio.

        passes: passes over each data set. A mixture ends before any data set would begin a further pass. Without
        ratios, the numbers of shards are the ratios. Raises ElasticSetupError.
        """
        named = data if isinstance(data, Mapping) else {"": data}
        sources = {name: one if isinstance(one, int) else sorted(map(Path, one)) for name, one in named.items()}
        ratios = ratios or {name: _count(source) for name, source in sources.items()}
        if ratios.keys() != sources.keys():
            wrong = sorted(ratios.keys() ^ sources.keys())
            raise ElasticSetupError(
                f"{', '.join(wrong)} is a data set or a ratio only", "Give a ratio to each data set"
            )
        if passes is not None and passes < 1:
            raise ElasticSetupError(f"passes is {passes}", "Train at least 1 pass, or None for endless passes")
        for name, source in sources.items():
            if _count(source) < 1 or ratios[name] <= 0:
                problem = f"the data set {name!r} has {_count(source)} shards and the ratio {ratios[name]}"
                raise ElasticSetupError(problem, "Give each data set a shard and a ratio above 0, or leave it out")
        shares = _whole_shares([ratios[name] for name in sorted(sources)])
        data_sets = [
            _DataSet(name, _files_of(sources[name]), _count(sources[name]), share)
            for name, share in zip(sorted(sources), shares, strict=True)
        ]
        return cls(data_sets, seed, passes)

    def locate(self, position: int, offset: int, note: Callable[[int, int], None]) -> Shard:
        """Return the shard at a position. note: receives position and offset of `Shard.advance`."""
        periods, place = divmod(position, len(self._pattern))
        number = self._pattern[place]
        one = self._data_sets[number]
        turn, index = divmod(periods * one.share + self._draws[place], one.count)
        index = _shuffle(f"{self._seed}/{one.name}/{turn}", one.count)[index]
        return Shard(position, one.name, index, one.files[index] if one.files else None, offset, note)

    def _count_positions(self, passes: int) -> int:
        """Return the number of positions before the first data set would begin pass `passes` + 1."""
        ends = []
        for number, one in enumerate(self._data_sets):
            periods, rest = divmod(passes * one.count, one.share)
            places = [place for place, other in enumerate(self._pattern) if other == number]
            ends.append(periods * len(self._pattern) + places[rest])
        return min(ends)


def _count(source: int | Sequence[Path]) -> int:
    return source if isinstance(source, int) else len(source)


def _files_of(source: int | Sequence[Path]) -> tuple[Path, ...] | None:
    return None if isinstance(source, int) else tuple(source)


def _relative_names(files: tuple[Path, ...] | None) -> list[str]:
    """Return the names of the files below their common directory, which may have another path on each machine."""
    folder = os.path.commonpath([one.parent.absolute() for one in files]) if files else ""
    return [one.absolute().relative_to(folder).as_posix() for one in files or ()]


def _whole_shares(ratios: Sequence[float]) -> list[int]:
    """Return ratios as small whole numbers."""
    exact = [Fraction(one).limit_denominator(1000) for one in ratios]
    factor = lcm(*[one.denominator for one in exact])
    whole = [int(one * factor) for one in exact]
    shares = [one // (gcd(*whole) or 1) for one in whole]
    if min(shares) < 1 or sum(shares) > MAX_PERIOD:
        problem = f"the ratios {', '.join(map(str, ratios))} alternate in periods of {sum(shares)} shards"
        raise ElasticSetupError(problem, f"Round the ratios so that periods have {MAX_PERIOD} shards at most")
    return shares


def _mix(shares: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the data set of each position of one period, as evenly as possible, and the number of its draws before."""
    pattern: list[int] = []
    draws: list[int] = []
    counts = [0] * len(shares)
    for place in range(1, sum(shares) + 1):
        lacks = [share * place - count * sum(shares) for share, count in zip(shares, counts, strict=True)]
        pattern.append(lacks.index(max(lacks)))
        draws.append(counts[pattern[-1]])
        counts[pattern[-1]] += 1
    return pattern, draws


@lru_cache(maxsize=16)
def _shuffle(key: str, count: int) -> list[int]:
    """Return the places in an order that depends on the key alone, on each machine and version of Python."""
    return sorted(range(count), key=lambda place: blake2b(f"{key}/{place}".encode(), digest_size=16).digest())
