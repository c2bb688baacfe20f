"""An elastic training by the Trainer over leased shards trains each batch once, also across a stop and a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from baton import BatonCallback, Session, ShardBatches  # noqa: E402
from gpu_client.elastic.data.shard_plan import Shard  # noqa: E402
from gpu_client.training.errors import SessionError  # noqa: E402
from tests.kits.elastic.hugging_face import INNER_STEPS, Regression  # noqa: E402  # it needs transformers

SHARDS, BATCHES = 5, 3


class StopAt(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


class ShardTrainer(transformers.Trainer):  # type: ignore[misc]
    loader: ShardBatches

    def get_train_dataloader(self) -> Any:
        return self.loader


def train(session: Session, drawn: list[tuple[int, int]], *, stop_at: int = 0, **options: Any) -> transformers.Trainer:
    """Train all shards, with more steps than there are batches. drawn: receives shard and place of each batch."""

    def read(shard: Shard) -> Iterator[dict[str, torch.Tensor]]:
        for place in range(shard.offset, BATCHES):
            drawn.append((shard.index, place))
            yield {"x": torch.ones(2, 4), "labels": torch.ones(2, 1)}

    arguments = transformers.TrainingArguments(
        str(session.output_dir), report_to=[], use_cpu=True, disable_tqdm=True,
        **{"max_steps": 100, "ignore_data_skip": True, "lr_scheduler_type": "constant", **options},
    )  # fmt: skip
    callback = BatonCallback(session, elastic={"inner_steps": INNER_STEPS})
    trainer = ShardTrainer(Regression(), arguments, callbacks=[callback, StopAt(stop_at)])
    trainer.loader = ShardBatches(session, SHARDS, read, seed=1)
    trainer.train(resume_from_checkpoint=callback.resume_from)
    return trainer


@pytest.mark.parametrize("stop_at", [0, 4, 5, 7])
def test_each_batch_is_trained_once(tmp_path: Path, stop_at: int) -> None:
    drawn: list[tuple[int, int]] = []
    if stop_at:
        with Session.start(output_dir=tmp_path, variables={}) as session:
            train(session, drawn, stop_at=stop_at)
        assert len(drawn) == stop_at, "the Trainer draws nothing ahead"
    with Session.start(output_dir=tmp_path, variables={}, resume=True) as session:
        trainer = train(session, drawn)
    assert sorted(drawn) == [(shard, place) for shard in range(SHARDS) for place in range(BATCHES)]
    assert trainer.state.global_step < 100, "the training ends with its data"


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"ignore_data_skip": False}])
def test_arguments_that_would_count_or_skip_untrained_batches_are_refused(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    drawn: list[tuple[int, int]] = []
    with Session.start(output_dir=tmp_path, variables={}) as session, pytest.raises(SessionError) as caught:
        train(session, drawn, **options)
    assert next(iter(options)) in str(caught.value) and not drawn
