"""From the output directory to the committer: what was found complete is not lost on the way."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from gpu_client.agent import harvest as module
from gpu_client.agent.committer import Staged
from gpu_client.agent.harvest import MAX_TAKES, Harvest
from gpu_client.agent.workspace import JobDirectories
from gpu_client.checkpoints.watch import CheckpointWatcher, ReadyCheckpoint, stage
from tests.unit.agent.agent_kit import Clock, make_item


class Committer:
    """Takes what it is offered."""

    def __init__(self) -> None:
        self.offered: list[int] = []

    def offer(self, staged: Staged) -> None:
        assert staged.path.is_dir()
        self.offered.append(staged.step)


class Trainer:
    def files_open_for_writing(self) -> set[Path]:
        return set()


class Scene:
    """A clock, an output directory, and a harvest of it."""

    def __init__(self, root: Path) -> None:
        data, output, staging = (root / name for name in ("data", "output", "staging"))
        output.mkdir()
        self.directories = JobDirectories(root, data, output, staging, root / "params.json")
        self.clock = Clock()
        self.committer = Committer()
        self.harvest = Harvest(self.directories, make_item(), 5.0, self.clock)

    def write(self, step: int, *, session: bool = False) -> Path:
        directory = self.directories.output / f"checkpoint-{step}"
        directory.mkdir()
        (directory / "weights").write_text(str(step))
        if session:
            (directory / "baton.json").write_text(json.dumps({"format": 1, "step": step, "metrics": {}}))
        return directory

    def gather(self, after_s: float = 1.0) -> None:
        self.clock.now += after_s
        self.harvest.gather(Trainer(), self.committer, now=True)  # type: ignore[arg-type]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_checkpoint_that_changes_while_it_is_taken_over_is_taken_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign script that wrote one more file at that moment lost the checkpoint: it was never looked at again."""
    directory = scene.write(20)
    scene.gather()

    def write_and_stage(ready: ReadyCheckpoint, staging: Path) -> Path:
        (directory / "optimizer").write_text("late")
        return stage(ready, staging)

    monkeypatch.setattr(module, "stage", write_and_stage)
    scene.gather(5)
    assert scene.committer.offered == []
    monkeypatch.undo()
    scene.gather(1)
    assert scene.committer.offered == [], "it has changed, so it has to settle again"
    scene.gather(5)
    assert scene.committer.offered == [20]


def test_a_disk_that_is_full_for_a_moment_does_not_cost_the_checkpoint(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.write(20, session=True)
    with monkeypatch.context() as patch:
        patch.setattr(module, "stage", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        scene.gather()
    scene.gather()
    assert scene.committer.offered == [20]


def test_what_can_never_be_taken_over_is_not_tried_for_ever(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    directory = scene.write(20, session=True)
    os.mkfifo(directory / "pipe")
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            scene.gather()
    assert scene.committer.offered == []
    refused = [record for record in caplog.records if "cannot be taken over" in record.getMessage()]
    assert len(refused) == MAX_TAKES


def test_trouble_with_one_directory_does_not_lose_another(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that had been found complete in the same look was noted as told, and told to nobody."""
    listed = CheckpointWatcher._directories
    monkeypatch.setattr(CheckpointWatcher, "_directories", lambda self: dict(sorted(listed(self).items())))
    scene.write(10, session=True)
    scene.write(20)
    scene.gather()
    scene.write(15, session=True)

    def broken(_self: Any) -> set[Path]:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "files_open_for_writing", broken)
        scene.gather(5)
    scene.gather()
    assert sorted(scene.committer.offered) == [10, 15, 20]
