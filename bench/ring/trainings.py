"""Trainings on a ring: exact resume (target 7), requested flow (target 9), waiting (target 12)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.figures import Figure
from bench.ring import roles
from bench.ring.population import Counters, begun, population, wait_for
from gpu_client.ring.core.garbage_collector import count_samples_read
from gpu_client.ring.core.ring import Ring, make_ring
from gpu_client.ring.reading.loader import RingLoader
from gpu_client.ring.settings import RingSettings

PER_INSERT = 4.0
CONSUMED_PER_S = 400.0
FLOW_BATCH = 8
WARM_UP_READS = 160
"""Reads after which the writers are as far ahead as the settings allow."""
OFFERED = (0.1, 1.0, 10.0)
"""Ratios of the producers' rate to the rate that consumers can take at the wanted reuse."""
STEP_S = 0.1
BATCH, MAX_USES = 8, 4
TIMEOUT_S = 120.0


def resumed(scratch: Path, *, batches: int) -> list[Figure]:
    """Compare a training that is killed after each batch, on a running ring, with an undisturbed one."""
    place = str(scratch / "resumed")
    make_ring(place, RingSettings(cap=48, publish_interval_s=0.05, retain=2))
    counters = Counters(roles.WRITES, 2)
    traces = {name: scratch / f"{name}.jsonl" for name in ("whole", "killed")}
    kills = 0
    with population(roles.write_for_ever, [(place, number, counters, 0.005) for number in range(2)]):
        whole = begun(roles.train, place, "bench", traces["whole"], batches, 0)
        while len(_lines(traces["killed"])) < batches:
            process = begun(roles.train, place, "bench", traces["killed"], batches, 1)
            process.join(TIMEOUT_S)
            if process.exitcode is None or process.exitcode > 0:
                raise RuntimeError(f"a training ended with {process.exitcode}")
            kills += process.exitcode != 0
        whole.join(TIMEOUT_S)
    one, other = ([json.loads(line)["ids"] for line in _lines(path)] for path in traces.values())
    differ = sum(a != b for a, b in zip(one, other, strict=True))
    details = {"batches": batches, "kills": kills, "samples": len({id_ for ids in one for id_ in ids})}
    return [
        Figure(
            name="batches that differ after a kill",
            unit="",
            rounds=[differ],
            at_most=0,
            counted=True,
            details=details,
        )
    ]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def flow(scratch: Path, *, lasts_s: float) -> list[Figure]:
    """Measure the deviation of reads for each insert once writers have reached their limit."""
    off, details = [], []
    for offered in OFFERED:
        # The slower side is as slow as is said; the other could be so many times as fast.
        produced_per_s = CONSUMED_PER_S / PER_INSERT * min(offered, 1.0)
        consumed_per_s = CONSUMED_PER_S / max(offered, 1.0)
        if offered > 1:
            produced_per_s = offered * consumed_per_s / PER_INSERT
        place = str(scratch / f"flow-{offered:g}")
        settings = RingSettings(cap=256, samples_per_insert=PER_INSERT, min_size=16, publish_interval_s=0.1)
        ring = make_ring(place, settings)
        counters = Counters(roles.WRITES, 1)
        with (
            population(roles.produce, [(place, produced_per_s, counters)]),
            population(roles.consume, [(place, consumed_per_s, FLOW_BATCH)]),
        ):
            wait_for(lambda ring=ring: _moved(ring)[1] > WARM_UP_READS, "reading", TIMEOUT_S)  # type: ignore[misc]
            before = _moved(ring)
            time.sleep(lasts_s)
            after = _moved(ring)
        ratio = (after[1] - before[1]) / (after[0] - before[0])
        off.append(100 * abs(ratio / PER_INSERT - 1))
        # One may be on its way.
        discarded = max(counters.total("made") - counters.total("put") - 1, 0)
        details.append(
            {
                "offered": offered,
                "reads_per_insert": round(ratio, 3),
                "inserted": after[0] - before[0],
                "read": after[1] - before[1],
                "writer_waited_s": counters.total("waited_us") / 1e6,
                "made_and_not_put": discarded,
            }
        )
    return [
        Figure(
            name=f"{PER_INSERT:g} samples per insert, 1:10 to 10:1: off by",
            unit="%",
            rounds=off,
            at_most=5.0,
            counted=True,
            details={"cases": details},
        ),
        Figure(
            name="  samples that were made and not put",
            unit="",
            rounds=[float(case["made_and_not_put"]) for case in details],
            at_most=0,
            counted=True,
        ),
    ]


def _moved(ring: Ring) -> tuple[int, int]:
    return ring.newest().inserted, count_samples_read(ring)


def waiting(scratch: Path, *, rounds: int, batches: int, warm_up: int) -> list[Figure]:
    """Measure the share of a training's time spent waiting, with 1.25 times the needed production."""
    parts, medians, longest = [], [], []
    for number in range(rounds):
        place = str(scratch / f"waiting-{number}")
        make_ring(place, RingSettings(cap=256, max_uses=MAX_USES, min_size=64))
        needed_per_s = BATCH / STEP_S / MAX_USES
        counters = Counters(roles.WRITES, 4)
        writers = [(place, one, counters, 4 / (1.25 * needed_per_s)) for one in range(4)]
        with population(roles.write_for_ever, writers):
            waits = _waits_s(RingLoader(place, batch_size=BATCH, workers=1), batches, warm_up)
        parts.append(100 * sum(waits) / (sum(waits) + batches * STEP_S))
        medians.append(round(1e3 * median(waits), 3))
        longest.append(round(1e3 * max(waits), 3))
    return [
        Figure(
            name=f"a training whose steps are sleeps of {STEP_S:g} s waits for data, of its time",
            unit="%",
            rounds=parts,
            at_most=1.0,
            details={
                "step_s": STEP_S,
                "batch": BATCH,
                "max_uses": MAX_USES,
                "batches": batches,
                "median_ms": medians,
                "longest_ms": longest,
            },
        )
    ]


def _waits_s(loader: RingLoader, batches: int, warm_up: int) -> list[float]:
    """List the seconds in `next` for each batch after the warm-up."""
    source: Iterator[Any] = iter(loader)
    for _ in islice(source, warm_up):
        time.sleep(STEP_S)
    waits = []
    for _ in range(batches):
        asked_at = time.perf_counter()
        next(source)
        waits.append(time.perf_counter() - asked_at)
        time.sleep(STEP_S)
    source.close()  # type: ignore[attr-defined]
    return waits
