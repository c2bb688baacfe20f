"""Test `baton ring bench` at every place: it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tools.benchmark import StoreBenchmark, make_sample
from tests.kits.ring.places import KINDS, place_of


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    for found in place_of(request.param, request, tmp_path):
        yield found.text


def test_a_place_is_measured_and_left_as_it_was(place: str) -> None:
    ring = make_ring(place, RingSettings(cap=1))
    with StoreBenchmark(place, make_sample(100_000), 3) as bench:
        turns = [turn for _ in range(2) for turn in bench.run_round()]
        assert bench.ring.store.keys("samples/") != []
    assert len(turns) == 6
    assert all(min(turn.raw_put_s, turn.put_s, turn.raw_get_s, turn.get_s) > 0 for turn in turns)
    with pytest.raises(RingMismatch):
        open_ring(bench.place)
    assert ring.store.keys("samples/") == []
    assert ring.newest().number == 0
