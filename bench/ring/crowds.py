"""Many writers at once: delivered samples (target 4) and scaling (target 11)."""

from __future__ import annotations

import time
from pathlib import Path

from bench.harness.figures import Figure
from bench.ring import roles
from bench.ring.population import Counters, begun, ended_well, population
from gpu_client.ring.core.ring import make_ring
from gpu_client.ring.settings import RingSettings

CAP = 50
"""Generation size of Wirehead's measurements; in a small generation the waste is a larger share."""
SLEEP_S = 1.62
"""Time of one sample on one GPU in Wirehead's tutorial."""
CROWDS = (1, 8, 64)
TIMEOUT_S = 180.0


def yields(scratch: Path, *, samples: int) -> list[Figure]:
    """Count samples that never became readable: of 64 writers that start at once, and of 8 that die."""
    crowd, _ = _harvested(scratch / "crowd", writers=64, samples=samples, every_s=1.0, dies_every=0)
    dying, kills = _harvested(scratch / "dying", writers=8, samples=max(samples * 5, 51), every_s=0.12, dies_every=50)
    return [
        Figure(
            name="64 writers: samples made and not delivered",
            unit="%",
            rounds=[100 * (1 - crowd[1] / crowd[0])],
            at_most=1.0,
            counted=True,
            details={"made": crowd[0], "delivered": crowd[1], "cap": CAP, "mode": "generation"},
        ),
        Figure(
            name="8 writers that die at every 50th sample: not delivered",
            unit="%",
            rounds=[100 * (1 - dying[1] / dying[0])],
            at_most=3.0,
            counted=True,
            details={"made": dying[0], "delivered": dying[1], "kills": kills},
        ),
        Figure(
            name="  samples that a kill costs",
            unit="",
            rounds=[(dying[0] - dying[1]) / kills],
            at_most=1.0,
            counted=True,
        ),
    ]


def _harvested(
    scratch: Path, *, writers: int, samples: int, every_s: float, dies_every: int
) -> tuple[tuple[int, int], int]:
    """Count made and delivered samples and dead writers."""
    ring = make_ring(str(scratch), RingSettings(cap=CAP, mode="generation", max_ahead=4 * CAP))
    counters = Counters(roles.WRITES, writers)
    work = [(str(scratch), number, counters, every_s, samples, dies_every) for number in range(writers)]
    kills = 0
    with population(roles.generate_some, work) as processes:
        until = time.monotonic() + TIMEOUT_S + samples * every_s
        while any(process.exitcode != 0 for process in processes):
            for number, process in enumerate(processes):
                if process.exitcode is not None and process.exitcode < 0:
                    kills += 1
                    processes[number] = begun(roles.generate_some, *work[number])
                elif process.exitcode:
                    raise RuntimeError(f"a writer ended with {process.exitcode}")
            if time.monotonic() > until:
                raise TimeoutError(f"{counters.total('put')} samples put of {writers * samples}")
            time.sleep(0.02)
    while ring.publish(at_once=True) is not None:
        pass
    return (counters.total("made"), ring.newest().inserted), kills


def scaling(scratch: Path, *, rounds: int, samples: int) -> list[Figure]:
    """Compare the time for a sample of 8 and of 64 writers with one alone. They sleep as if a GPU worked."""
    every: dict[int, list[float]] = {writers: [] for writers in CROWDS}
    for number in range(rounds):
        for writers in CROWDS:
            every[writers].append(_cycle_s(scratch / f"{number}-{writers}", writers, samples))
    return [
        Figure(
            name=f"{writers} writers of {SLEEP_S} s: time for a sample of each",
            unit="s",
            rounds=every[writers],
            baseline_name="alone",
            baseline=every[1],
            at_most=1 / 0.95,
            details={"samples_per_s": [round(writers / one, 3) for one in every[writers]]},
        )
        for writers in CROWDS[1:]
    ]


def _cycle_s(scratch: Path, writers: int, samples: int) -> float:
    """Compute the mean seconds for a sample, without each writer's first."""
    make_ring(str(scratch), RingSettings(cap=1000, publish_interval_s=1.0))
    counters = Counters(roles.WRITES, writers)
    work = [(str(scratch), number, counters, SLEEP_S, samples + 1, 0) for number in range(writers)]
    with population(roles.generate_some, work) as processes:
        ended_well(processes, TIMEOUT_S)
    spans = [counters.of("at_us", one) - counters.of("first_us", one) for one in range(writers)]
    return sum(spans) / len(spans) / samples / 1e6
