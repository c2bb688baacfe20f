"""A machine with several processes is one node: equal to plain DiLoCo, equal to its peers, and gone as a whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_client.elastic.errors import ElasticError
from tests.kits.elastic.machine_node import (
    MachineNode,
    MachineNodes,
    RankTraining,
    compute_loss,
    list_values,
    make_model,
)

pytestmark = pytest.mark.processes

INNER_STEPS = 3
PAUSE_ROUND, LAST_ROUND = 2, 4
PROCESSES = (2, 2, 1)
SHARDS, BATCHES = 6, 2
TOKENS = (1, 1, 4)
"""Tokens of each process: the nodes have the weights 1/4, 1/4 and 1/2, with which fp32 scales without rounding."""


def train_with_pause(training: RankTraining) -> None:
    """Train to a round, tell the parameters, wait for the test, and go on."""
    training.outer.start()
    training.train(PAUSE_ROUND, TOKENS[training.seat])
    training.test.send(list_values(training.model))
    training.test.recv()
    training.train(LAST_ROUND, TOKENS[training.seat])
    training.outer.leave()
    training.test.send(list_values(training.model))


def resume_one_round(training: RankTraining) -> None:
    """Resume, train one round, and save."""
    states = {"model": training.model, "optimizer": training.optimizer, "elastic": training.outer}
    training.session.resume(**states)
    training.outer.start()
    begun = training.outer.round
    training.steps = begun * INNER_STEPS
    training.train(begun + 1)
    assert training.outer.checkpoint_due
    training.session.checkpoint(training.outer.round, **states)
    assert not training.outer.checkpoint_due
    training.test.send(list_values(training.model))


def overlap_until_stopped(training: RankTraining) -> None:
    """Train with overlap until a signal reaches one process; tell round and parameters after each step."""
    training.outer.start()
    told = []
    while not training.session.should_stop:
        training.step()
        told.append((training.outer.round, list_values(training.model)))
        if training.outer.round == LAST_ROUND and training.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    training.outer.leave()
    training.test.send(told)


def diverge(training: RankTraining) -> None:
    """Spoil the values of one process before a round; tell whether values are finite and moments exist, twice."""
    training.outer.start()
    for _ in range(INNER_STEPS):
        if training.steps == INNER_STEPS - 1 and training.rank == 1:
            training.optimizer.register_step_post_hook(spoil)
        training.step()
    for until in (0, 1):
        training.train(until)
        values = [torch.tensor(one) for one in list_values(training.model)]
        training.test.send((all(bool(one.isfinite().all()) for one in values), len(training.optimizer.state)))


def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Set a parameter and its moment to NaN in this process, once."""
    parameter = optimizer.param_groups[0]["params"][0]
    for one in (parameter.detach(), optimizer.state[parameter]["exp_avg"]):
        one.to_local()[0] = float("nan")
    optimizer._optimizer_step_post_hooks.clear()


def make_mistakes(training: RankTraining) -> None:
    """Tell the errors of wrong calls."""

    def tell(call: Callable[[], object]) -> None:
        try:
            call()
        except ElasticError as error:
            training.test.send(str(error))

    outer, other = training.outer, torch.nn.Linear(2, 2 + training.rank)
    tell(lambda: training.session.elastic(other, torch.optim.SGD(other.parameters())))
    tell(outer.step)
    outer.start()
    tell(outer.leave if training.rank else outer.start)
    tell(lambda: training.train(1, tokens=0))
    tell(lambda: training.train(1))


def train_shards(training: RankTraining) -> None:
    """Train the shards of this node, and tell position and number of each batch."""
    shards = training.session.shards(SHARDS)
    training.outer.start()
    told = []
    for shard in shards:
        for batch in range(shard.offset, BATCHES):
            told.append((shard.position, batch))
            shard.advance(batch + 1)
            training.step()
    training.test.send(told)
    training.outer.leave()


def plain_diloco(members: list[int], processes: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[Any]:
    """Train the nodes at these seats one after the other: mean gradients inside, weighted deltas outside.

    processes: of each seat in each round. tokens: of each process of a seat.
    """
    outer = [torch.nn.Parameter(one.detach().clone()) for one in make_model().parameters()]
    sgd = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    models = {seat: make_model() for seat in members}
    inner = {seat: torch.optim.AdamW(one.parameters(), lr=0.01) for seat, one in models.items()}
    for step in range(len(processes) * INNER_STEPS):
        counts = processes[step // INNER_STEPS]
        weights = [count * one for count, one in zip(counts, tokens, strict=True)]
        for seat, model in models.items():
            inner[seat].zero_grad()
            for rank in range(counts[seat]):
                (compute_loss(model, seat, rank, step) / counts[seat]).backward()
            inner[seat].step()
        if (step + 1) % INNER_STEPS == 0:
            for place, shared in enumerate(outer):
                shared.grad = torch.zeros_like(shared)
                for seat, model in models.items():
                    shared.grad += (
                        weights[seat] / sum(weights) * (shared.detach() - list(model.parameters())[place].detach())
                    )
            sgd.step()
            for model in models.values():
                for own, shared in zip(model.parameters(), outer, strict=True):
                    own.data.copy_(shared)
    return [one.tolist() for one in outer]


def test_nodes_of_any_number_of_processes_train_one_model_until_one_of_them_dies(tmp_path: Path) -> None:
    with MachineNodes(tmp_path, least=3) as nodes:
        for form, processes in zip(("fsdp", "ddp", "plain"), PROCESSES, strict=True):
            nodes.add(train_with_pause, form, processes, inner_steps=INNER_STEPS, codec="fp32")
        found = [values for machine in nodes.machines for values in machine.receive()]
        members = [one.seat for one in nodes.view().members]
        expected = plain_diloco(members, [PROCESSES] * PAUSE_ROUND, TOKENS)
        assert found == [expected] * sum(PROCESSES)

        sharded, *others = nodes.machines
        sharded.kill(1)
        for machine in nodes.machines:
            machine.send("go on")
        (first, second), _ = [one.receive() for one in others]
        assert first == second
        assert 0 not in {one.seat for one in nodes.view().members}
        assert [one.join() for one in others] == [[0, 0], [0]]
        assert sharded.join()[0] not in (0, None)


def test_a_node_resumes_with_another_number_of_processes(tmp_path: Path) -> None:
    rounds = [("plain", 1), ("fsdp", 2), ("plain", 1)]
    for number, (form, processes) in enumerate(rounds):
        with closing(
            MachineNode(tmp_path, resume_one_round, form, processes, number=number, inner_steps=INNER_STEPS)
        ) as node:
            found = node.receive()
            assert node.join() == [0] * processes
        expected = plain_diloco([0], [[count] for _, count in rounds[: number + 1]], [1])
        assert found == [expected] * processes


@pytest.mark.parametrize(("form", "fragments"), [("ddp", 1), ("fsdp", 3)])
def test_all_processes_apply_a_move_and_stop_after_the_same_step(tmp_path: Path, form: str, fragments: int) -> None:
    options = {"inner_steps": INNER_STEPS, "overlap": True, "fragments": fragments}
    with closing(MachineNode(tmp_path, overlap_until_stopped, form, 2, **options)) as node:
        first, second = node.receive()
        assert first == second
        assert first[-1][0] >= LAST_ROUND
        assert node.join() == [0, 0]


def test_a_delta_that_is_not_finite_in_one_process_is_refused_by_the_node(tmp_path: Path) -> None:
    with closing(MachineNode(tmp_path, diverge, "fsdp", 2, inner_steps=INNER_STEPS)) as node:
        assert node.receive() == [(True, 0)] * 2, "all processes drop their moments"
        assert node.receive() == [(True, 4)] * 2
        assert node.join() == [0, 0]


def test_processes_that_do_not_fit_together_are_refused_in_all_of_them(tmp_path: Path) -> None:
    with closing(MachineNode(tmp_path, make_mistakes, "plain", 2, inner_steps=INNER_STEPS)) as node:
        expected = [
            "models with different parameters",
            "has not started",
            "different calls: start in process 0, leave in process 1",
            "tokens is 0",
            "different values of the same parameters. Wrap the model in DistributedDataParallel",
        ]
        for part in expected:
            for message in node.receive():
                assert part in message


def test_all_processes_of_a_node_train_the_same_shards(tmp_path: Path) -> None:
    with MachineNodes(tmp_path, 2) as job:
        nodes = [
            job.add(train_shards, form, processes, inner_steps=3) for form, processes in (("ddp", 2), ("plain", 1))
        ]
        (first, second), (other,) = (one.receive() for one in nodes)
        assert first == second
        assert sorted(first + other) == [(shard, batch) for shard in range(SHARDS) for batch in range(BATCHES)]
