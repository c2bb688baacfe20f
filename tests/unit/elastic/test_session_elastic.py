"""`session.elastic` of a script without Baton: plain DiLoCo, checkpoints, and settings that cannot work."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from baton import Session
from gpu_client.checkpoints.save.manifest_builder import build_manifest
from gpu_client.elastic.errors import ElasticSetupError
from tests.kits.elastic.node_processes import NodeProcess, SeatedProcesses

ROUNDS, INNER_STEPS = 3, 4


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_elastic(
    output: Path, *, until: int = ROUNDS, resume: bool = False, variables: Mapping[str, str] | None = None
) -> list[torch.Tensor]:
    """Train with the session until a round, with a checkpoint after each round."""
    with Session.start(output_dir=output, resume=resume, variables=variables or {}) as session:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer = session.elastic(model, optimizer, inner_steps=INNER_STEPS)
        session.resume(model=model, optimizer=optimizer, elastic=outer)
        outer.start()
        step = outer.round * INNER_STEPS
        while outer.round < until:
            take_step(model, optimizer, step)
            step += 1
            outer.step()
            if outer.checkpoint_due:
                session.checkpoint(outer.round, model=model, optimizer=optimizer, elastic=outer)
        outer.leave()
        return [one.detach().clone() for one in model.parameters()]


def train_plain() -> list[torch.Tensor]:
    """Train by DiLoCo as the paper states it, in ten lines."""
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    shared = [torch.nn.Parameter(one.detach().clone()) for one in model.parameters()]
    sgd = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(ROUNDS * INNER_STEPS):
        take_step(model, inner, step)
        if (step + 1) % INNER_STEPS == 0:
            for one, own in zip(shared, model.parameters(), strict=True):
                one.grad = one.detach() - own.detach()
            sgd.step()
            for one, own in zip(shared, model.parameters(), strict=True):
                own.data.copy_(one.data)
    return [one.detach() for one in shared]


def test_a_world_of_one_node_is_plain_diloco_bit_for_bit(tmp_path: Path) -> None:
    pairs = zip(train_elastic(tmp_path), train_plain(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_job_with_one_node_is_plain_diloco_bit_for_bit(tmp_path: Path) -> None:
    """With `nodes: {min: 1, max: 1}` the node forms a world, opens the wire and commits rounds alone."""
    with SeatedProcesses[NodeProcess](1, 1) as seats:
        _, relay, own = seats.claim(0)
        try:
            pairs = list(zip(train_elastic(tmp_path, variables={"BATON_WORLD": own}), train_plain(), strict=True))
        finally:
            relay.close()
        assert seats.view().epoch == 1
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_training_that_ends_and_resumes_is_plain_diloco_bit_for_bit(tmp_path: Path) -> None:
    train_elastic(tmp_path, until=1)
    pairs = zip(train_elastic(tmp_path, resume=True), train_plain(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_the_store_keeps_a_model_and_equal_outer_parameters_once(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        torch.manual_seed(7)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer = session.elastic(model, optimizer, inner_steps=INNER_STEPS)
        outer.start()
        for step in range(INNER_STEPS):
            inputs = torch.randn(4, 256, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            outer.step()
        path = session.checkpoint(1, model=model, elastic=outer)
        outer.leave()
    assert path is not None
    local = build_manifest(path, job_id=str(uuid4()), step=1, epoch=1)
    local.close()
    values = 3 * 256 * 257
    assert local.manifest.total_bytes > 12 * values
    assert local.new_bytes < 8.3 * values


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": "nccl"}, "no engine 'nccl'"),
        ({"codec": "fp8"}, "no codec 'fp8'"),
        ({"inner_steps": 0}, "inner_steps is 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(tmp_path: Path, options: dict[str, object], problem: str) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        model = make_model()
        with pytest.raises(ElasticSetupError, match=problem):
            session.elastic(model, torch.optim.SGD(model.parameters()), **options)  # type: ignore[arg-type]


def make_foreign(kind: str) -> torch.nn.Module:
    """Return a model that looks as another library's."""
    model = make_model()
    if kind == "ds_id":
        next(model.parameters()).ds_id = 1  # type: ignore[attr-defined]
        return model
    return type(kind, (torch.nn.Sequential,), {})(model)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("FullyShardedDataParallel", "FSDP1"), ("DeepSpeedEngine", "DeepSpeed"), ("ds_id", "DeepSpeed")],
)
def test_a_model_in_the_form_of_another_library_is_refused(tmp_path: Path, kind: str, problem: str) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        model = make_foreign(kind)
        with pytest.raises(ElasticSetupError, match=f"{problem}.*fully_shard"):
            session.elastic(model, torch.optim.SGD(model.parameters()))


def test_several_processes_without_a_process_group_are_told_to_make_one(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path, variables={"RANK": "0", "WORLD_SIZE": "2"}) as session:
        model = make_model()
        with pytest.raises(ElasticSetupError, match=r"one of 2 processes.*init_process_group"):
            session.elastic(model, torch.optim.SGD(model.parameters()))


def test_a_port_that_is_taken_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        world = (
            '{"job": "j", "seat": 0, "attempt": 1, "min": 1, "max": 2, "socket": "/none", '
            f'"port": {port}, "addresses": ["127.0.0.1:{port}"]}}'
        )
        with Session.start(output_dir=tmp_path, variables={"BATON_WORLD": world}) as session:
            model = make_model()
            with pytest.raises(ElasticSetupError, match=f"port {port} .*Set BATON_ELASTIC_PORT"):
                session.elastic(model, torch.optim.SGD(model.parameters()))
