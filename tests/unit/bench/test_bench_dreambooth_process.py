"""The stopwatch in the Dreambooth script: it must time the loop, all of the loop and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.training.contenders import Loop
from bench.training.dreambooth import CACHES, FROZEN_ENDS, loop_of
from bench.training.dreambooth_process import instrument
from bench.training.stopwatch import Stopwatch
from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.model.encoding import Encoder

STEPS = 4
WEIGHTS = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    return loop_of(tmp_path_factory.mktemp("loop"), STEPS, 64)


@pytest.fixture
def output(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The script's surroundings; what it changes of its process is put back. The output directory."""
    put_parameters(tmp_path, loop, {})
    monkeypatch.setenv("BATON_DATA_DIR", str(loop.data))
    monkeypatch.setenv("BATON_OUTPUT_DIR", str(tmp_path / "output"))
    monkeypatch.setenv("BATON_PARAMS", str(tmp_path / "params.json"))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    variables = dict(os.environ)
    yield tmp_path / "output"
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    os.environ.clear()
    os.environ.update(variables)


def put_parameters(tmp_path: Path, loop: Loop, changed: dict[str, bool]) -> None:
    (tmp_path / "params.json").write_text(json.dumps({**loop.params, **changed}))


def train(mode: str, watch: Stopwatch | None = None) -> Stopwatch:
    """Once, with the stopwatch, which is taken out again."""
    watch = watch or Stopwatch()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("compute_denoising_loss", "Lora", "Session"):
            patch.setattr(dreambooth_lora, name, getattr(dreambooth_lora, name))
        instrument(watch, mode)
        dreambooth_lora.main([])
    return watch


def test_the_bare_loop_trains_and_writes_no_checkpoint(output: Path) -> None:
    times = train("bare").result()
    assert (output / WEIGHTS).is_file()
    assert not list(output.glob("checkpoint-*"))
    assert times["checkpoints"] == []
    began_at, ended_at = times["loop"]
    assert 0 <= times["waited_s"] < ended_at - began_at
    assert times["cpu_s"] > 0 and times["peak_bytes"] > 100 * 2**20


def test_the_loop_with_a_session_counts_its_checkpoints_and_learns_the_same(output: Path) -> None:
    train("bare")
    bare = (output / WEIGHTS).read_bytes()
    times = train("session").result()
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert len(times["checkpoints"]) == 2
    began_at, ended_at = times["loop"]
    moments = [began_at, *(moment for span in times["checkpoints"] for moment in span), ended_at]
    assert moments == sorted(moments)
    assert (output / WEIGHTS).read_bytes() == bare


def test_the_loop_begins_when_the_caches_are_full_and_ends_before_the_result_is_written(
    output: Path, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_parameters(tmp_path, loop, FROZEN_ENDS | CACHES)
    heard: list[str] = []
    fill = Encoder.fill

    def filled(*arguments: object) -> None:
        fill(*arguments)  # type: ignore[arg-type]
        heard.append("filled")

    monkeypatch.setattr(Encoder, "fill", filled)
    watch = Stopwatch(
        lambda: heard.append("begins"), lambda: heard.append(f"ended, written: {(output / WEIGHTS).exists()}")
    )
    train("bare", watch)
    assert heard == ["filled", "begins", "ended, written: False"]
