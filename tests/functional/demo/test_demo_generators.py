"""The generators of the ring's demo, really started and killed: a kill costs one sample, and no seed comes twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.failure import Interrupts
from demo.processes import ManagedProcesses
from demo.ring.generators import Generators, Turn
from demo.ring.shapes import render
from gpu_client.ring.core.ring import make_ring
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from tests.kits.waiting import until

pytestmark = pytest.mark.processes


def test_a_killed_generator_loses_one_sample_at_most_and_an_ended_one_none(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ring = make_ring(str(tmp_path / "ring"), RingSettings(cap=400, publish_interval_s=0.05, lease_s=2.0))

    def begun_by(number: int) -> int:
        file = tmp_path / "begun" / str(number)
        return file.stat().st_size if file.exists() else 0

    with ManagedProcesses(tmp_path / "logs", scratch, Interrupts()) as processes:
        turns = [Turn(1.0, kill=(0,)), Turn(2.0, start=(0,))]
        generators = Generators(processes, str(tmp_path / "ring"), tmp_path / "begun", 2, turns)
        generators.start(0, 1)
        # On a busy machine one generator may draw many samples before the other has imported its modules.
        until(lambda: all(begun_by(number) >= 3 for number in (0, 1)))
        generators.carry_on(0.5)
        assert (generators.alive, generators.kills) == (2, 0)
        generators.carry_on(1.5)
        assert (generators.alive, generators.kills) == (1, 1)
        generators.carry_on(2.0)
        assert generators.alive == 2
        before = begun_by(0)
        until(lambda: begun_by(0) >= before + 5)
        generators.end()
    while ring.publish() is not None:
        pass
    newest = ring.newest()
    assert 0 <= generators.samples_begun - newest.inserted <= 1
    with RingReader(ring, threads=False) as reader:
        seeds = [tuple(reader.provenance(slot)["seed"]) for slot in newest.slots]
        assert len(set(seeds)) == len(seeds) == newest.inserted
        assert {seed[:2] for seed in seeds} == {(0, 1), (0, 2), (1, 1)}
        image, label = reader.sample(newest.slots[0])
    drawn, same = render(seeds[0])
    assert (image.tobytes(), label) == (drawn.tobytes(), same)
