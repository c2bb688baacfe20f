"""The Dreambooth section of `make bench`, in its quick form: everybody trains and every figure has its number."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import __main__ as bench

pytestmark = [pytest.mark.processes]


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
        assert figure["median"] > 0 and figure["baseline"]["median"] > 0, name
    wall = figures["a step under the agent: wall"]
    assert wall["target"]["at_most"] == pytest.approx(1 / 0.97)
    assert wall["details"]["checkpoints written"] == [2]
    assert wall["details"]["checkpoints committed"][0] >= 1
    assert figures["peak memory under the agent"]["target"]["at_most"] == 1.05
    assert "the numbers mean nothing" in capsys.readouterr().out
