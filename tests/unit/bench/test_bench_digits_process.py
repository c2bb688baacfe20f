"""The stopwatch in the digits example: it must time the loop, all of the loop and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.training.digits_process import instrument
from bench.training.overhead import write_images
from bench.training.stopwatch import Stopwatch
from gpu_client.training import digits

STEPS, EVERY = 7, 3


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example's surroundings, tiny; what it and the stopwatch change is put back. The output directory."""
    write_images(tmp_path / "digits")
    params = tmp_path / "params.json"
    params.write_text(json.dumps({"steps": STEPS, "checkpoint_every": EVERY, "hidden": 4}))
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path / "digits"))
    monkeypatch.setenv("BATON_OUTPUT_DIR", str(tmp_path / "output"))
    monkeypatch.setenv("BATON_PARAMS", str(params))
    for name in ("BatchSampler", "make_model", "Session"):
        monkeypatch.setattr(digits, name, getattr(digits, name))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield tmp_path / "output"
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def test_the_bare_loop_trains_and_writes_no_checkpoint(example: Path) -> None:
    watch = Stopwatch()
    instrument(watch, "bare")
    digits.main()
    assert (example / "model.safetensors").is_file()
    assert not list(example.glob("checkpoint-*"))
    times = watch.result()
    assert times["checkpoints"] == []
    began_at, ended_at = times["loop"]
    assert 0 <= times["waited_s"] < ended_at - began_at
    assert times["cpu_s"] > 0


def test_the_loop_with_a_session_writes_checkpoints_and_counts_them(example: Path) -> None:
    watch = Stopwatch()
    instrument(watch, "session")
    digits.main()
    assert sorted(path.name for path in example.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    times = watch.result()
    assert len(times["checkpoints"]) == 2
    began_at, ended_at = times["loop"]
    moments = [began_at, *(moment for span in times["checkpoints"] for moment in span), ended_at]
    assert moments == sorted(moments)


def test_the_stopwatch_says_when_the_loop_begins_and_ends(example: Path) -> None:
    heard: list[str] = []
    instrument(Stopwatch(lambda: heard.append("begins"), lambda: heard.append("ended")), "bare")
    digits.main()
    assert heard == ["begins", "ended"]


def test_both_loops_end_with_the_same_weights(example: Path) -> None:
    instrument(Stopwatch(), "bare")
    digits.main()
    bare = (example / "model.safetensors").read_bytes()
    instrument(Stopwatch(), "session")
    digits.main()
    assert (example / "model.safetensors").read_bytes() == bare
