"""Nodes of an elastic training as threads of one process, with the real outer loop, a real model, and memory links."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from gpu_client.elastic.outer import ElasticNode, ElasticOuter
from gpu_client.elastic.rounds.epoch_protocol import ElasticEvent, RoundTiming
from gpu_client.elastic.rounds.round_runner import EngineTimeouts
from tests.kits.elastic.memory_engine import MemoryEngine, MemoryNetwork, MemoryTransfer, NodeKilledError
from tests.kits.elastic.memory_world import MemoryWorld, MemoryWorldCalls

QUICK = RoundTiming(tick_s=0.002, poll_s=0.01, admission_s=0.01, report_s=0.05, retry_s=0.01)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def make_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(16, 3, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    inputs, wanted = make_batch(rank, step)
    loss = nn.functional.mse_loss(model(inputs), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class ThreadedCluster:
    """Nodes of one world of at least `least` nodes; the end of the context ends all threads."""

    def __init__(self, least: int = 1) -> None:
        self.network, self.world = MemoryNetwork(), MemoryWorld(least)
        self.nodes: list[ThreadedNode] = []

    def add(self, **options: Any) -> ThreadedNode:
        node = ThreadedNode(self.network, self.world, len(self.nodes), **options)
        self.nodes.append(node)
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.network.hung.clear()
        run_together(*[one.outer.close for one in self.nodes])


class ThreadedNode:
    """One node with its model, AdamW and outer loop. `options`: of ElasticOuter."""

    def __init__(
        self,
        network: MemoryNetwork,
        world: MemoryWorld,
        seat: int,
        *,
        seed: int = 0,
        model: nn.Module | None = None,
        learning_rate: float = 0.01,
        codec: str = "fp32",
        **options: Any,
    ) -> None:
        self.seat, self.network = seat, network
        self.name = world.claim(seat)
        self.model = model or make_model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.engine = MemoryEngine(network, self.name)
        self.events: list[ElasticEvent] = []
        self.steps = 0
        node = ElasticNode(
            self.name,
            self.engine,
            MemoryWorldCalls(world, self.name),
            MemoryTransfer(network, self.name),
            timing=QUICK,
            timeouts=EngineTimeouts(open_s=60, exchange_s=60, reduce_s=60),
            codec=codec,
            bucket_values=4096 if model else 16,
        )
        self.outer = ElasticOuter(self.model, self.optimizer, node, on_event=self.events.append, **options)
        network.sources[self.name] = self.outer.source

    def step(self, tokens: int = 1) -> None:
        train_step(self.model, self.optimizer, self.seat, self.steps)
        self.steps += 1
        self.outer.step(tokens)

    def train(self, steps: int) -> None:
        self.outer.start()
        for _ in range(steps):
            self.step()

    def values(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]

    def commits(self) -> list[str]:
        return [one.message for one in self.events if one.kind == "round_committed"]

    def kinds(self) -> list[str]:
        return [one.kind for one in self.events]


def outer_params(node: ThreadedNode) -> torch.Tensor:
    """Return the outer parameters as the node would save them, as one flat tensor."""
    return torch.cat([one.reshape(-1) for one in node.outer.state_dict()["params"].values()])


def run_together(*jobs: Callable[[], object], timeout_s: float = 120) -> None:
    """Run the jobs in threads, and raise the first error of a job; the death of a killed node is no error."""
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except NodeKilledError:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for one in threads:
        one.start()
    for one in threads:
        one.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(one.is_alive() for one in threads), "a node did not end"
