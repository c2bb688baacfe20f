"""Put and get, in turns with raw limits of the machine and with Wirehead (target 2)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from bench.harness.figures import Figure
from bench.ring.wirehead import rival
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tools.benchmark import BenchmarkTurn, StoreBenchmark, make_sample, measure_machine

PAIR_BYTES = 32 * 1024 * 1024
"""Two volumes of 256 x 256 x 256 in uint8, as Wirehead stores them."""
LOSSLESS_BYTES = 80 * 1024 * 1024
"""The image in float32 instead."""
SMALL_BYTES, PACK = 64 * 1024, 32
OF_NPY = 0.8
OF_RAW = 0.7
_FILE_BYTES, _PART_BYTES = PAIR_BYTES, 2 * 1024 * 1024


def against_raw(scratch: Path, *, rounds: int, samples: int, scale: int = 1) -> list[Figure]:
    """Compare a writer with a new file, a reader with a hashed memory map. `scale` divides the sample size."""
    found = []
    image = np.random.default_rng(1).random(LOSSLESS_BYTES // scale // 5, np.float32)
    label = np.random.default_rng(2).integers(0, 200, image.size, np.uint8)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("32 MiB, uint8 pair", make_sample(PAIR_BYTES // scale)),
        ("80 MiB, float32 + uint8", {"image": image, "label": label}),
    ]
    for name, sample in cases:
        with StoreBenchmark(str(scratch), sample, samples) as bench:
            bench.run_round()
            turns = [_warmed(bench, scratch).run_round() for _ in range(rounds)]
        found += [
            _figure(f"put, {name}", turns, "put_s", "raw_put_s", "new file"),
            _figure(f"verified get, {name}", turns, "get_s", "raw_get_s", "mmap + xxh3"),
        ]
    return found


def packed(scratch: Path, *, rounds: int) -> list[Figure]:
    """Compare small samples in packs with one new file for each."""
    samples = PACK * 4
    settings = RingSettings(cap=4 * samples, pack=PACK)
    with StoreBenchmark(str(scratch), make_sample(SMALL_BYTES), samples, settings=settings) as bench:
        bench.run_round()
        turns = [_warmed(bench, scratch).run_round() for _ in range(rounds)]
    return [
        _figure(f"put, 64 KiB by packs of {PACK}", turns, "put_s", "raw_put_s", "new file", mean=True, at_most=None),
        _figure("verified get, the same", turns, "get_s", "raw_get_s", "mmap + xxh3", mean=True, at_most=None),
    ]


def against_npy(scratch: Path, *, rounds: int, samples: int) -> list[Figure]:
    """Compare `put` of small arrays with `numpy.save` into a plain file, array by array in turns.

    Per-sample medians count without packs. With packs one `put` in `pack` stores all of them, so means count. The
    target holds for the way that docs/ring.md recommends at each size ("Packs").
    """
    found = []
    for size_bytes, label, recommended in ((64 * 1024, "64 KiB", 16), (1024 * 1024, "1 MiB", 1)):
        for pack in (1, 16):
            with StoreBenchmark(
                str(scratch),
                {"x": np.random.default_rng(1).random(size_bytes // 4, np.float32)},
                samples,
                settings=RingSettings(cap=4 * samples, pack=pack),
                raw_put=_npy_file,
            ) as bench:
                bench.run_round()
                turns = [_warmed(bench, scratch).run_round() for _ in range(rounds)]
            name = f"put, {label}" + (f" by packs of {pack}" if pack > 1 else "")
            at_most = 1 / OF_NPY if pack == recommended else None
            found.append(_figure(name, turns, "put_s", "raw_put_s", ".npy file", mean=pack > 1, at_most=at_most))
    return found


def _npy_file(path: Path, pieces: Sequence[memoryview]) -> None:
    with path.open("xb") as file:
        np.save(file, np.frombuffer(pieces[0], np.float32))


def _warmed(bench: StoreBenchmark, scratch: Path) -> StoreBenchmark:
    """Touch memory and page cache for two rounds, each of which puts everything twice.

    A virtual machine gives free memory back to its host within seconds. Who writes to it first then waits for the host,
    ten times as long as for the copy, and it is chance whether that is a raw file or a sample.
    """
    wanted = 4 * bench.samples * bench.size_bytes
    size_bytes = min(wanted, psutil.virtual_memory().available // 8)
    part = bytes(_PART_BYTES)
    files = [scratch / f"warm-{number}" for number in range(-(-size_bytes // _FILE_BYTES))]
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        touched = np.ndarray(size_bytes, np.uint8, memory)
        touched[:: mmap.PAGESIZE] = 1
        del touched
        for (
            path
        ) in files:  # by parts of the size that samples are written by, as the kernel keeps what is free by sizes
            with path.open("wb", buffering=0) as file:
                for _ in range(_FILE_BYTES // _PART_BYTES):
                    file.write(part)
    for path in files:
        path.unlink()
    return bench


def _figure(
    name: str,
    rounds: list[list[BenchmarkTurn]],
    ours: str,
    raw: str,
    raw_name: str,
    *,
    mean: bool = False,
    at_most: float | None = 1 / OF_RAW,
) -> Figure:
    # Of a pack one put does the work of all, so it is their mean that counts.
    summed: Callable[[list[float]], float] = (lambda values: sum(values) / len(values)) if mean else median
    return Figure(
        name=name,
        unit="ms",
        rounds=[1e3 * summed([getattr(turn, ours) for turn in turns]) for turns in rounds],
        baseline_name=raw_name,
        baseline=[1e3 * summed([getattr(turn, raw) for turn in turns]) for turns in rounds],
        at_most=at_most,
    )


def limits(*, rounds: int, scale: int = 1) -> list[Figure]:
    """Measure what one thread of this machine does with 32 MiB, without files."""
    found = [measure_machine(PAIR_BYTES // scale, tries=3) for _ in range(rounds)]
    names = {"copy": "copied in memory", "xxh3": "hashed (xxh3)", "loopback": "sent through loopback"}
    return [
        Figure(name=f"raw: 32 MiB {label}", unit="ms", rounds=[1e3 * PAIR_BYTES / scale / one[name] for one in found])
        for name, label in names.items()
    ]


def against_wirehead(scratch: Path, *, rounds: int, scale: int = 1) -> list[Figure]:
    """Measure the same pair through the real Wirehead, round by round in turns."""
    size_bytes, samples = PAIR_BYTES // scale, rival.CAP
    ours, theirs, alone = list[list[BenchmarkTurn]](), list[tuple[float, float]](), list[tuple[float, float]]()
    with rival.running(scratch) as wirehead, StoreBenchmark(str(scratch), make_sample(size_bytes), samples) as bench:
        wirehead("make", size_bytes)
        wirehead("put", samples)
        wirehead("get", 1)
        bench.run_round()
        for _ in range(rounds):
            ours.append(_warmed(bench, scratch).run_round())
            _warmed(bench, scratch)
            theirs.append((median(wirehead("put", samples)), median(wirehead("get", samples))))
            put, get = zip(*wirehead("ceiling", samples), strict=True)
            alone.append((median(put), median(get)))
        exact = wirehead("exact")
    found = []
    for place, (name, seconds, at_most) in enumerate((("put", "put_s", 1 / 4), ("get", "get_s", 1 / 7))):
        values = [1e3 * median(getattr(turn, seconds) for turn in turns) for turns in ours]
        for other, rivals, bound in (("Wirehead", theirs, at_most), ("its client alone", alone, 1.0)):
            found.append(
                Figure(
                    name=f"{name}, 32 MiB pair, against {other}",
                    unit="ms",
                    rounds=values,
                    baseline_name=other,
                    baseline=[1e3 * one[place] for one in rivals],
                    at_most=bound,
                    details={"server": "stand-in for MongoDB, in memory", "kinds_it_keeps_exact": exact},
                )
            )
    return found
