"""Node of an elastic training as one or several processes, as torchrun starts them, each with a pipe to the test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._dynamo  # otherwise the first optimizer of every process imports it, for seconds
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from baton import Session
from gpu_client.agent.control.world_relay import WorldRelay
from gpu_client.elastic.node import OuterLoop
from tests.kits.elastic.node_processes import NodeProcesses
from tests.kits.runner.fork_server import fork_context

forkserver = fork_context("tests.kits.elastic.machine_node")


def make_model() -> nn.Module:
    """Return a model whose rows do not divide evenly among two processes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


def compute_loss(model: nn.Module, seat: int, rank: int, step: int) -> torch.Tensor:
    """Return the loss of the batch that one process of a node draws for a step."""
    generator = torch.Generator().manual_seed(10_000 * seat + 1000 * rank + step)
    inputs = torch.randn(16, 3, generator=generator)
    return nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True).sin())


def wrap_model(model: nn.Module, form: str) -> nn.Module:
    """Return the model as the processes of a node train it: "fsdp", "ddp" or "plain"."""
    if form == "fsdp":
        fully_shard(model[0])  # type: ignore[index]
        fully_shard(model)
    return DistributedDataParallel(model) if form == "ddp" else model


def list_values(model: nn.Module) -> list[Any]:
    """Return the whole parameters as plain numbers, which pipes carry after the end of a process. Collective."""
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return [one.tolist() for one in whole]


@dataclass
class RankTraining:
    """Training of one process. `steps`: its finished steps; `test`: its end of the pipe."""

    session: Session
    model: nn.Module
    optimizer: torch.optim.Optimizer
    outer: OuterLoop
    seat: int
    rank: int
    test: Connection
    steps: int = 0

    def step(self, tokens: int = 1) -> None:
        """Make one inner step."""
        loss = compute_loss(self.model, self.seat, self.rank, self.steps)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        self.outer.step(tokens)

    def train(self, until: int, tokens: int = 1) -> None:
        """Train until a round."""
        while self.outer.round < until:
            self.step(tokens)


class RankScript(Protocol):
    """Function that a process runs; a function of a module, because processes receive its name."""

    def __call__(self, training: RankTraining) -> None: ...


def run_rank(
    script: RankScript,
    variables: Mapping[str, str],
    store: Path,
    form: str,
    seat: int,
    options: Mapping[str, Any],
    test: Connection,
) -> None:
    """Run `script` as one process of a node."""
    torch.set_num_threads(1)
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    with (Path(variables["BATON_OUTPUT_DIR"]).parent / f"{store.name}-{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if size > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    with Session.start(variables=variables, resume=True) as session:
        model = wrap_model(make_model(), form)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer = session.elastic(model, optimizer, **options)
        script(RankTraining(session, model, optimizer, outer, seat, rank, test))
    test.send("done")
    if size > 1:
        dist.destroy_process_group()


class MachineNode:
    """Processes of one node. `pipes`: to each process."""

    def __init__(
        self,
        directory: Path,
        script: RankScript,
        form: str = "plain",
        processes: int = 1,
        *,
        seat: int = 0,
        world: str = "",
        number: int = 0,
        **options: Any,
    ) -> None:
        """world: value of BATON_WORLD. number: of the start in this directory. options: of `session.elastic`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.logs = [directory / f"seat-{seat}-{number}-{rank}.log" for rank in range(processes)]
        variables = {"BATON_OUTPUT_DIR": str(directory / f"seat-{seat}"), "WORLD_SIZE": str(processes)}
        variables |= {"BATON_WORLD": world} if world else {}
        store = directory / f"seat-{seat}-{number}"
        self.pipes, self._processes = [], []
        for rank in range(processes):
            mine, theirs = forkserver.Pipe()
            arguments = (script, {**variables, "RANK": str(rank)}, store, form, seat, options, theirs)
            process = forkserver.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self._processes.append(process)

    def receive(self, timeout_s: float = 60) -> list[Any]:
        """Return the next message of each process; fail with the log of a process that ends without one."""
        found = []
        for pipe, log in zip(self.pipes, self.logs, strict=True):
            try:
                assert pipe.poll(timeout_s), f"no message within {timeout_s} s\n{log.read_text()}"
                found.append(pipe.recv())
            except EOFError:
                raise AssertionError(log.read_text()) from None
        return found

    def send(self, message: object) -> None:
        """Send a message to each process that lives."""
        for pipe, process in zip(self.pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(message)

    def kill(self, rank: int) -> None:
        """Kill one process."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def join(self) -> list[int | None]:
        """Return the exit codes of all processes."""
        for one in self._processes:
            one.join(60)
        return [one.exitcode for one in self._processes]

    def close(self) -> None:
        """Kill all processes."""
        for rank in range(len(self._processes)):
            self.kill(rank)


class MachineNodes(NodeProcesses):
    """Nodes of one elastic job, each with one or several processes."""

    def __init__(self, directory: Path, least: int) -> None:
        super().__init__(directory, least, 8, "", {})
        self._place = directory
        self._relays: list[WorldRelay] = []
        self.machines: list[MachineNode] = []

    def add(self, script: RankScript, form: str, processes: int, **options: Any) -> MachineNode:
        """Start a node at the next seat."""
        seat = len(self.machines)
        _, relay, own = self.claim(seat)
        self._relays.append(relay)
        machine = MachineNode(self._place, script, form, processes, seat=seat, world=own, **options)
        self.machines.append(machine)
        return machine

    def __exit__(self, *error: Any) -> None:
        for one in self.machines:
            one.close()
        for relay in self._relays:
            relay.close()
        super().__exit__(*error)
