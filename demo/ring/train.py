"""The training: `python -m demo.ring.train SOURCE FILE HELD_OUT SECONDS [PLACE]`.

SOURCE is `ring`, or `coupled`: then the same number of processes draw the pictures inside the DataLoader, each picture
for one batch. Everything else is the same. The training writes each step and measurement as a line of JSON to FILE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from baton import RingLoader
from demo.ring.shapes import NAMES, NICE, held_out, render

GENERATORS = 4
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
EVALUATED_EVERY_S = 2.0
COUPLED_SEED = 1000
"""First seed of the DataLoader's workers; no generator of the ring uses it or a later one."""


class Drawn(IterableDataset[Any]):  # type: ignore[misc, unused-ignore]
    """Pictures that the DataLoader's workers draw."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for number in count():
            yield render([COUPLED_SEED + info.id, number])


def batches(source: str, place: str) -> Iterator[Any]:
    """Yield images and labels, without end."""
    if source == "ring":
        return iter(RingLoader(place, batch_size=BATCH_SIZE, workers=2, collate=_stacked))
    return iter(
        DataLoader(
            Drawn(),
            batch_size=BATCH_SIZE,
            num_workers=GENERATORS,
            collate_fn=_stacked,
            worker_init_fn=lambda _: os.nice(NICE),
        )
    )


def _stacked(samples: Sequence[Any]) -> tuple[Any, Any]:
    # Small batches travel faster as arrays through a pipe than as tensors through shared memory.
    images, labels = zip(*samples, strict=True)
    return np.stack(images), np.array(labels)


def network() -> nn.Module:
    """Make a small network, which takes some tens of milliseconds a step."""
    return nn.Sequential(
        *_halved(1, 16, 5), *_halved(16, 32, 3), *_halved(32, 64, 3), nn.Flatten(), nn.Linear(64 * 16, len(NAMES))
    )


def _halved(channels_in: int, channels_out: int, width: int) -> list[nn.Module]:
    # No BatchNorm: its running means lag behind weights that change this fast, and the held-out loss would jump.
    return [
        nn.Conv2d(channels_in, channels_out, width, padding=width // 2, bias=False),
        nn.GroupNorm(channels_out // 4, channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]


def main(source: str, file: str, held_out_file: str, seconds: str, place: str = "") -> None:
    """Train for so many seconds from the first batch on."""
    # The training takes one core only, so that both parts of the demo compare equal trainings.
    torch.set_num_threads(1)
    torch.manual_seed(1)
    images, labels = (torch.from_numpy(array) for array in held_out(Path(held_out_file)))
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    samples = batches(source, place)
    clock = time.monotonic
    with Path(file).open("w", encoding="utf-8", buffering=1) as lines:
        began_at, evaluated_at = 0.0, -EVALUATED_EVERY_S
        while True:
            asked_at = clock()
            batch_images, batch_labels = next(samples)
            got_at = clock()
            began_at = began_at or got_at
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.from_numpy(batch_images)), torch.from_numpy(batch_labels))
            loss.backward()
            optimizer.step()
            done_at = clock()
            step = {"at": done_at, "wait_s": got_at - asked_at, "step_s": done_at - got_at, "loss": loss.item()}
            lines.write(json.dumps(step) + "\n")
            last = done_at - began_at >= float(seconds)
            if last or done_at - evaluated_at >= EVALUATED_EVERY_S:
                evaluated_at = done_at
                lines.write(json.dumps({"at": done_at, **_evaluated(model, images, labels)}) + "\n")
            if last:
                return


def _evaluated(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        found = model(images)
    model.train()
    right = (found.argmax(dim=1) == labels).float().mean()
    return {"held_out_loss": nn.functional.cross_entropy(found, labels).item(), "accuracy": right.item()}


if __name__ == "__main__":
    main(*sys.argv[1:])
