"""The Hugging Face callback, without a Trainer: that is in tests/e2e/training."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_client.training import Session

transformers = pytest.importorskip("transformers")


def test_what_a_trainer_logs_never_clashes_with_the_report_itself(start: Callable[..., Session]) -> None:
    """A metric called `total` was a second value for the argument, and ended the training."""
    from gpu_client.training import BatonCallback

    session = start()
    state = transformers.TrainerState(global_step=3, max_steps=10, is_world_process_zero=True)
    callback = BatonCallback(session)
    callback.on_log(None, state, transformers.TrainerControl(), logs={"total": 4.0, "step": 3, "loss": 0.5})
    assert session._last_report == (3, 10, {"loss": 0.5})
