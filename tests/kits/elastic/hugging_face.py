"""Elastic trainings by the Trainer of transformers and by a loop of accelerate, in this process or as a node."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import accelerate
import torch
import transformers
from safetensors.torch import save_file

from baton import BatonCallback, Session
from tests.kits.runner.fork_server import fork_context

forkserver = fork_context("tests.kits.elastic.hugging_face")

SAMPLES, BATCH, ACCUMULATED, INNER_STEPS, RATE = 64, 2, 2, 4, 0.05


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Inputs with a target for each; `drawn` has the indices in the order of the training."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.drawn.append(index)
        return {"x": self.inputs[index], "labels": self.inputs[index].sum().sin()[None]}


class Regression(torch.nn.Module):
    """Tiny model with a loss, as the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}


class OrderedTrainer(transformers.Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train_by_trainer(
    session: Session,
    rounds: int,
    *,
    ordered: bool = False,
    callbacks: tuple[Any, ...] = (),
    elastic: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> transformers.Trainer:
    """Train for `rounds` rounds of 4 steps of 2 accumulated batches. elastic: further options of `session.elastic`."""
    callback = BatonCallback(session, elastic={"inner_steps": INNER_STEPS, **elastic})
    arguments = transformers.TrainingArguments(
        str(session.output_dir), per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
        learning_rate=RATE, weight_decay=0.0, max_grad_norm=0.0, report_to=[],
        use_cpu=True, disable_tqdm=True,
        **{"max_steps": rounds * INNER_STEPS, "logging_steps": 1, "lr_scheduler_type": "constant", **options},
    )  # fmt: skip
    trainer_type = OrderedTrainer if ordered else transformers.Trainer
    trainer = trainer_type(Regression(), arguments, train_dataset=Samples(), callbacks=[callback, *callbacks])
    trainer.train(resume_from_checkpoint=callback.resume_from)
    return trainer


def train_by_accelerate(session: Session, rounds: int, **options: Any) -> torch.nn.Module:
    """Train in the style of accelerate's examples, beside the lines of docs/elastic.md."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **options)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    outer = session.elastic(model, optimizer, inner_steps=INNER_STEPS)
    session.resume(model=model, optimizer=optimizer, elastic=outer)
    outer.start()
    while outer.round < rounds:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            outer.step(tokens=len(batch["x"]))
            session.report(outer.round, rounds)
            if outer.checkpoint_due:
                session.checkpoint(outer.round, model=model, optimizer=optimizer, elastic=outer)
            if outer.round >= rounds:
                break
    outer.leave()
    return accelerator.unwrap_model(model)


def train_as_rank(variables: Mapping[str, str], rounds: int, test: Connection) -> None:
    """Train by the Trainer as one process of a node, and tell steps, parameters and saved checkpoints."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    with Session.start(variables=variables, resume=True) as session:
        trainer = train_by_trainer(session, rounds, logging_steps=4)
        values = [one.tolist() for one in trainer.model.parameters()]
        saved = sorted(one.name for one in Path(session.output_dir).glob("checkpoint-*"))
        test.send((trainer.state.global_step, values, saved))


def main() -> None:
    """Train as a node of an elastic job, and write the model and what the node did into the output directory."""
    torch.set_num_threads(1)
    with Session.start() as session:
        rounds = session.params["rounds"]
        done: dict[str, Any] = {}
        if session.params["loop"] == "trainer":
            trainer = train_by_trainer(session, rounds)
            model = trainer.model
            done = {"step": trainer.state.global_step, "drawn": trainer.train_dataset.drawn}
        else:
            model = train_by_accelerate(session, rounds)
        done["saved"] = sorted(one.name for one in Path(session.output_dir).glob("checkpoint-*"))
        save_file(model.state_dict(), session.output_dir / "model.safetensors")
        (session.output_dir / "done.json").write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main()
