"""The session in one process: environment, directives, checkpoints, exact resume, errors."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from listening_agent import ListeningAgent
from session_helpers import Counter, names
from torch import nn

from baton import (
    BatchSampler,
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointWriteError,
    Session,
    SessionError,
)
from gpu_client.training import channel
from gpu_client.training.checkpoint import checkpoint_directory, state_files
from gpu_client.training.checkpoint.random_state import capture_random

# --- the environment -----------------------------------------------------------------------------------------


def test_reads_what_the_agent_says(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"steps": 5}')
    variables = {
        "BATON_JOB_ID": "job-1",
        "BATON_EPOCH": "3",
        "BATON_DATA_DIR": str(tmp_path / "data"),
        "BATON_OUTPUT_DIR": str(tmp_path / "out" / "put"),
        "BATON_RESUME_FROM": "",
        "BATON_PARAMS": str(tmp_path / "params.json"),
        "BATON_CHANNEL": "",
    }
    with Session.start(output_dir="elsewhere", params={"steps": 9}, variables=variables) as session:
        assert (session.job_id, session.epoch, session.params) == ("job-1", 3, {"steps": 5})
        assert session.data_dir == tmp_path / "data"
        assert session.output_dir == tmp_path / "out" / "put" and session.output_dir.is_dir()
        assert session.resume(anything=Counter()) == 0
        assert session.stop_reason is None


def test_a_session_that_writes_no_checkpoint_needs_no_torch(tmp_path: Path) -> None:
    """A generator of samples starts two seconds sooner."""
    code = (
        "import sys; from baton import Session; session = Session.start(output_dir=sys.argv[1]); session.resume(); "
        "session.report(1, 1, loss=1.0); session.checkpoint_due(1); session.close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == 0


def test_works_without_baton(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path / "o", params={"a": 1}, variables={}) as session:
        assert (session.job_id, session.epoch, session.params) == ("", 0, {"a": 1})
        with pytest.raises(SessionError, match="BATON_DATA_DIR"):
            _ = session.data_dir
        session.report(1, 2, loss=0.5)
        session.checkpoint(1, counter=Counter(4))
    counter = Counter()
    with Session.start(output_dir=tmp_path / "o", resume=True, variables={}) as session:
        assert (session.resume(counter=counter), counter.value) == (1, 4)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "output_dir"),
        ({"BATON_OUTPUT_DIR": "{tmp}/o", "BATON_PARAMS": "{tmp}/missing.json"}, "BATON_PARAMS"),
        ({"BATON_OUTPUT_DIR": "{tmp}/o", "BATON_PARAMS": "{tmp}/list.json"}, "JSON list"),
        ({"BATON_OUTPUT_DIR": "{tmp}/o", "BATON_EPOCH": "x"}, "BATON_EPOCH"),
        ({"BATON_OUTPUT_DIR": "{tmp}/o", "WORLD_SIZE": "x"}, "WORLD_SIZE"),
        ({"BATON_OUTPUT_DIR": "{tmp}/o", "BATON_RESUME_FROM": "{tmp}/none"}, "BATON_RESUME_FROM"),
    ],
)
def test_a_wrong_environment_is_named(tmp_path: Path, variables: dict[str, str], says: str) -> None:
    (tmp_path / "list.json").write_text("[1]")
    filled = {name: value.replace("{tmp}", str(tmp_path)) for name, value in variables.items()}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SessionError, match=says):
        Session.start(variables=filled)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_fresh_run_does_not_mix_with_an_earlier_one(start: Callable[..., Session]) -> None:
    start().checkpoint(5, counter=Counter(1))
    with pytest.raises(SessionError, match=r"checkpoint-5.*resume=True"):
        start()
    assert start(resume=True).resume(counter=Counter()) == 5


# --- checkpoints and resume -------------------------------------------------------------------------------------------


class Training:
    """A loop that draws from every random source, with everything that has a state."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=40)
        self.batches = BatchSampler(50, 8, seed=1)
        self.data = torch.linspace(-1, 1, 200).reshape(50, 4)

    def named(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "batches")}

    def step(self) -> float:
        noise = random.gauss(0, 1) + np.random.standard_normal() + torch.randn(()).item()
        loss = (self.model(self.data[next(self.batches)]) * noise).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def test_resumed_training_is_bit_identical_in_every_state(start: Callable[..., Session]) -> None:
    through = Training()
    session = start(keep_last=10)
    losses = []
    for step in range(1, 31):
        losses.append(through.step())
        if step in (7, 19):
            session.checkpoint(step, **through.named())
    final_random = capture_random()
    for step in (7, 19):
        random.seed(99)
        np.random.seed(99)
        resumed = Training()
        torch.manual_seed(99)
        here = start(BATON_RESUME_FROM=str(session.output_dir / f"checkpoint-{step}"))
        assert here.resume(**resumed.named()) == step
        assert [resumed.step() for _ in range(step, 30)] == losses[step:]
        for name, value in through.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name])
        assert repr(resumed.optimizer.state_dict()) == repr(through.optimizer.state_dict())
        assert resumed.scheduler.state_dict() == through.scheduler.state_dict()
        assert resumed.batches.state_dict() == through.batches.state_dict()
        assert repr(capture_random()) == repr(final_random)


def test_a_checkpoint_tells_the_agent_after_it_is_complete(start: Callable[..., Session]) -> None:
    with ListeningAgent() as agent:
        session = start(agent)
        session.report(5, 10, loss=torch.tensor(0.25, requires_grad=True), rate=np.float32(0.5))
        path = session.checkpoint(5, counter=Counter(1))
        message = agent.wait_for("checkpoint")[0]
        assert message == {"type": "checkpoint", "step": 5, "path": str(path), "metrics": {"loss": 0.25, "rate": 0.5}}
        marker = json.loads((path / "baton.json").read_text())
        assert (marker["step"], marker["created_by"], marker["metrics"]) == (5, "session", {"loss": 0.25, "rate": 0.5})
        session.checkpoint(5, counter=Counter(2))  # again at the same step: is already there
        session.checkpoint(6, metrics={"accuracy": 1}, counter=Counter(2))
        assert [(m["step"], m["metrics"]) for m in agent.wait_for("checkpoint", 2)] == [
            (5, {"loss": 0.25, "rate": 0.5}),
            (6, {"accuracy": 1}),
        ]


def test_steps_may_be_numpys_or_torchs_whole_numbers(start: Callable[..., Session]) -> None:
    """A session accepts whole numbers of NumPy and PyTorch as steps; under an agent they ended the training."""
    with ListeningAgent() as agent:
        session = start(agent)
        session.report(np.int64(5), torch.tensor(10), loss=1.0)  # type: ignore[arg-type]
        path = session.checkpoint(np.int64(5), counter=Counter(1))  # type: ignore[arg-type]
        assert agent.wait_for("checkpoint")[0]["step"] == 5
        assert agent.wait_for("progress")[0] | {"metrics": {}} == {
            "type": "progress", "step": 5, "total": 10, "metrics": {},
        }  # fmt: skip
        assert json.loads((path / "baton.json").read_text())["step"] == 5
    with pytest.raises(SessionError, match=r"total is 10\.5"):
        start(resume=True).report(5, 10.5)  # type: ignore[arg-type]


def test_what_comes_between_steps_is_told_with_the_step_it_comes_after(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROGRESS_INTERVAL_S", 0.0)
    with ListeningAgent() as agent:
        session = start(agent)
        session.phase("latents", 1, 20)
        (first,) = agent.wait_for("progress")
        session.report(5, 10, loss=0.5)
        agent.wait_for("progress", 2)
        session.phase("pictures", np.int64(2), torch.tensor(4))  # type: ignore[arg-type]
        last = agent.wait_for("progress", 3)[-1]
        session.checkpoint(5, counter=Counter(1))
        assert agent.wait_for("checkpoint")[0]["metrics"] == {"loss": 0.5}
    assert first == {
        "type": "progress", "step": 0, "total": None, "metrics": {"latents": 1, "latents_total": 20},
        "phase": {"name": "latents", "done": 1, "total": 20},
    }  # fmt: skip
    assert last == {
        "type": "progress", "step": 5, "total": 10, "metrics": {"pictures": 2, "pictures_total": 4, "loss": 0.5},
        "phase": {"name": "pictures", "done": 2, "total": 4},
    }  # fmt: skip
    with pytest.raises(SessionError, match=r"done is 0\.5"):
        start(resume=True).phase("pictures", 0.5, 4)  # type: ignore[arg-type]


def test_before_the_first_step_of_a_resumed_run_the_step_is_that_of_its_checkpoint(
    start: Callable[..., Session],
) -> None:
    earlier = start().checkpoint(5, counter=Counter(1))
    with ListeningAgent() as agent:
        session = start(agent, BATON_RESUME_FROM=str(earlier))
        assert session.resume(counter=Counter(0)) == 5
        session.phase("latents", 1, 20)
        assert agent.wait_for("progress")[0]["step"] == 5


def test_old_checkpoints_go_foreign_ones_stay(start: Callable[..., Session]) -> None:
    session = start(keep_last=2)
    (session.output_dir / "checkpoint-1").mkdir()  # a foreign script's
    for step in (2, 3, 4, 5):
        session.checkpoint(step, counter=Counter())
    assert names(session) == ["checkpoint-1", "checkpoint-4", "checkpoint-5"]


def test_nothing_is_deleted_before_the_agent_knows_of_its_successor(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_client.training.channel.CHECKPOINT_DELIVERY_TIMEOUT_S", 0.0)
    with ListeningAgent() as agent:
        session = start(agent, keep_last=1)
        session.checkpoint(1, counter=Counter())
        agent.wait_for("checkpoint")
        monkeypatch.setattr(session._channel, "is_delivered", lambda step: step < 2)
        session.checkpoint(2, counter=Counter())
        session.checkpoint(3, counter=Counter())
        assert names(session) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
        monkeypatch.undo()
        session.checkpoint(4, counter=Counter())
        assert names(session) == ["checkpoint-4"]


def test_what_the_agent_restored_stays(start: Callable[..., Session], tmp_path: Path) -> None:
    first = start()
    restored = first.checkpoint(1, counter=Counter(1))
    with ListeningAgent() as agent:
        session = start(agent, keep_last=1, BATON_RESUME_FROM=str(restored))
        assert session.resume(counter=Counter()) == 1
        for step in (2, 3):
            session.checkpoint(step, counter=Counter())
        assert names(session) == ["checkpoint-1", "checkpoint-3"]


def test_leftovers_of_a_killed_process_are_removed_at_start(start: Callable[..., Session]) -> None:
    session = start()
    (session.output_dir / ".checkpoint-3.tmp").mkdir()
    (session.output_dir / ".checkpoint-3.tmp" / "model.safetensors").write_bytes(b"half")
    assert names(start()) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "holds counter, other, but resume.. asks for nothing"),
        ({"counter": Counter()}, "asks for counter"),
        ({"counter": Counter(), "other": Counter(), "more": Counter()}, "asks for counter, more, other"),
    ],
)
def test_resume_wants_the_states_of_the_checkpoint(
    start: Callable[..., Session], asked: dict[str, Counter], says: str
) -> None:
    start().checkpoint(5, counter=Counter(1), other=Counter(2))
    with pytest.raises(CheckpointMismatchError, match=says):
        start(resume=True).resume(**asked)
    assert all(counter.value == 0 for counter in asked.values())


def test_a_damaged_checkpoint_is_an_error_never_a_fresh_start(start: Callable[..., Session]) -> None:
    path = start().checkpoint(5, counter=Counter(1))
    (path / "state.pt").write_bytes(b"")
    counter = Counter()
    with pytest.raises(CheckpointDamagedError, match=r"state\.pt"):
        start(resume=True).resume(counter=counter)
    assert counter.value == 0


def test_a_foreign_checkpoint_is_not_for_resume(start: Callable[..., Session]) -> None:
    session = start()
    (session.output_dir / "checkpoint-2").mkdir()
    (session.output_dir / "checkpoint-2" / "weights").write_bytes(b"w")
    session.mark_complete(2)
    with pytest.raises(CheckpointMismatchError, match="Trainer"):
        start(resume=True).resume(counter=Counter())
    with pytest.raises(CheckpointWriteError, match="does not exist"):
        session.mark_complete(3)


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["save_states", "write_marker", "publish"])
def test_a_failed_write_leaves_nothing_and_keeps_the_older_one(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    session = start()
    session.checkpoint(1, counter=Counter(1))
    with monkeypatch.context() as patch:
        patch.setattr(state_files if where == "save_states" else checkpoint_directory, where, full_disk)
        with pytest.raises(CheckpointWriteError, match=r"step 2.*No space left.*bytes are free.*keep_last"):
            session.checkpoint(2, counter=Counter(2))
    assert names(session) == ["checkpoint-1"]
    session.checkpoint(2, counter=Counter(2))
    assert names(session) == ["checkpoint-1", "checkpoint-2"]


def test_several_processes_need_torch_distributed(start: Callable[..., Session]) -> None:
    session = start(RANK="0", WORLD_SIZE="2")
    with pytest.raises(SessionError, match="not initialized"):
        session.checkpoint_due(1)


# --- artifacts -----------------------------------------------------------------------------------------------


def test_a_finished_file_is_shown_by_its_path_or_by_that_below_the_output_directory(tmp_path: Path) -> None:
    with ListeningAgent() as agent:
        variables = {"BATON_CHANNEL": agent.path, "BATON_OUTPUT_DIR": str(tmp_path / "out")}
        with Session.start(variables=variables) as session:
            (session.output_dir / "validation").mkdir()
            for name in ("step-1.png", "step-2.png"):
                (session.output_dir / "validation" / name).write_bytes(b"picture")
            session.artifact(session.output_dir / "validation" / "step-1.png")
            session.artifact("validation/step-2.png")
            shown = [message["path"] for message in agent.wait_for("artifact", 2)]
        assert shown == [str(tmp_path / "out" / "validation" / f"step-{number}.png") for number in (1, 2)]


@pytest.mark.parametrize("path", ["absent.png", "../secret.png", "folder", "", "link.png"])
def test_what_is_no_finished_file_of_the_output_directory_is_not_shown(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    with Session.start(output_dir=tmp_path / "out", variables={}) as session:
        (session.output_dir / "folder").mkdir()
        (session.output_dir / "link.png").symlink_to(tmp_path / "secret.png")
        with pytest.raises(SessionError, match="no file in the output directory"):
            session.artifact(path)


def test_only_the_first_process_shows_files(tmp_path: Path) -> None:
    with ListeningAgent() as agent:
        variables = {"BATON_CHANNEL": agent.path, "BATON_OUTPUT_DIR": str(tmp_path), "RANK": "1", "WORLD_SIZE": "2"}
        with Session.start(variables=variables) as session:
            (tmp_path / "a.png").write_bytes(b"x")
            session.artifact("a.png")
        assert agent.of("artifact") == []
