"""`baton ring bench` prints rates beside raw rates and removes its objects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_client.cli.core.session import CliSession
from gpu_client.cli.main import main
from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tools.benchmark import BenchmarkRates, BenchmarkTurn, StoreBenchmark, make_sample

LITTLE = ("--size", "0.05", "--samples", "2", "--rounds", "1")


def run(capture: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> tuple[int, str, str]:
    code = main(["ring", "bench", *map(str, arguments)], CliSession(environ={"HOME": str(folder)}))
    said = capture.readouterr()
    assert "Traceback" not in said.err + said.out
    return code, said.out, said.err


def test_it_tells_rates_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, tmp_path, tmp_path / "new" / "ring", *LITTLE, "--json")
    said = json.loads(out)
    assert code == 0
    assert (said["samples"], said["size_bytes"]) == (2, int(0.05 * 2**20))
    for name in ("put", "get"):
        assert all(value > 0 for value in said[name].values())
    assert list(tmp_path.iterdir()) == []
    code, out, err = run(capsys, tmp_path, tmp_path / "ring", *LITTLE)
    assert code == 0
    assert "verified get" in out
    assert "of 0.05 MiB" in err


def test_a_ring_that_is_there_stays_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "ring"
    make_ring(str(place), RingSettings(cap=3))
    before = sorted(place.rglob("*"))
    assert run(capsys, tmp_path, place, *LITTLE)[0] == 0
    assert sorted(place.rglob("*")) == before
    assert open_ring(str(place)).newest().number == 0


def test_a_place_that_cannot_be_written_to_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = run(capsys, tmp_path, tmp_path / "file", *LITTLE)
    assert code != 0
    assert "cannot hold a ring" in err


def test_other_places_are_measured_through_their_store() -> None:
    with StoreBenchmark("memory:bench", make_sample(1000), 2) as bench:
        turns = bench.run_round()
        store = bench.ring.store
    assert len(turns) == 2
    assert all(min(turn.raw_put_s, turn.put_s, turn.raw_get_s, turn.get_s) > 0 for turn in turns)
    assert [store.keys(f"{name}/") for name in ("samples", "inbox", "manifests", "readers", "writers")] == [[]] * 5
    assert store.record("pointer") is None


def test_what_is_told_is_the_median_of_what_was_beside_each_other() -> None:
    rates = BenchmarkRates(
        100, [BenchmarkTurn(1.0, 2.0, 3.0, 3.0), BenchmarkTurn(1.0, 1.25, 1.0, 4.0), BenchmarkTurn(9.0, 10.0, 3.0, 4.0)]
    )
    assert rates.per_s("put_s") == 1 / 2.0
    assert rates.of_raw("put") == 0.8
    assert rates.of_raw("get") == 0.75
