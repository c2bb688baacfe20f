"""The Dreambooth section of `make bench`, in its quick form: each kind of process trains, every figure has numbers."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.training import contenders, dreambooth
from bench.training.contenders import Bench, Run

pytestmark = [pytest.mark.processes]


@pytest.fixture
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loop under the agent stand for all loops with a session, and a cached loop for all bare ones.

    The imports of each process take seconds. tests/unit/bench/test_bench_dreambooth_process.py runs loops of all kinds.
    """

    def rounds_of(bench: Bench, rounds: int) -> dict[str, list[Run]]:
        runs = contenders.rounds_of(bench, rounds)
        bare = [bench.compare({"cached": dreambooth.FROZEN_ENDS | dreambooth.CACHES})["cached"]] * rounds
        alone.update(dict.fromkeys(("bare", "control", "encoded anew", "cached"), bare))
        return {**runs, **alone, "session": runs["agent"]}

    alone: dict[str, list[Run]] = {}
    monkeypatch.setattr(contenders, "MODES", ("agent",))
    monkeypatch.setattr(dreambooth, "rounds_of", rounds_of)
    monkeypatch.setattr(dreambooth, "cache_rounds", lambda *_: alone)


@pytest.mark.usefixtures("_two_processes")
def test_the_section_measures_all_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # main sets it for good
    affinity = os.sched_getaffinity(0)
    output = tmp_path / "bench.json"
    assert bench.main(["--only", "dreambooth", "--quick", "--output", str(output)]) == 0
    assert os.sched_getaffinity(0) == affinity, "the next section must find both processors"
    figures = {
        figure["name"].removeprefix("Dreambooth, "): figure for figure in json.loads(output.read_text())["figures"]
    }
    assert list(figures) == [
        "a step under the agent: wall",
        "a step under the agent: wall less waiting",
        "a step under the agent: CPU",
        "a step with session alone: wall",
        "control: one bare loop against the other",
        "checkpoints: added to the steps, less waiting",
        "peak memory under the agent",
        "a step with cached latents and embeddings: wall",
        "a step with cached latents and embeddings: CPU",
    ]
    for name, figure in figures.items():
        numbers = (figure["median"], figure["baseline"]["median"])
        # A busy computer lets four steps wait longer than their own turns last.
        assert all(map(math.isfinite, numbers)) if "less waiting" in name else min(numbers) > 0, name
    wall = figures["a step under the agent: wall"]
    assert wall["target"]["at_most"] == pytest.approx(1 / 0.97)
    assert wall["details"]["checkpoints written"] == [2]
    assert wall["details"]["checkpoints committed"][0] >= 1
    assert figures["peak memory under the agent"]["target"]["at_most"] == 1.05
    assert "the numbers mean nothing" in capsys.readouterr().out
