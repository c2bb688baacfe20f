"""The bench of rings: its counts count, its processes can be killed, its rival gets to where it is used."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.ring import exactness, population, swaps
from bench.ring.__main__ import main
from bench.ring.population import Counters
from bench.ring.sections import SECTIONS
from bench.ring.wirehead import rival
from gpu_client.ring.format.objects import StoredSamples
from tests.unit.bench.bench_ring_kit import count_then_die


def test_what_was_counted_outlives_whoever_is_killed() -> None:
    counters = Counters(("a", "b"), 2)
    with population.population(count_then_die, [(counters, 0), (counters, 1)]) as processes:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
        with pytest.raises(RuntimeError, match="ended with -9"):
            population.ended_well(processes, 1.0)
    assert (counters.total("a"), counters.of("b", 1)) == (10, 7)


def test_flips_are_counted_that_nobody_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (figure,) = exactness.flipped_bits(tmp_path / "one", flips=5)
    assert (figure.met, figure.judged) == (True, 0)
    monkeypatch.setattr(StoredSamples, "verify", lambda _: None)
    (figure,) = exactness.flipped_bits(tmp_path / "two", flips=5)
    assert (figure.met, figure.judged > 0) == (False, True)


@pytest.mark.parametrize(
    ("put", "back"),
    [
        (np.zeros(2, "f4"), np.zeros(2, "f8")),
        (np.zeros(2), np.array([0.0, -0.0])),
        (np.zeros((1, 2)), np.zeros(2)),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
        ([np.zeros(1)], (np.zeros(1),)),
        ({"a": np.zeros(1)}, {"b": np.zeros(1)}),
        (np.float32(1), np.array(1, "f4")),
        ("a", "b"),
    ],
    ids=range(10),
)
def test_what_differs_in_any_way_is_not_the_same(put: Any, back: Any) -> None:
    assert exactness.same(put, put)
    assert not exactness.same(put, back)


def test_steps_at_which_no_publisher_died_are_counted() -> None:
    everywhere = {(step, behind) for step in range(4) for behind in (False, True)}
    assert swaps._unreached(everywhere) == []
    assert swaps._unreached(everywhere - {(1, True), (2, False)}) == [(1, True), (2, False)]
    assert swaps._unreached(set())


def test_wirehead_that_was_installed_by_half_is_installed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def pip(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        tries.append(line)
        return subprocess.CompletedProcess(line, 1 if len(tries) == 1 else 0, "", "no way to the index")

    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(RuntimeError, match="could not be installed: no way to the index"):
        rival.install(tmp_path / "packages")
    for _ in range(2):
        assert rival.install(tmp_path / "packages") == tmp_path / "packages"
    assert len(tries) == 2, "the second one did it; the third had nothing to do"


def test_a_quick_try_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    assert main(["--quick", "--only", "fresh", "--scratch", str(tmp_path), "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert {figure["name"].split()[0] for figure in report["figures"]} == {"5", "6"}
    assert "the numbers mean nothing" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [output]


def test_every_row_of_the_targets_is_measured() -> None:
    rows = {row for section in SECTIONS.values() for row, _ in section if row}
    assert rows == {str(number) for number in range(1, 13)}
