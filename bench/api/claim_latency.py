"""Compare a claim with many waiting jobs to a claim with few: two deployments in one emulator, in turns."""

from __future__ import annotations

import time
from statistics import median

from bench.harness.figures import Figure
from bench.harness.plane import Plane

LARGE, SMALL = 10_000, 10
TARGET_RATIO = 1.3
WARM_UP_CLAIMS = 10


def measure(endpoint_url: str, *, rounds: int, claims: int, large: int = LARGE) -> list[Figure]:
    """Time `claims` claims a round in either backlog; refills of the backlogs are not timed."""
    few, many = Plane(endpoint_url, "few-"), Plane(endpoint_url, "many-")
    few.fill(SMALL)
    began = time.perf_counter()
    many.fill(large)
    fill_s = time.perf_counter() - began
    for plane in (few, many) * WARM_UP_CLAIMS:
        _timed_claim_ms(plane)
    of_few: list[float] = []
    of_many: list[float] = []
    for _ in range(rounds):
        times: dict[str, list[float]] = {few.prefix: [], many.prefix: []}
        for turn in range(claims):
            for plane in (few, many) if turn % 2 else (many, few):
                times[plane.prefix].append(_timed_claim_ms(plane))
        of_few.append(median(times[few.prefix]))
        of_many.append(median(times[many.prefix]))
    return [
        Figure(
            name=f"claim with {large} jobs waiting",
            unit="ms",
            rounds=of_many,
            baseline_name=f"with {SMALL}",
            baseline=of_few,
            at_most=TARGET_RATIO,
            details={
                "each round": f"median of {claims} claims in turns, through the dispatcher",
                "fill_s": round(fill_s, 1),
            },
        )
    ]


def _timed_claim_ms(plane: Plane) -> float:
    began = time.perf_counter()
    claimed = plane.claim()
    took_ms = (time.perf_counter() - began) * 1000
    if len(claimed) != 1:
        raise RuntimeError(f"{plane.prefix}: the claim found no job")
    plane.submit()
    return took_ms
