"""Train a small network on handwritten digits, as an example to copy.

After a kill at any time and a restart, the final weights equal the weights of an uninterrupted run bit for bit.

    BATON_DATA_DIR=digits BATON_OUTPUT_DIR=out python -m gpu_client.training.digits

The training reads every `<label>/<index>.png` (or `<label>_<index>.png`) below BATON_DATA_DIR, holds out each fifth
index, and writes `model.safetensors` and `predictions.json` (held-out predictions, accuracy) into BATON_OUTPUT_DIR. The
job's parameters are the fields of `DigitsSettings`.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from baton import BatchSampler, LearningRate, Session

HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class DigitsSettings:
    """Parameters of the job; other names are refused."""

    steps: int = 600
    batch_size: int = 64
    learning_rate: float = 2e-3
    hidden: int = 56  # Channels of the network; the time per step grows with the square.
    seed: int = 0
    checkpoint_every: int = 50


def read_digits(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str]]:
    """Read images (n, 1, height, width) from 0 to 1, labels, held-out flags and names, in a fixed order."""
    names, pixels, labels, held_out = [], [], [], []
    for path in sorted(folder.rglob("*.png")):
        name = path.relative_to(folder).as_posix()
        match = re.search(r"(?:^|/)(\d)[/_](\d+)\.png$", name)
        if match:
            names.append(name)
            pixels.append(np.asarray(Image.open(path).convert("L"), dtype=np.float32))
            labels.append(int(match.group(1)))
            held_out.append(int(match.group(2)) % HELD_OUT_EVERY == 0)
    if not any(held_out) or all(held_out):
        raise SystemExit(f"{folder} holds {len(names)} digits: expected many files <label>/<index>.png")
    images = torch.from_numpy(np.stack(pixels))[:, None]
    return images / images.max(), torch.tensor(labels), torch.tensor(held_out), names


def make_model(hidden: int) -> nn.Module:
    """Make a small convolutional network for 8x8 digits."""
    return nn.Sequential(
        nn.Conv2d(1, hidden, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(hidden, hidden, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(hidden * 4 * 4, 10),
    )


def main() -> None:
    """Train the network; the session's checkpoints contain all changing state."""
    session = Session.start(resume=True)
    settings = DigitsSettings(**session.params)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(settings.seed)  # Seeds all generators, because checkpoints contain all.

    images, labels, held_out, names = read_digits(session.data_dir)
    train_images, train_labels = images[~held_out], labels[~held_out]
    model = make_model(settings.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    batches = BatchSampler(len(train_labels), settings.batch_size, seed=settings.seed)

    session.steering.offer(knobs={"lr": LearningRate(optimizer, scheduler)})
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    done = session.resume(**state)
    for step in range(done + 1, settings.steps + 1):
        batch = next(batches)
        loss = functional.cross_entropy(model(train_images[batch]), train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

        session.report(step, settings.steps, loss=loss, learning_rate=scheduler.get_last_lr()[0])
        if session.checkpoint_due(step, every=settings.checkpoint_every):
            session.checkpoint(step, **state)
        if session.should_stop:
            if session.finishing:
                break  # A rule ended the training.
            return  # A stop request; the requested checkpoint is written.

    model.eval()
    with torch.no_grad():
        predicted = model(images[held_out]).argmax(dim=1)
    accuracy = (predicted == labels[held_out]).double().mean().item()
    save_file(model.state_dict(), session.output_dir / "model.safetensors")
    held_out_names = [name for name, held in zip(names, held_out.tolist(), strict=True) if held]
    rows = zip(held_out_names, labels[held_out].tolist(), predicted.tolist(), strict=True)
    predictions = [{"file": file, "label": label, "predicted": guess} for file, label, guess in rows]
    report = {"accuracy": accuracy, "held_out": len(predictions), "predictions": predictions}
    (session.output_dir / "predictions.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
