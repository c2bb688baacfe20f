"""Test that a checkpoint that could not be staged or committed is tried again, or its loss is reported."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_client.agent.io.checkpoint_collector import MAX_STAGE_TRIES
from gpu_client.agent.io.committer import StagedCheckpoint
from gpu_client.agent.io.step_ledger import StepLedger
from gpu_client.checkpoints.local.directory_files import BadDirectory, resolve_files
from gpu_client.transport.errors import FileChanged
from gpu_client.transport.transfer.manager import Transfer
from tests.unit.agent.test_checkpoint_collector import Scene as PlainScene
from tests.unit.checkpoints.fake_cloud import FakeCloud
from tests.unit.transport.scripted_server import ScriptedServer


class Scene(PlainScene):
    """Collector with its log lines, and a cloud that takes its commits."""

    def __init__(self, root: Path, cloud: FakeCloud, transfer: Transfer) -> None:
        self.said: list[str] = []
        super().__init__(root, log_line=self.said.append)
        self.cloud = cloud
        self.transfer = transfer

    def finish(self, *, clean_exit: bool = True) -> None:
        self.harvest.collect_rest(self.committer, clean_exit=clean_exit)  # type: ignore[arg-type]

    def commit(self, staged: StagedCheckpoint) -> None:
        self.harvest.commit(self.cloud, self.transfer, staged, threading.Event())

    @property
    def last(self) -> StagedCheckpoint:
        return self.committer.staged[-1]

    def hold(self, how: str, step: int = 20) -> Path:
        """Write a checkpoint that the watcher keeps by its links while the script removes it or goes on."""
        directory = self.write(step)
        self.collect()
        self.collect()
        if how == "removed":
            shutil.rmtree(directory)
        else:
            self.write(step + 1)
        return directory


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    transfer = Transfer(workers=2, pause=lambda *_: None)
    with ScriptedServer() as server:
        yield Scene(tmp_path, FakeCloud(server), transfer)
    transfer.close()


def attach_to_a_full_disk(*_: object) -> bool:
    """Replace `StepLedger.attach_record` on a disk that cannot take the record of finished steps."""
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["removed", "superseded"])
def test_a_held_checkpoint_outlives_a_full_disk(scene: Scene, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held checkpoint whose record met a full disk is offered later, from the links to its files."""
    with monkeypatch.context() as patch:
        patch.setattr(StepLedger, "attach_record", attach_to_a_full_disk)
        scene.hold(how)
        scene.collect()
        scene.collect()
    assert scene.committer.offered == []
    scene.collect(5)
    assert scene.committer.offered[0] == 20
    assert (scene.committer.staged[0].path / "weights").read_text() == "20"
    scene.commit(scene.committer.staged[0])
    assert [manifest.step for manifest in scene.cloud.committed] == [20]


def test_a_held_checkpoint_is_tried_once_more_at_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StepLedger, "attach_record", attach_to_a_full_disk)
        scene.hold("removed")
        scene.collect()
    scene.finish(clean_exit=False)
    assert scene.committer.offered == [20]


@pytest.mark.parametrize("how", ["removed", "superseded", "settled"])
def test_what_is_never_taken_over_leaves_no_links_and_is_told(
    scene: Scene, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepLedger, "attach_record", attach_to_a_full_disk)
    if how == "settled":
        scene.write(20)
        scene.collect()
    else:
        scene.hold(how)
    for _ in range(2 * MAX_STAGE_TRIES):
        scene.collect(5)
    assert scene.committer.offered == []
    assert list(scene.directories.staging.glob("checkpoint-20-*")) == []
    told = [line for line in scene.said if "checkpoint-20" in line]
    assert told == [
        "[baton] checkpoint-20 is not stored, for it could not be taken over: [Errno 28] No space left on device"
    ]


def test_what_the_last_look_cannot_take_over_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLedger, "attach_record", attach_to_a_full_disk)
    scene.write(20)
    scene.finish()
    assert len(scene.said) == 1


def test_a_superseded_one_that_gets_another_file_before_its_commit_is_taken_again(scene: Scene) -> None:
    directory = scene.hold("superseded")
    scene.collect()
    (directory / "optimizer").write_text("late")
    with pytest.raises(FileChanged, match="optimizer was added"):
        scene.commit(scene.last)
    scene.last.discard()
    scene.collect()
    scene.collect(5)
    staged = {one.step: one for one in scene.committer.staged}[20]
    scene.commit(staged)
    assert [file.path for file in scene.cloud.committed[-1].files] == ["optimizer", "weights"]


def test_one_that_is_written_to_while_it_is_uploaded_is_told_and_left_alone(scene: Scene) -> None:
    """`weights` may be those of the next step by now: a second look would take a mixture."""
    directory = scene.write(20)
    (directory / "optimizer").write_text("20")
    scene.collect()
    scene.collect(5)
    upload = scene.transfer.upload

    def uploaded(*arguments: Any, **options: Any) -> None:
        upload(*arguments, **options)
        (directory / "weights").write_text("of the next step")

    scene.transfer.upload = uploaded  # type: ignore[method-assign]
    with pytest.raises(FileChanged):
        scene.commit(scene.last)
    (line,) = scene.said
    assert line.startswith("[baton] the checkpoint of step 20 is not stored: weights of the checkpoint in ")
    scene.collect()
    scene.collect(5)
    scene.finish()
    assert scene.committer.offered == [20]


def test_one_whose_end_comes_with_the_end_of_the_script_is_committed_whole(scene: Scene) -> None:
    """The last look offers a checkpoint again whose last file came with the end of the script."""
    directory = scene.write(20)
    scene.collect()
    scene.collect(5)
    (directory / "optimizer").write_text("late")
    scene.finish()
    assert scene.committer.offered == [20, 20]
    with pytest.raises(FileChanged):
        scene.commit(scene.committer.staged[0])
    scene.commit(scene.last)
    (manifest,) = scene.cloud.committed
    assert [file.path for file in manifest.files] == ["optimizer", "weights"]


def test_one_that_was_torn_by_a_crash_is_not(scene: Scene) -> None:
    directory = scene.write(20)
    scene.collect()
    scene.collect(5)
    (directory / "optimizer").write_text("la")
    scene.finish(clean_exit=False)
    assert scene.committer.offered == [20]


def test_one_that_was_committed_is_not_taken_again_at_the_end(scene: Scene) -> None:
    directory = scene.write(20)
    scene.collect()
    scene.collect(5)
    scene.commit(scene.last)
    (directory / "results.json").write_text("{}")
    scene.finish()
    assert scene.committer.offered == [20]


def test_a_step_that_begins_forgets_what_the_one_before_had_to_look_at_again(scene: Scene) -> None:
    directory = scene.write(20)
    scene.collect()
    scene.collect(5)
    (directory / "optimizer").write_text("late")
    with pytest.raises(FileChanged):
        scene.commit(scene.last)
    scene.harvest.begin(directory)
    scene.collect()
    scene.collect(5)
    assert scene.committer.offered == [20], "it is what the step resumed from"


def test_a_file_that_is_written_to_while_the_record_is_added_is_noticed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change while the record is added defers the checkpoint; the second list of files once hid such a change."""
    directory = scene.write(20)
    scene.collect()

    def attach(_ledger: object, taken: Path) -> bool:
        (directory / "weights").write_text("of the next step")
        (taken / "record").write_text("x")
        return True

    with monkeypatch.context() as patch:
        patch.setattr(StepLedger, "attach_record", attach)
        scene.collect(5)
    assert scene.committer.offered == []
    scene.collect()
    scene.collect(5)
    assert scene.committer.offered == [20]


def test_what_can_be_no_checkpoint_is_told(scene: Scene) -> None:
    directory = scene.write(20)
    (directory / os.fsdecode(b"\xff")).write_text("x")
    with pytest.raises(BadDirectory):
        resolve_files(directory)
    scene.collect()
    scene.collect(5)
    with pytest.raises(BadDirectory):
        scene.commit(scene.last)
    (line,) = scene.said
    assert line.startswith("[baton] the checkpoint of step 20 is not stored: ")
