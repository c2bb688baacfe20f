"""Publishers of a ring in a directory are killed at each of their operations: the next one goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.ring import roles
from bench.ring.population import CONTEXT, begun
from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.ring import make_ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from tests.kits.runner.fork_server import fork_context

MOST_OPERATIONS = 30
fork_context("bench.ring.roles")


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_wherever_a_publisher_is_killed_the_next_one_goes_on(tmp_path: Path, behind: bool) -> None:
    place = str(tmp_path / "ring")
    ring = make_ring(place, RingSettings(cap=6, retain=2, max_ahead=1000))
    died, numbers, put = 0, [0], 0
    with RingWriter(ring, "w", threads=False) as writer, RingReader(ring, threads=False) as reader:
        for step in range(MOST_OPERATIONS):
            for _ in range(3):
                writer.put(np.array([put]), seed=put)
                put += 1
            reached = CONTEXT.Event()
            process = begun(roles.publish_and_die, place, step, behind, reached)
            process.join(60)
            assert process.exitcode in ((-9,) if reached.is_set() else (0,))
            died += reached.is_set()
            while ring.publish() is not None:
                pass
            newest = reader.newest()
            reader.keep_only([newest.number])
            numbers.append(newest.number)
            assert newest.inserted == put, "nothing is lost, nothing comes twice"
            assert [int(reader.sample(slot)[0]) for slot in newest.slots] == list(range(max(put - 6, 0), put))
            GarbageCollector(ring).collect()
            if not reached.is_set():
                break
    assert died >= 5, "a publication lists, makes a manifest, points to it and clears away"
    assert numbers == sorted(set(numbers))
    assert [claim for claim in ring.claims() if claim.samples] == []
