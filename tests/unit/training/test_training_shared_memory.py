"""Checkpoints staged in shared memory: ownership, skipped checkpoints, and the fallback to disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from listening_agent import ListeningAgent
from session_helpers import Counter, give_back, names
from torch import nn

from baton import CheckpointWriteError, Session
from gpu_client.training.checkpoint import checkpoint_directory, shared_memory
from tests.kits.waiting import soon


class Scene:
    """A session under an agent that offers shared memory."""

    def __init__(self, start: Callable[..., Session], agent: ListeningAgent, root: Path) -> None:
        self.root = root
        self.agent = agent
        self.place = root / "checkpoint"
        self.session = start(agent, BATON_ARENA=str(root))
        self.model = nn.Linear(100, 50)

    def checkpoint(self, step: int, **more: Any) -> Path | None:
        nn.init.constant_(self.model.weight, step)
        return self.session.checkpoint(step, model=self.model, counter=Counter(step), **more)

    def staged_step(self) -> int:
        """The step of the checkpoint in the shared_memory, which has to be whole and of that step everywhere."""
        marker = checkpoint_directory.verify(self.place)
        model, counter = nn.Linear(100, 50), Counter()
        variables = {"BATON_OUTPUT_DIR": str(self.root / "elsewhere"), "BATON_RESUME_FROM": str(self.place)}
        with Session.start(variables=variables) as session:
            assert session.resume(model=model, counter=counter) == marker.step
        assert (model.weight == marker.step).all() and counter.value == marker.step
        return marker.step


@pytest.fixture
def scene(start: Callable[..., Session], tmp_path: Path) -> Iterator[Scene]:
    (tmp_path / "arena").mkdir()
    with ListeningAgent() as agent:
        yield Scene(start, agent, tmp_path / "arena")


def test_a_staged_checkpoint_is_complete_and_the_agent_is_told(scene: Scene) -> None:
    scene.session.report(5, 10, loss=0.5)
    assert scene.checkpoint(5) == scene.place
    (message,) = scene.agent.wait_for("checkpoint")
    assert message.pop("stall_s") >= 0
    assert message == {"type": "checkpoint", "step": 5, "path": str(scene.place), "metrics": {"loss": 0.5}}
    assert scene.staged_step() == 5
    marker = json.loads((scene.place / "baton.json").read_text())
    assert (marker["format"], marker["step"], marker["metrics"]) == (2, 5, {"loss": 0.5})
    assert set(marker["files"]) == {"model.safetensors", "state.pt"}
    assert "blake3" not in marker["files"]["model.safetensors"], "digests are the agent's to take"
    assert names(scene.session) == [], "nothing is written to disk"


def test_the_memory_is_used_again_and_readers_can_tell(scene: Scene) -> None:
    scene.checkpoint(1)
    file = scene.place / "model.safetensors"
    os.utime(file, ns=(1, 1))
    size_bytes = sum(path.stat().st_size for path in scene.place.iterdir())
    with file.open() as opened:  # so that its number is not given to another file
        before = os.fstat(opened.fileno())
        for step in (2, 3):
            give_back(scene.root)
            scene.checkpoint(step)
        after = file.stat()
    assert after.st_ino == before.st_ino, "fresh memory costs more than the copy"
    assert after.st_mtime_ns > before.st_mtime_ns
    assert abs(sum(path.stat().st_size for path in scene.place.iterdir()) - size_bytes) < 100
    assert scene.staged_step() == 3


def test_another_layout_gets_other_memory(scene: Scene) -> None:
    scene.checkpoint(1)
    give_back(scene.root)
    scene.model = nn.Linear(100, 50).bfloat16()
    assert scene.checkpoint(2) == scene.place
    assert checkpoint_directory.verify(scene.place).files["model.safetensors"][0] < 12_000
    give_back(scene.root)
    scene.session.checkpoint(3, other=nn.Linear(7, 7), counter=Counter(2))
    assert sorted(path.name for path in scene.place.iterdir()) == ["baton.json", "other.safetensors", "state.pt"]
    give_back(scene.root)
    scene.model = nn.Linear(100, 50)
    assert scene.checkpoint(4) == scene.place
    assert scene.staged_step() == 4


def test_what_is_due_while_the_agent_stores_the_last_one_is_skipped_and_made_up_for(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    session = scene.session
    taken = []
    with caplog.at_level(logging.INFO, "baton.training"):
        for step in range(1, 14):
            session.report(step, 100)
            if session.checkpoint_due(step, every=3):
                scene.checkpoint(step)
                taken.append(step)
            if step in (3, 10):
                assert scene.staged_step() == 3, "it is the agent's"
            if step == 10:
                give_back(scene.root)
    assert taken == [3, 11], "the first step after the arena was given back"
    assert session.skipped_checkpoints == [6, 9, 12]
    assert "step 6" in caplog.text and "step 12" in caplog.text
    session.report(100, 100)
    soon(lambda: any(message["step"] == 100 for message in scene.agent.of("progress")))
    assert scene.agent.of("progress")[-1]["metrics"]["checkpoints_skipped"] == 3


def test_a_loop_that_does_not_ask_is_told_that_nothing_was_written(scene: Scene) -> None:
    assert scene.checkpoint(1) == scene.place
    assert scene.checkpoint(2) is None
    assert scene.session.skipped_checkpoints == [2]
    assert scene.staged_step() == 1
    give_back(scene.root)
    assert scene.session.checkpoint_due(3), "a newer one is owed"
    assert scene.checkpoint(3) == scene.place
    assert not scene.session.checkpoint_due(4)


def test_a_wish_of_the_agent_waits_for_the_arena(scene: Scene) -> None:
    scene.checkpoint(1)
    scene.agent.send({"type": "directive", "directive": "checkpoint"})
    soon(lambda: scene.session._loop_requests._checkpoint_requested)
    assert not scene.session.checkpoint_due(2)
    assert scene.session.skipped_checkpoints == [], "no step was due by itself"
    give_back(scene.root)
    assert scene.session.checkpoint_due(3)
    scene.checkpoint(3)
    assert not scene.session.checkpoint_due(4)


def test_the_last_checkpoint_before_a_stop_goes_to_disk_if_it_has_to(scene: Scene) -> None:
    scene.checkpoint(1)
    scene.agent.send({"type": "directive", "directive": "stop", "reason": "pause", "checkpoint": True})
    soon(lambda: scene.session._loop_requests._stop is not None)
    assert scene.session.checkpoint_due(2)
    assert scene.checkpoint(2) == scene.session.output_dir / "checkpoint-2"
    assert scene.session.should_stop
    assert [message["step"] for message in scene.agent.wait_for("checkpoint", 2)] == [1, 2]
    assert checkpoint_directory.verify(scene.session.output_dir / "checkpoint-2").files["model.safetensors"][1], (
        "with digests"
    )
    assert scene.staged_step() == 1, "the agent goes on reading it"


def test_so_does_the_one_after_the_last_step_and_one_that_must_be(scene: Scene) -> None:
    scene.checkpoint(1)
    assert scene.checkpoint(2, must=True) == scene.session.output_dir / "checkpoint-2"
    scene.session.report(9, 10)
    assert not scene.session.checkpoint_due(9, every=1)
    scene.session.report(10, 10)
    assert scene.session.checkpoint_due(10, every=10)
    assert scene.checkpoint(10) == scene.session.output_dir / "checkpoint-10"
    give_back(scene.root)
    assert scene.checkpoint(11, must=True) == scene.place, "there is room again"


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("lacking", ["what the file system says", "what it gives", "memory"])
def test_where_it_does_not_fit_it_goes_to_disk_and_says_so_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    with monkeypatch.context() as patch:
        if lacking == "what it gives":
            patch.setattr(os, "posix_fallocate", no_space)
        elif lacking == "memory":
            patch.setattr(shared_memory, "read_available_bytes", lambda: shared_memory.RESERVED_FREE_BYTES + 20_000)
        else:
            patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=4, f_frsize=4096))
        for step in (1, 2):
            assert scene.checkpoint(step) == scene.session.output_dir / f"checkpoint-{step}"
            assert checkpoint_directory.verify(scene.session.output_dir / f"checkpoint-{step}").step == step
    assert [record.getMessage()[:24] for record in caplog.records] == ["checkpoints go to disk: "]
    assert list(scene.place.iterdir()) == [], "nothing of it is left in memory"
    assert scene.checkpoint(3) == scene.place
    assert scene.staged_step() == 3


def test_of_a_state_that_fits_in_part_nothing_stays(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, calls = os.posix_fallocate, iter([None, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])

    def second_fails(*arguments: int) -> None:
        if error := next(calls):
            raise error
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", second_fails)
    assert scene.checkpoint(1, more=nn.Linear(50, 50)) == scene.session.output_dir / "checkpoint-1"
    assert list(scene.place.iterdir()) == []


def test_a_full_arena_while_the_rest_is_written_is_no_loss(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(bundle: object, path: Path) -> None:
        if path.parent == scene.place:
            no_space()
        torch_save(bundle, path)

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", save)
    assert scene.checkpoint(1) == scene.session.output_dir / "checkpoint-1"
    assert not (scene.place / "baton.json").exists()


def test_without_an_agent_there_is_no_one_to_read_it(scene: Scene) -> None:
    scene.agent.die()
    soon(lambda: not scene.session._channel.connected)
    assert scene.session.checkpoint_due(1, every=1)
    assert scene.checkpoint(1) == scene.session.output_dir / "checkpoint-1"


def test_an_arena_that_is_gone_is_no_loss(scene: Scene) -> None:
    shutil.rmtree(scene.root)
    assert scene.checkpoint(1) == scene.session.output_dir / "checkpoint-1"
    assert not scene.root.exists()


def test_what_a_library_writes_itself_goes_to_disk(scene: Scene) -> None:
    class Library:
        def save_state(self, directory: str) -> None:
            Path(directory).mkdir()
            (Path(directory) / "text").write_text("stored")

        def load_state(self, directory: str) -> None: ...

    assert scene.session.checkpoint(1, library=Library()) == scene.session.output_dir / "checkpoint-1"


def test_a_state_that_is_refused_leaves_no_checkpoint(scene: Scene) -> None:
    scene.checkpoint(1)
    give_back(scene.root)
    with pytest.raises(CheckpointWriteError, match="no state_dict"):
        scene.session.checkpoint(2, model=scene.model, thing=object())
    with pytest.raises(CheckpointWriteError, match="plain data"):
        scene.session.checkpoint(2, model=scene.model, counter=Counter(Path("x")))  # type: ignore[arg-type]
    assert not (scene.place / "baton.json").exists()
    assert scene.checkpoint(3) == scene.place
    assert scene.staged_step() == 3


def test_a_process_that_follows_another_leaves_the_agents_turn_alone(
    scene: Scene, start: Callable[..., Session]
) -> None:
    scene.checkpoint(1)
    (scene.place / "left.safetensors").write_bytes(b"of another layout")
    scene.session.close()
    with ListeningAgent() as agent:
        scene.session = start(agent, BATON_ARENA=str(scene.root))
        assert scene.checkpoint(2) is None
        assert scene.staged_step.__self__ is scene  # the file that does not belong there is not looked at
        give_back(scene.root)
        assert scene.checkpoint(3) == scene.place
        assert scene.staged_step() == 3
        assert not (scene.place / "left.safetensors").exists()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:     100 kB\n"}, 102_400),
        ({"meminfo": "MemAvailable: 100 kB\n", "memory.max": "max\n", "memory.current": "5\n"}, 102_400),
        ({"meminfo": "MemAvailable: 100 kB\n", "memory.max": "50000\n", "memory.current": "20000\n"}, 30_000),
        ({"memory.max": "50", "memory.current": "40", "memory.stat": "anon 3\ninactive_file 20\n"}, 30),
        ({"memory.max": "50", "memory.current": "60"}, 0),
        ({}, None),
    ],
)
def test_memory_is_what_machine_and_control_group_leave(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert shared_memory.read_available_bytes(tmp_path / "meminfo", tmp_path) == expected
