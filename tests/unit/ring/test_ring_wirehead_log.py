"""Test further names of Wirehead's examples: cycle, logger, clean."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gpu_client.ring.core.ring import Ring, open_ring
from gpu_client.ring.errors import StoreFull
from gpu_client.ring.format.manifest import manifest_key
from gpu_client.ring.format.records import WRITERS
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from gpu_client.ring.tools.wirehead import WireheadGenerator
from gpu_client.ring.tools.wirehead_datasets import MongoTupleheadDataset
from gpu_client.ring.tools.wirehead_log import (
    MAX_SWAPS,
    SwapLog,
    WireheadConfig,
    WireheadLogger,
    WireheadSnapshot,
    read_swaps,
    record_swaps,
)
from gpu_client.ring.wirehead_clean import main


class Enough(Exception):  # noqa: N818
    """Ends a logger that would go on until its process ends."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    found = tmp_path / "config.yaml"
    found.write_text(yaml.safe_dump({"DBNAME": "unit-test", "SWAP_CAP": 10, "SAMPLE": ["data", "label"]}))
    return str(found)


def numbered() -> Iterator[tuple[Any, Any]]:
    number = 0
    while True:
        yield np.full(8, float(number)), np.full(8, number)
        number += 1


def generation(ring: Ring, samples: int = 2) -> None:
    with RingWriter(ring, threads=False) as writer:
        for number in range(samples):
            writer.put(np.full(2, number))
        writer.swap()


def test_cycle_puts_one_sample_of_a_generator_and_writers_leave_with_their_generators(path: str) -> None:
    """The SLURM example makes a new generator after some samples and ends none: no writer is left registered."""
    for _ in range(2):
        generator = WireheadGenerator(generator=numbered(), config_path=path)
        for _ in range(6):
            generator.cycle()
        del generator
    ring = WireheadConfig.read(path).ring()
    assert ring.newest().inserted == 10
    assert sum(claim.samples for claim in ring.claims() if not ring.newest().settled(claim.object)) == 2
    assert ring.store.keys(WRITERS) == []


def test_cycle_ends_as_its_generator_does_and_passes_over_what_is_refused(path: str) -> None:
    generator = WireheadGenerator([(np.zeros(2), np.zeros(2)), (object(), np.zeros(2))], path)
    generator.cycle()
    generator.cycle()
    with pytest.raises(StopIteration):
        generator.cycle()
    assert generator.run() == 1


def test_arguments_are_in_wirehead_s_order(path: str, caplog: pytest.LogCaptureFixture) -> None:
    assert WireheadGenerator(numbered(), path, 10).run() == 10
    pairs = MongoTupleheadDataset(path, 5.0, None, ("label", "data"), None, lambda image: image + 1, "id", True)
    ((image, label),) = pairs[[3]]
    assert (float(image[0]), float(label[0])) == (4.0, 3.0)
    assert "ignored" not in caplog.text, "these are Wirehead's defaults"
    MongoTupleheadDataset(path, 5.0, id="subject", keeptrying=False)
    assert "ignored, since there is no MongoDB here: id, keeptrying" in caplog.text


def test_a_verbose_run_prints_its_samples_and_each_swap_once(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    WireheadGenerator(numbered(), path, 20).run(verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "samples put" in line] == [
        f"Generator: {number} samples put, 10 make a generation" for number in range(1, 21)
    ]
    swaps = [line for line in lines if "swap success" in line]
    assert swaps == [f"Generator: swap success: generation {count}, {10 * count} samples so far" for count in (1, 2)]
    WireheadGenerator(numbered(), path, 10).run()
    assert capsys.readouterr().out == "", "quiet unless it was asked for"
    assert WireheadLogger(path).history()[-1].swap_count == 3


def test_a_swap_that_cannot_be_recorded_costs_no_generator(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Ring) -> list[Any]:
        raise StoreFull("nothing fits in")

    monkeypatch.setattr("gpu_client.ring.tools.wirehead.record_swaps", full)
    assert WireheadGenerator(numbered(), path, 10).run(verbose=True) == 10
    assert "swaps cannot be recorded now: nothing fits in" in caplog.text
    monkeypatch.undo()
    assert [log.swap_count for log in WireheadLogger(path).history()] == [1]


def test_the_logger_tells_of_swaps_that_were_and_follows(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    looks = 0

    def pause(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            WireheadGenerator(numbered(), path, 10).run()
        if looks == 3:
            raise Enough

    assert WireheadLogger(path).history() == []
    WireheadGenerator(numbered(), path, 20).run()
    first, second = WireheadLogger(path).history()
    assert (first.prev_swap_timestamp, first.swap_duration, first.swap_count, first.db_name) == (
        None, None, 1, "unit-test",
    )  # fmt: skip
    assert second.prev_swap_timestamp == first.swap_timestamp
    assert second.swap_duration == second.swap_timestamp - first.swap_timestamp >= 0
    with pytest.raises(Enough):
        WireheadLogger(path, 0.5, pause=pause).run()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "Logger: unit-test, looked at every 0.5 s"
    assert lines[:2] == [str(first), second.to_jsonl()]
    assert [json.loads(line)["swap_count"] for line in lines] == [1, 2, 3], "each once"
    assert [one.name for one in fields(SwapLog)] == list(json.loads(lines[0]))


def test_snapshots_say_how_full_the_next_generation_is(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    def pause(_: float) -> None:
        raise Enough

    logger = WireheadLogger(path)
    assert (logger.snapshot().swap_timestamp, logger.snapshot().read_docs) == (None, 0)
    WireheadGenerator(numbered(), path, 24).run()
    found = logger.snapshot()
    assert (found.samples_started, found.samples_completed, found.in_flight, found.fill_pct) == (4, 4, 0, 40.0)
    assert (found.swap_cap, found.swap_count, found.write_docs, found.read_docs) == (10, 2, 4, 10)
    assert found.samples_per_s > found.swaps_per_s > 0
    assert found.time_since_last_swap is not None and found.time_since_last_swap >= 0
    assert found.avg_swap_duration == found.swap_duration == found.recent_swaps[-1].swap_duration
    with pytest.raises(Enough):
        WireheadLogger(path, pause=pause).run_daemon()
    said = json.loads(capsys.readouterr().out)
    assert list(said) == [one.name for one in fields(WireheadSnapshot)]
    assert [one["swap_count"] for one in said["recent_swaps"]] == [1, 2]


def test_many_that_look_at_once_record_each_swap_once() -> None:
    ring = Ring.make(MemoryStore(), RingSettings(cap=2, mode="generation", retain=50))
    for _ in range(20):
        generation(ring)
    added: list[int] = []
    threads = [
        threading.Thread(target=lambda: added.extend(swap.total for swap in record_swaps(ring))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(added) == list(range(1, 21)) == [swap.total for swap in read_swaps(ring)]


def test_a_swap_whose_manifest_is_gone_counts_and_the_record_is_bounded() -> None:
    ring = Ring.make(MemoryStore(), RingSettings(cap=2, mode="generation", retain=1000))
    generation(ring)
    assert [swap.total for swap in record_swaps(ring)] == [1]
    last = ring.newest().number
    for _ in range(MAX_SWAPS + 5):
        generation(ring)
    ring.store.delete([manifest_key(number) for number in range(last + 1, last + 10)])
    fresh = Ring.open(ring.store)
    assert record_swaps(fresh)[-1].total == MAX_SWAPS + 6
    kept = read_swaps(fresh)
    assert len(kept) == MAX_SWAPS and kept[-1].inserted == 2 * (MAX_SWAPS + 6)


def test_clean_removes_the_ring_whatever_its_settings_and_nothing_else(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([path]) == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.yaml"], "it makes none, either"
    WireheadGenerator(numbered(), path, 10).run()
    WireheadLogger(path).history()
    content = yaml.safe_load(Path(path).read_text())
    Path(path).write_text(yaml.safe_dump({**content, "SWAP_CAP": 3}))
    assert main([path]) == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.yaml"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "There was no ring" and said[1].startswith("Deleted the ring, with ")
    mine = tmp_path / "mine" / "samples"
    mine.mkdir(parents=True)
    (mine / "a").touch()
    Path(path).write_text(yaml.safe_dump({**content, "RING": str(mine.parent)}))
    assert main([path]) == 0
    assert (mine / "a").exists(), "a directory that is no ring stays"
    WireheadGenerator(numbered(), path, 10)
    assert open_ring(str(mine.parent))


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [(None, 1, "cannot be read"), ("RING: 'ftp:there'", 1, "is not a place of a ring"), ("--help", 2, "usage:")],
)
def test_clean_says_what_is_wrong(
    path: str, capsys: pytest.CaptureFixture[str], changed: str | None, status: int, said: str
) -> None:
    if changed is None:
        Path(path).unlink()
    elif changed.startswith("RING"):
        Path(path).write_text(f"SWAP_CAP: 1\n{changed}\n")
    assert main(["--help"] if changed == "--help" else [path]) == status
    assert said in capsys.readouterr().err
