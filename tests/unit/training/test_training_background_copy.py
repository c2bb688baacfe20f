"""Background copies equal the state at the call, bit for bit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from listening_agent import ListeningAgent
from session_helpers import give_back
from torch import nn

from baton import Session
from gpu_client.training.checkpoint import background_copy, checkpoint_directory

SIZE = 200  # square: more than what counts as small


class Gate:
    """Holds the copying thread until somebody waits for it (or the test opens)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.fail: Exception | None = None
        wait, run = background_copy.BackgroundCopy.wait, background_copy._Copy.run

        def waiting(copy: background_copy.BackgroundCopy) -> None:
            self.opened.set()
            wait(copy)

        def running(copy: background_copy._Copy) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.opened.wait(20)
                if self.fail:
                    raise self.fail
            run(copy)

        monkeypatch.setattr(background_copy.BackgroundCopy, "wait", waiting)
        monkeypatch.setattr(background_copy._Copy, "run", running)


class Scene:
    """A model with an optimizer, an average of it, and buffers; and a session under an agent."""

    def __init__(self, session: Session, agent: ListeningAgent, root: Path) -> None:
        torch.manual_seed(0)
        self.session = session
        self.agent = agent
        self.root = root
        self.place = root / "checkpoint"
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))
        self.model.register_buffer("large", torch.zeros(SIZE, SIZE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.average = torch.optim.swa_utils.AveragedModel(nn.Linear(SIZE, SIZE))
        self.named = {"model": self.model, "optimizer": self.optimizer, "average": self.average}
        self.step()

    def step(self) -> None:
        self.model(torch.randn(4, SIZE)).square().sum().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        found |= {f"average.{key}": value for key, value in self.average.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        return {key: value.clone() for key, value in found.items()}

    def stored(self, place: Path | None = None) -> dict[str, torch.Tensor]:
        other = Scene(self.session, self.agent, self.root)
        variables = {"BATON_OUTPUT_DIR": str(self.root / "x"), "BATON_RESUME_FROM": str(place or self.place)}
        with Session.start(variables=variables) as session:
            session.resume(**other.named)
        return other.tensors()


@pytest.fixture
def scene(start: Callable[..., Session], tmp_path: Path) -> Iterator[Scene]:
    (tmp_path / "arena").mkdir()
    with ListeningAgent() as agent:
        yield Scene(start(agent, BATON_ARENA=str(tmp_path / "arena")), agent, tmp_path / "arena")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def test_a_script_that_steps_at_once_does_not_disturb_the_copy(scene: Scene, gate: Gate) -> None:
    expected = scene.tensors()
    assert scene.session.checkpoint(1, overlap=True, **scene.named) == scene.place
    assert not (scene.place / "baton.json").exists(), "it is not complete yet"
    assert not gate.opened.is_set(), "the call has waited for the copy"
    scene.step()
    assert gate.opened.is_set()
    assert scene.agent.wait_for("checkpoint")[0]["step"] == 1
    assert same(scene.stored(), expected)
    assert not same(scene.tensors(), expected)
    assert scene.optimizer._optimizer_step_pre_hooks == {}, "later steps do not wait"


def test_what_no_optimizer_holds_is_copied_at_once(scene: Scene, gate: Gate) -> None:
    expected = scene.tensors()
    scene.session.checkpoint(1, overlap=True, **scene.named)
    with torch.no_grad():
        scene.model.get_buffer("large").fill_(7)
        scene.model[1].running_mean.fill_(7)  # type: ignore[union-attr, operator]
        for parameter in scene.average.parameters():
            parameter.fill_(7)
    scene.step()
    assert same(scene.stored(), expected)


def test_without_an_optimizer_everything_is(scene: Scene, gate: Gate) -> None:
    expected = scene.model.state_dict()["0.weight"].clone()
    scene.session.checkpoint(1, overlap=True, model=scene.model)
    assert checkpoint_directory.verify(scene.place).step == 1, "nobody could be made to wait"
    assert not gate.opened.is_set()
    assert torch.equal(scene.model.state_dict()["0.weight"], expected)


def test_closing_waits_and_tells(scene: Scene, gate: Gate) -> None:
    expected = scene.tensors()
    scene.session.checkpoint(1, overlap=True, **scene.named)
    scene.session.close()
    assert same(scene.stored(), expected)
    assert scene.agent.wait_for("checkpoint")[0]["step"] == 1


def test_the_next_checkpoint_is_not_due_while_the_last_is_being_copied(scene: Scene, gate: Gate) -> None:
    scene.session.checkpoint(1, overlap=True, **scene.named)
    assert not scene.session.checkpoint_due(2, every=1)
    assert scene.session.skipped_checkpoints == [2]
    scene.step()
    assert not scene.session.checkpoint_due(3, every=1), "copied, but the agent's"
    give_back(scene.root)
    assert scene.session.checkpoint_due(4)
    assert scene.session.checkpoint(4, overlap=True, **scene.named) == scene.place
    scene.session._writer.settle()
    assert checkpoint_directory.verify(scene.place).step == 4


def test_one_that_must_be_is_complete_when_the_call_returns(scene: Scene, gate: Gate) -> None:
    scene.session.checkpoint(1, overlap=True, must=True, **scene.named)
    assert checkpoint_directory.verify(scene.place).step == 1


def test_a_copy_that_fails_is_no_checkpoint_and_the_training_goes_on(
    scene: Scene, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.fail = RuntimeError("device lost")
    scene.session.checkpoint(1, overlap=True, **scene.named)
    scene.step()
    gate.fail = None
    with caplog.at_level(logging.ERROR):
        assert scene.session.checkpoint_due(2), "a newer one is owed"
        assert scene.session.checkpoint(2, overlap=True, **scene.named) == scene.place
    assert "step 1 is lost" in caplog.text and "device lost" in caplog.text
    scene.session.close()
    assert checkpoint_directory.verify(scene.place).step == 2
    assert [message["step"] for message in scene.agent.wait_for("checkpoint")] == [2]
