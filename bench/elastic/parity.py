"""Compare held-out losses of DiLoCo with each codec, and with churn, in simulations with the product's parts.

A simulation is one process with all workers: their models and AdamW, the product's `LocalProgress` with its error
feedback, codecs and outer optimizer. The wire computes the same averages from the same codecs.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

import torch

from bench.harness.figures import Figure
from gpu_client.elastic.codecs import CODECS
from gpu_client.elastic.outer_optimizer import OuterOptimizer
from gpu_client.elastic.parameters import TrainedParameters
from gpu_client.elastic.rounds.local_progress import LocalProgress
from gpu_client.training.byte_transformer import HELD_OUT_BYTES, ByteTransformer, TextSettings, compute_loss, read_text

WORKERS, SEEDS, ROUNDS = 4, 3, 30
LAST_ROUNDS = 5
"""The loss is the mean of the held-out losses after the last rounds, which halves the noise of one."""
SETTINGS = TextSettings(inner_steps=20, learning_rate=3e-3)
HELD_OUT_WINDOWS = 512
AWAY_ROUNDS = 3
"""Rounds for which a worker is away in a rotation, before the next one is."""


def nobody(number: int, rounds: int) -> int | None:
    """Return the worker that is away in a round: none."""
    return None


def one_third(number: int, rounds: int) -> int | None:
    """Return worker 1 in the second third of the rounds; a new process then takes its place."""
    return 1 if rounds // 3 <= number < 2 * rounds // 3 else None


def rotation(number: int, rounds: int) -> int | None:
    """Return another worker every few rounds."""
    return number // AWAY_ROUNDS % WORKERS


class Variant(NamedTuple):
    """Contender. within: permitted excess over the loss of float32 without churn; None for no target."""

    name: str
    codec: str
    away: Callable[[int, int], int | None] = nobody
    within: float | None = None


VARIANTS = (
    Variant("fp32", "fp32"),
    Variant("int8", "int8", within=0.01),
    Variant("int4 with error feedback", "int4", within=0.02),
    Variant("int8, 1 of 4 workers lost after a third and replaced after two thirds", "int8", one_third, within=0.03),
    Variant("int8, 1 of 4 workers away at any time, each for 3 rounds", "int8", rotation),
)


class Worker:
    """Worker with its model, optimizer and batches."""

    def __init__(self, number: int, seed: int, outer: torch.Tensor, codec: str) -> None:
        self.settings = replace(SETTINGS, seed=seed)
        self.batches = torch.Generator().manual_seed(1000 * seed + number)
        torch.manual_seed(seed)
        self.model = ByteTransformer(self.settings)
        self.parameters = TrainedParameters(self.model.named_parameters())
        self.outer, self.codec = outer, codec
        self.begin()

    def begin(self) -> None:
        """Begin as a new process, with the outer state and a new optimizer."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.settings.learning_rate)
        self.progress = LocalProgress(self.outer, CODECS["int4"] if self.codec == "int4" else None)

    def train(self, text: torch.Tensor) -> torch.Tensor:
        """Take the inner steps from the outer parameters on, and return the delta as the wire would get it."""
        self.parameters.write(self.outer)
        window = torch.arange(self.settings.context + 1)
        for _ in range(self.settings.inner_steps):
            starts = torch.randint(len(text) - len(window), (self.settings.batch_size, 1), generator=self.batches)
            loss = compute_loss(self.model, text[starts + window])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.progress.hold(self.parameters)
        return self.progress.prepare(slice(0, len(self.outer)), is_exact=False)


def parity(rounds: int, _: int) -> list[Figure]:
    """Train each variant with three seeds, on all cores."""
    outer_rounds = max(2, ROUNDS * min(9, rounds) // 9)
    tasks = [(variant, seed, outer_rounds) for variant in VARIANTS for seed in range(SEEDS)]
    with multiprocessing.get_context("spawn").Pool(min(len(tasks), len(os.sched_getaffinity(0)))) as pool:
        losses = pool.starmap(simulate, tasks, chunksize=1)
    by_variant = {variant: losses[place * SEEDS : (place + 1) * SEEDS] for place, variant in enumerate(VARIANTS)}
    base = by_variant[VARIANTS[0]]
    figures = []
    for variant, found in by_variant.items():
        excess = [loss - other for loss, other in zip(found, base, strict=True)]
        title = f"held-out loss after {outer_rounds} rounds, {WORKERS} workers, mean of {SEEDS} seeds, {variant.name}"
        details = {"losses": found, "fp32": base, "excess": excess}
        if variant is VARIANTS[0]:
            figures.append(Figure(name=title, unit="nats", rounds=[mean(found)], details=details))
        else:
            title = f"{title}, less that of fp32"
            figures.append(
                Figure(name=title, unit="nats", rounds=[mean(excess)], at_most=variant.within, details=details)
            )
    return figures


def simulate(variant: Variant, seed: int, rounds: int) -> float:
    """Train, and return the held-out loss."""
    torch.set_num_threads(1)
    text = read_text()
    training, held_out = text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]
    windows = held_out[: HELD_OUT_WINDOWS * (SETTINGS.context + 1)].view(-1, SETTINGS.context + 1)
    torch.manual_seed(seed)
    parameters = TrainedParameters(ByteTransformer(replace(SETTINGS, seed=seed)).named_parameters())
    outer = torch.empty(parameters.values)
    parameters.read(outer)
    workers = [Worker(number, seed, outer, variant.codec) for number in range(WORKERS)]
    momentum, codec, optimizer = torch.zeros_like(outer), CODECS[variant.codec], OuterOptimizer()
    data = torch.empty(codec.encoded_bytes(len(outer)), dtype=torch.uint8)
    everything, losses = slice(0, len(outer)), []
    for number in range(rounds):
        away, before = variant.away(number, rounds), variant.away(number - 1, rounds) if number else None
        if before is not None and before != away:
            workers[before].begin()
        present = [one for place, one in enumerate(workers) if place != away]
        average = torch.zeros_like(outer)
        for one in present:
            codec.encode(one.train(training), data)
            codec.accumulate(data, 1 / len(present), average)
        codec.encode(average, data)
        codec.decode(data, average)
        optimizer.step(outer, momentum, average, first=number == 0)
        for one in present:
            one.progress.include(everything)
        if number >= rounds - LAST_ROUNDS:
            present[0].parameters.write(outer)
            with torch.no_grad():
                losses.append(compute_loss(present[0].model, windows).item())
    return mean(losses)
