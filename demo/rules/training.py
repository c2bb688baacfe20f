"""A training that rules and commands can steer: the example to copy.

    BATON_DATA_DIR=digits BATON_OUTPUT_DIR=out python demo/rules/training.py

It is the training of `digits@1` with what this demo needs: a line of JSON for each step, an evaluation now and then,
and batches that can be damaged on purpose. The job's parameters are the fields of `Settings`. It leaves
`model.safetensors`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from baton import BatchSampler, LearningRate, Session
from gpu_client.training.digits import make_model, read_digits

DAMAGE = 255


@dataclass(frozen=True)
class Settings:
    """The job's parameters. A name that is not listed here is refused."""

    steps: int
    learning_rate: float = 3e-3
    batch_size: int = 256
    hidden: int = 20
    seed: int = 0
    checkpoint_every: int = 50
    evaluate_every: int = 25
    damaged_from: int = 0
    damaged_to: int = 0
    """Last damaged batch; `damaged_from` is the first, both counted from 1. The damage is that of a broken file: values
    from 0 to 255 instead of 0 to 1, and each picture with the label of its neighbor."""

    def is_damaged(self, batch: int) -> bool:
        """Return whether the data of this batch are damaged."""
        return self.damaged_from <= batch <= self.damaged_to


def accuracy_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of pictures that the model reads correctly, 0 to 1."""
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).double().mean().item()
    model.train()
    return float(right)


def main() -> None:
    """Train, and obey rules and commands."""
    session = Session.start(resume=True)
    settings = Settings(**session.params)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)

    images, labels, held_out, _ = read_digits(session.data_dir)
    train_images, train_labels = images[~held_out], labels[~held_out]
    model = make_model(settings.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    batches = BatchSampler(len(train_labels), settings.batch_size, seed=settings.seed)

    # Besides stopping and saving, rules and commands may turn this knob and evaluate. A rollback turns the knob, too.
    session.steering.offer(knobs={"lr": LearningRate(optimizer, scheduler)}, evaluate=True)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    done = session.resume(**state)
    for step in range(done + 1, settings.steps + 1):
        number = batches.epoch * batches.batches_per_epoch + batches.position + 1
        batch = next(batches)
        pictures, answers = train_images[batch], train_labels[batch]
        if settings.is_damaged(number):
            pictures, answers = pictures * DAMAGE, answers.roll(1)
        rate = optimizer.param_groups[0]["lr"]
        loss = functional.cross_entropy(model(pictures), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

        print(json.dumps({"step": step, "loss": loss.item(), "lr": rate, "batch": number}), flush=True)
        session.report(step, settings.steps, loss=loss, lr=rate)
        if step % settings.evaluate_every == 0 or session.steering.evaluation_due:
            session.steering.evaluated(step, accuracy=accuracy_of(model, images[held_out], labels[held_out]))
        if session.checkpoint_due(step, every=settings.checkpoint_every):
            session.checkpoint(step, **state)
        if session.should_stop:
            if session.finishing:
                break  # a rule or a command ends the training as complete
            return  # the attempt ends: failed, handed back, or rolled back

    save_file(model.state_dict(), session.output_dir / "model.safetensors")


if __name__ == "__main__":
    main()
