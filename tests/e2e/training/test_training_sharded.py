"""FSDP2 through the same calls: each process stores its pieces; as many, fewer or more processes resume from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import Run, flat, only_complete, run_ranks

pytestmark = pytest.mark.processes


def whole(path: Path) -> Any:
    return flat(torch.load(path, weights_only=True))


def test_stopped_and_resumed_it_ends_with_the_same_bits_and_any_number_of_processes_can_resume(tmp_path: Path) -> None:
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    run_ranks("sharded", through)
    printed = run_ranks(
        "sharded", stopped, stop_at=13
    )  # the signal reaches the last rank only; all know one step later
    assert ["left after step 14: signal" in text for text in printed] == [True, True]
    assert only_complete(stopped) == [10, 14]
    assert sorted(path.name for path in (stopped / "checkpoint-14").iterdir()) == [
        "baton.json",
        "model.rank0of2.safetensors",
        "model.rank1of2.safetensors",
        "model.safetensors",
        "optimizer.rank0of2.safetensors",
        "optimizer.rank1of2.safetensors",
        "optimizer.safetensors",
        "state.pt",
    ]
    dumps = [tmp_path / f"{count}.pt" for count in (1, 2, 3)]
    run_ranks("sharded", stopped, 2, dump=str(dumps[1]))
    run_ranks("sharded", stopped, 3, dump=str(dumps[2]))
    assert "random numbers will differ" in Run("sharded", stopped, {"dump": str(dumps[0])}).finish()
    assert whole(dumps[0]) == whole(dumps[1]) == whole(dumps[2])
    assert whole(dumps[0])["optimizer"]["state"][0]["exp_avg"][1] == (33, 8)
    run_ranks("sharded", stopped)
    assert whole(stopped / "whole.pt") == whole(through / "whole.pt")
    assert whole(stopped / "whole.pt") != whole(dumps[0])
