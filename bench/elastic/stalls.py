"""Measure the share of time in which trainings wait for rounds whose reduce takes a fifth of the inner steps.

Eight nodes are threads with the product's outer loop and an engine in memory, whose reduce takes as long as the bench
says. An inner step is a sleep, therefore the nodes do not disturb each other.
"""

from __future__ import annotations

import threading
import time
from statistics import mean
from typing import NamedTuple

import torch

from bench.harness.figures import Figure
from gpu_client.elastic.outer import ElasticNode, ElasticOuter
from tests.kits.elastic.memory_engine import MemoryEngine, MemoryNetwork, MemoryTransfer
from tests.kits.elastic.memory_world import MemoryWorld, MemoryWorldCalls

NODES, VALUES = 8, 10_000
INNER_STEPS = 40
STEP_S = 0.1
REDUCE_SHARE = 0.2
"""Duration of a reduce over the duration of the inner steps."""
SLOWER = 1.3
UNMEASURED_ROUNDS = 2
"""First rounds, after which the nodes know how late their peers are."""


class Variant(NamedTuple):
    """Contender. at_most: permitted share, in percent; None for a variant to compare with."""

    name: str
    overlap: bool
    fragments: int = 1
    has_slow_node: bool = False
    at_most: float | None = None


VARIANTS = (
    Variant("blocking", overlap=False),
    Variant("overlap", overlap=True, at_most=1.0),
    Variant("overlap, 4 fragments", overlap=True, fragments=4, at_most=1.0),
    Variant("blocking, 1 of 8 nodes 30 % slower", overlap=False, has_slow_node=True),
    Variant("overlap, 1 of 8 nodes 30 % slower", overlap=True, has_slow_node=True, at_most=5.0),
)


class SleepingNode:
    """Node whose inner steps are sleeps."""

    def __init__(self, variant: Variant, network: MemoryNetwork, world: MemoryWorld, seat: int) -> None:
        name = world.claim(seat)
        self.step_s = STEP_S * (SLOWER if variant.has_slow_node and seat == NODES - 1 else 1)
        self.engine = MemoryEngine(network, name)
        reduce_s = REDUCE_SHARE * INNER_STEPS * STEP_S / variant.fragments
        self.engine.at_call = lambda call: time.sleep(reduce_s if call == "reduce" else 0)
        model = torch.nn.Linear(VALUES, 1, bias=False)
        node = ElasticNode(
            name, self.engine, MemoryWorldCalls(world, name), MemoryTransfer(network, name), bucket_values=VALUES // 8
        )
        self.outer = ElasticOuter(
            model,
            torch.optim.SGD(model.parameters()),
            node,
            inner_steps=INNER_STEPS,
            overlap=variant.overlap,
            fragments=variant.fragments,
        )
        network.sources[name] = self.outer.source
        self.rounds = variant.fragments
        self.stall = 0.0

    def train(self, turns: int) -> None:
        """Measure the stalls of so many averages of the whole model."""
        self.outer.start()
        waited_s = 0.0
        began_at: float | None = None
        while self.outer.round < (turns + UNMEASURED_ROUNDS) * self.rounds:
            if began_at is None and self.outer.round >= UNMEASURED_ROUNDS * self.rounds:
                waited_s, began_at = 0.0, time.perf_counter()
            time.sleep(self.step_s)
            stepped_at = time.perf_counter()
            self.outer.step()
            waited_s += time.perf_counter() - stepped_at
        assert began_at is not None
        self.stall = 100 * waited_s / (time.perf_counter() - began_at)


def stalls(rounds: int, _: int) -> list[Figure]:
    """Let eight nodes train with each variant, for a third of `rounds` averages."""
    figures = []
    for variant in VARIANTS:
        found = measure(variant, -(-rounds // 3))
        title = f"share of time in which {NODES} nodes wait for rounds, reduce / inner = {REDUCE_SHARE}, {variant.name}"
        figures.append(
            Figure(name=title, unit="%", rounds=[mean(found)], at_most=variant.at_most, details={"by node": found})
        )
    return figures


def measure(variant: Variant, turns: int) -> list[float]:
    """Return the share of each node, in percent."""
    network, world = MemoryNetwork(), MemoryWorld(NODES)
    nodes = [SleepingNode(variant, network, world, seat) for seat in range(NODES)]
    threads = [threading.Thread(target=one.train, args=(turns,), daemon=True) for one in nodes]
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        for node in nodes:
            node.outer.close()
    return [one.stall for one in nodes]
