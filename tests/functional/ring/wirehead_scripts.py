"""The scripts that a user of Wirehead has, with one import changed: `python wirehead_scripts.py ROLE CONFIG`.

`generator` and `loader` are those of its unit example (which never looked at the values), `manager` that of 0.8,
`task` one of an array of SLURM jobs. `trainer` reads lists of samples, one at least, until it is told that it is
enough. `verbose`, `pairs` and `log` are those of the unit example of 0.9; `cycles` is one of 0.9's array, which takes
another generator after some samples and ends without telling Wirehead so.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import baton as wh

STEP_S = 0.05
"""Time of the trainer's GPU between two batches, in which the processor is free for the generators."""


def doubles() -> Iterator[tuple[Any, Any]]:
    """Generate the example's samples: 256 random doubles between 0 and 1, which Wirehead stores as zeros."""
    chance = np.random.default_rng()
    while True:
        data = chance.random(256)
        yield data, 2 * data


def numbered(task: int) -> Iterator[tuple[Any, Any]]:
    number = 0
    while True:
        yield np.full(1000, task, np.int16), np.full(1000, number, np.int32)
        number += 1


def generator(config: str) -> None:
    wh.WireheadGenerator(generator=doubles(), config_path=config).run_generator()


def task(config: str) -> None:
    number, samples = int(os.environ["SLURM_ARRAY_TASK_ID"]), int(os.environ["SAMPLES"])
    made = wh.WireheadGenerator(generator=numbered(number), config_path=config, n_samples=samples).run()
    print(f"task {number}: {made}", flush=True)


def verbose(config: str) -> None:
    wh.WireheadGenerator(generator=islice(doubles(), 100), config_path=config, n_samples=100).run(verbose=True)


def cycles(config: str) -> None:
    number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    for source in range(3):
        made = wh.WireheadGenerator(generator=numbered(10 * number + source), config_path=config)
        for _ in range(7):
            made.cycle()


def log(config: str) -> None:
    logger = wh.WireheadLogger(config)
    print(len(logger.history()), "swaps", flush=True)
    logger.run()


def pairs(config: str) -> None:
    dataset = wh.MongoTupleheadDataset(config_path=config)
    for number in range(100):
        ((data, label),) = dataset[[number % 10]]
        assert np.allclose(2 * data, label)
    print("unit example passed", flush=True)


def manager(config: str) -> None:
    wh.WireheadManager(config_path=config).run_manager()


def loader(config: str) -> None:
    dataset = wh.MongoheadDataset(config_path=config, timeout=60)
    indices = list(range(10))
    for _ in range(10):
        batch = dataset[indices]
        assert sorted(batch) == indices
        for sample in batch.values():
            assert sample["input"].shape == (256,)
            assert 0.3 < float(sample["input"].mean()) < 0.7, "not all zeros"
            assert np.allclose(2 * sample["input"], sample["label"])
    print(f"unit example passed, {len(dataset)} samples", flush=True)


def trainer(config: str) -> None:
    pairs = wh.MongoTupleheadDataset(config_path=config, timeout=60)
    enough, batches = Path(f"{config}.enough"), 0
    while not batches or not enough.exists():
        for data, label in pairs[list(range(len(pairs)))]:
            assert (data == data[0]).all() and (label == label[0]).all()
        batches += 1
        time.sleep(STEP_S)
    print(f"{batches} batches", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
