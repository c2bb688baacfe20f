"""Elastic trainings by the Trainer and by accelerate: equal to the plain loop, resumed, and on two nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
from baton import Session  # noqa: E402
from gpu_client.elastic.outer import ElasticOuter  # noqa: E402
from gpu_client.elastic.rounds import round_protocol  # noqa: E402
from gpu_client.elastic.rounds.round_decisions import Wait  # noqa: E402
from gpu_client.training.errors import SessionError  # noqa: E402
from tests.kits.elastic import hugging_face as loops  # noqa: E402  # it needs transformers
from tests.kits.elastic.node_processes import NodeProcesses  # noqa: E402
from tests.kits.network.ports import free_port  # noqa: E402

ROUNDS = 3


@pytest.fixture
def other_precision() -> Iterator[None]:
    """Let the test choose a precision, which accelerate keeps for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class StopAt(transformers.TrainerCallback):  # type: ignore[misc]
    """Stop request after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def train_plain(rounds: int = ROUNDS) -> dict[str, torch.Tensor]:
    """Train by DiLoCo as the paper states it, with accumulated gradients."""
    model, samples = loops.Regression(), loops.Samples()
    inner = torch.optim.AdamW(model.parameters(), lr=loops.RATE, weight_decay=0.0)
    shared = [torch.nn.Parameter(one.detach().clone()) for one in model.parameters()]
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    size = loops.BATCH
    for step in range(rounds * loops.INNER_STEPS):
        for part in range(loops.ACCUMULATED):
            start = (step * loops.ACCUMULATED + part) * size % loops.SAMPLES
            batch = [samples[index] for index in range(start, start + size)]
            loss = model(torch.stack([one["x"] for one in batch]), torch.stack([one["labels"] for one in batch]))
            (loss["loss"] / loops.ACCUMULATED).backward()
        inner.step()
        inner.zero_grad()
        if (step + 1) % loops.INNER_STEPS == 0:
            for one, own in zip(shared, model.parameters(), strict=True):
                one.grad = one.detach() - own.detach()
            outer.step()
            for one, own in zip(shared, model.parameters(), strict=True):
                own.data.copy_(one.data)
    return model.state_dict()


def require_same(ours: torch.nn.Module, rounds: int = ROUNDS) -> None:
    for (name, one), other in zip(ours.state_dict().items(), train_plain(rounds).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=name)


def saved(output: Path) -> list[str]:
    return sorted(one.name for one in output.glob("checkpoint-*"))


def test_a_trainer_alone_is_plain_diloco_and_saves_after_each_round(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        trainer = loops.train_by_trainer(session, ROUNDS, ordered=True, save_steps=1)
        assert session._last_report[:2] == (12, 12)
    require_same(trainer.model)
    assert saved(tmp_path) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


def test_a_trainer_averages_the_model_in_fragments_and_saves_after_each_turn(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        trainer = loops.train_by_trainer(session, ROUNDS, ordered=True, elastic={"fragments": 2, "overlap": False})
        assert session._last_report[:2] == (12, 12)
    assert [one["step"] for one in trainer.state.log_history if "loss" in one] == list(range(1, 13))
    assert saved(tmp_path) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


def test_a_stopped_trainer_contributes_its_last_steps_and_resumes_from_them(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        loops.train_by_trainer(session, ROUNDS, ordered=True, callbacks=(StopAt(4),))
    with Session.start(output_dir=tmp_path, variables={}, resume=True) as session:
        trainer = loops.train_by_trainer(session, ROUNDS, ordered=True, ignore_data_skip=False)
    require_same(trainer.model)
    with Session.start(output_dir=tmp_path / "amid", variables={}) as session:
        loops.train_by_trainer(session, ROUNDS, ordered=True, callbacks=(StopAt(6),))
    assert saved(tmp_path / "amid") == ["checkpoint-4", "checkpoint-6"], "two steps of the second round count"


def test_a_finished_training_trains_no_further(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        loops.train_by_trainer(session, ROUNDS, ordered=True)
    with Session.start(output_dir=tmp_path, variables={}, resume=True) as session:
        trainer = loops.train_by_trainer(session, ROUNDS, ordered=True)
    require_same(trainer.model)


def test_a_node_behind_its_group_takes_over_the_step_and_the_rate_of_the_group(tmp_path: Path) -> None:
    outers: list[Any] = []

    class Behind(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            outers[0]._replica.state.round = 2  # As if the node had fetched the state of its peers.

    with Session.start(output_dir=tmp_path, variables={}) as session:
        make = session.elastic
        session.elastic = lambda *given, **options: outers.append(make(*given, **options)) or outers[0]  # type: ignore
        trainer = loops.train_by_trainer(session, 4, ordered=True, callbacks=(Behind(),), lr_scheduler_type="linear")
    logged = [one for one in trainer.state.log_history if "learning_rate" in one]
    assert [one["step"] for one in logged] == [8, 9, 10, 12, 13, 14, 15, 16]
    assert [one["learning_rate"] for one in logged[1:3]] == pytest.approx([loops.RATE * 8 / 16, loops.RATE * 7 / 16])
    samples = [loops.Samples()[index] for index in range(loops.BATCH * loops.ACCUMULATED)]
    first = loops.Regression()(torch.stack([one["x"] for one in samples]), torch.stack([s["labels"] for s in samples]))
    assert logged[0]["loss"] == pytest.approx(first["loss"].item()), "the loss of one step, not an eighth of the loss"
    assert saved(tmp_path) == ["checkpoint-12", "checkpoint-16"]


@pytest.mark.parametrize("reason", ["apart", "slow peers"])
def test_a_node_whose_rounds_are_late_has_batches_for_all_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    outers: list[ElasticOuter] = []
    waits: list[float] = []

    def end_wait(outer: ElasticOuter) -> bool:
        waits.append(outer._steps_left)
        outer._progress.notify(is_apart=False)
        released.set()
        return wait(outer)

    class Late(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if reason == "apart":
                outers[0]._progress.notify(is_apart=True)

    released = threading.Event()
    wait = ElasticOuter._wait_for_begin
    monkeypatch.setattr(ElasticOuter, "_wait_for_begin", end_wait)
    if reason == "slow peers":  # The first round of an overlapped training begins late.
        decide = round_protocol.decide
        monkeypatch.setattr(round_protocol, "decide", lambda *a: decide(*a) if released.is_set() else Wait())
    with Session.start(output_dir=tmp_path, variables={}) as session:
        make = session.elastic
        options = {"overlap": reason == "slow peers"}
        session.elastic = lambda *given, **more: outers.append(make(*given, **more, **options)) or outers[0]  # type: ignore
        trainer = loops.train_by_trainer(session, 4, callbacks=(Late(),))
    assert waits, "the node has waited instead of using up its batches"
    assert (trainer.state.global_step, outers[0].round) == (16, 4)
    assert len(trainer.train_dataset.drawn) <= 17 * loops.BATCH * loops.ACCUMULATED


def test_a_node_without_batches_for_the_last_round_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ElasticOuter, "step", lambda *_, **__: None)  # As if rounds took no delta.
    with Session.start(output_dir=tmp_path, variables={}) as session, pytest.raises(SessionError, match="round 0 of 4"):
        loops.train_by_trainer(session, 4)


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"max_steps": 3}, "max_steps is 3"), ({"load_best_model_at_end": True, "eval_strategy": "no"}, "load_best")],
)
def test_arguments_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session, pytest.raises(SessionError, match=problem):
        loops.train_by_trainer(session, ROUNDS, save_strategy="no", **options)


def test_a_loop_of_accelerate_counts_a_step_for_each_accumulated_gradient(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        require_same(loops.train_by_accelerate(session, ROUNDS))
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_mixed_precision_of_accelerate_trains_and_resumes(tmp_path: Path, other_precision: None) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        model = loops.train_by_accelerate(session, ROUNDS, mixed_precision="bf16")
    for one, other in zip(model.state_dict().values(), train_plain().values(), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=0.05)
    with Session.start(output_dir=tmp_path, variables={}, resume=True) as session:
        loops.train_by_accelerate(session, ROUNDS + 1, mixed_precision="bf16")
    assert saved(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_a_launcher_on_several_machines_is_refused(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    with Session.start(output_dir=tmp_path, variables=variables) as session:
        model = loops.Regression()
        with pytest.raises(SessionError, match=r"4 processes on several machines.*--nnodes 1"):
            session.elastic(model, torch.optim.SGD(model.parameters()))


@pytest.mark.processes
def test_a_trainer_of_several_processes_trains_as_one_node_and_resumes(tmp_path: Path) -> None:
    for rounds in (2, 3):
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        pipes, processes = [], []
        for rank in ("0", "1"):
            mine, theirs = loops.forkserver.Pipe()
            own = {**variables, "BATON_OUTPUT_DIR": str(tmp_path), "RANK": rank, "LOCAL_RANK": rank}
            processes.append(loops.forkserver.Process(target=loops.train_as_rank, args=(own, rounds, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        first, second = (one.recv() for one in pipes)
        assert first == second
        assert first[0] == rounds * loops.INNER_STEPS
        assert first[2] == sorted(f"checkpoint-{(one + 1) * loops.INNER_STEPS}" for one in range(rounds))
        for one in processes:
            one.join(60)
            assert one.exitcode == 0


@pytest.mark.processes
@pytest.mark.parametrize("loop", ["trainer", "accelerate"])
def test_two_nodes_train_one_model(tmp_path: Path, loop: str) -> None:
    module, context = loops.__name__, loops.forkserver
    with NodeProcesses(tmp_path, 2, 2, module, {"rounds": ROUNDS, "loop": loop}, context=context) as processes:
        nodes = processes.start_all([0, 1])
        for node in nodes:
            assert node.wait(120) == 0, node.log
    done = [json.loads((node.output / "done.json").read_text()) for node in nodes]
    models = [load_file(node.output / "model.safetensors") for node in nodes]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    rounds = ROUNDS if loop == "accelerate" else ROUNDS * loops.INNER_STEPS
    everything = [name for one in done for name in one["saved"]]
    assert len(everything) == len(set(everything)) and f"checkpoint-{rounds}" in everything, "one node saves a round"
    if loop == "trainer":
        assert [one["step"] for one in done] == [rounds, rounds]
        assert done[0]["drawn"][:16] != done[1]["drawn"][:16], "each node draws its own batches"
