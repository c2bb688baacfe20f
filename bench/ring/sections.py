"""Sections of the ring's bench, by the rows of its targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.figures import Figure
from bench.ring import crowds, exactness, freshness, speed, swaps, trainings


@dataclass(frozen=True)
class Extent:
    """Extent of every section."""

    rounds: int
    quick: bool

    def of(self, whole: int, little: int) -> int:
        """Choose `little` for `--quick`."""
        return little if self.quick else whole


Measure = Callable[[Path, Extent], list[Figure]]


def _raw(scratch: Path, extent: Extent) -> list[Figure]:
    return speed.limits(rounds=extent.rounds, scale=extent.of(1, 16))


def _speed(scratch: Path, extent: Extent) -> list[Figure]:
    scale = extent.of(1, 16)
    found = speed.against_raw(scratch, rounds=extent.rounds, samples=6, scale=scale)
    found += speed.packed(scratch, rounds=extent.rounds)
    return found + speed.against_wirehead(scratch, rounds=extent.rounds, scale=scale)


SECTIONS: dict[str, list[tuple[str, Measure]]] = {
    "speed": [("", _raw), ("2", _speed)],
    "small": [
        ("2", lambda scratch, extent: speed.against_npy(scratch, rounds=extent.rounds, samples=extent.of(96, 16)))
    ],
    "exact": [
        ("1", lambda scratch, extent: exactness.round_trips(scratch)),
        ("10", lambda scratch, extent: exactness.flipped_bits(scratch, flips=extent.of(3000, 100))),
    ],
    "swaps": [("3", lambda scratch, extent: swaps.swaps(scratch, wanted=extent.of(swaps.SWAPS, 100)))],
    "yield": [("4", lambda scratch, extent: crowds.yields(scratch, samples=extent.of(15, 2)))],
    "fresh": [
        (
            "5",
            lambda scratch, extent: freshness.put_to_readable(
                scratch, rounds=extent.rounds, samples=extent.of(200, 30)
            ),
        ),
        (
            "5",
            lambda scratch, extent: freshness.put_to_readable_in_a_bucket(
                rounds=min(extent.rounds, 2), samples=extent.of(200, 30)
            ),
        ),
        (
            "6",
            lambda scratch, extent: freshness.swap_cost(
                scratch, rounds=extent.rounds, large_bytes=extent.of(8, 1) << 20
            ),
        ),
    ],
    "resume": [("7", lambda scratch, extent: trainings.resumed(scratch, batches=extent.of(60, 5)))],
    "storage": [
        (
            "8",
            lambda scratch, extent: swaps.storage(scratch, rounds=min(extent.rounds, 3), lasts_s=extent.of(8, 1)),
        )
    ],
    "flow": [("9", lambda scratch, extent: trainings.flow(scratch, lasts_s=extent.of(20, 2)))],
    "scaling": [
        (
            "11",
            lambda scratch, extent: crowds.scaling(scratch, rounds=min(extent.rounds, 2), samples=extent.of(8, 1)),
        )
    ],
    "waiting": [
        (
            "12",
            lambda scratch, extent: trainings.waiting(
                scratch, rounds=min(extent.rounds, 3), batches=extent.of(150, 10), warm_up=extent.of(60, 10)
            ),
        )
    ],
}


def measured(name: str, scratch: Path, extent: Extent) -> list[Figure]:
    """Measure one section; each figure's name begins with the row of its target."""
    found = []
    for row, measure in SECTIONS[name]:
        found += [replace(figure, name=f"{row:>2} {figure.name}") for figure in measure(scratch, extent)]
    return found
