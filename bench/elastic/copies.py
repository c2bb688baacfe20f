"""Measure the training thread's copies in a round: hand over a delta, and apply what the round has moved.

The round itself takes no time here: the bench moves the buckets as the round thread would. Other programs on the
machine do not change the CPU time of one thread much.
"""

from __future__ import annotations

import time

import torch

from bench.harness.figures import Figure
from gpu_client.elastic.parameters import TrainedParameters, split_buckets
from gpu_client.elastic.rounds.local_progress import LocalProgress

FRAGMENTS = 8
LAYERS = 25
"""Parameters of the model, which are larger than buckets."""


def copies(rounds: int, values: int) -> list[Figure]:
    """Let both contenders take turns in each round: the buckets of one fragment, and the whole model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    contenders = {name: _Node(values, striped=striped) for name, striped in (("fragment", True), ("model", False))}
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds * FRAGMENTS):
        for name, node in contenders.items():
            took[name].append(node.take_part())
    torch.set_num_threads(threads)
    mb = values * 4 / 1e6
    return [
        Figure(
            name=f"CPU time of the copies of a training thread in a round, {mb:.0f} MB in {FRAGMENTS} fragments",
            unit="ms",
            rounds=took["fragment"],
            baseline_name="the whole model in each round",
            baseline=took["model"],
        )
    ]


class _Node:
    def __init__(self, values: int, *, striped: bool) -> None:
        named = [(str(one), torch.nn.Parameter(torch.randn(values // LAYERS))) for one in range(LAYERS)]
        self.parameters = TrainedParameters(named)
        self.outer = torch.empty(self.parameters.values)
        self.parameters.read(self.outer)
        self.buckets = split_buckets(self.parameters.values)
        found = self.parameters.stripe(self.buckets, FRAGMENTS)
        self.progress = LocalProgress(self.outer, fragments=found if striped else [None] * FRAGMENTS, mix=0.5)
        self.progress.is_started, self.progress.is_apart = True, False
        self.progress.proceed(self.parameters)
        self.round = 0

    def take_part(self) -> float:
        """Return the milliseconds of the training thread in one round."""
        began = time.thread_time()
        self.progress.hand_over(self.parameters, 0.0)
        self.progress.proceed(self.parameters)
        took_s = time.thread_time() - began
        fragment = self.round % FRAGMENTS
        self.round += 1
        with self.progress.changed:
            for bucket in self.buckets[fragment::FRAGMENTS]:
                self.progress.move(bucket, lambda part=bucket: self.outer[part].add_(0.01), mixes=True)
                self.progress.include(bucket, mixes=True)
            self.progress.next_fragment = self.round % FRAGMENTS
            self.progress.finish_round(included=1, fragment=fragment)
        began = time.thread_time()
        self.progress.follow(self.parameters)
        return 1000 * (took_s + time.thread_time() - began)
