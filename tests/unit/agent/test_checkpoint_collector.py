"""Test the way from the output directory to the committer: no complete checkpoint is lost."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_client.agent.io import checkpoint_collector as module
from gpu_client.agent.io.checkpoint_collector import MAX_STAGE_TRIES, CheckpointCollector
from gpu_client.agent.io.committer import Committer as RealCommitter
from gpu_client.agent.io.committer import StagedCheckpoint
from gpu_client.agent.workspace.slots import JobDirectories
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.local.foreign_checkpoint_watcher import CheckpointWatcher
from gpu_client.checkpoints.local.staging import ReadyCheckpoint, stage
from gpu_client.transport.errors import ChecksumMismatch, FileChanged, Unreachable
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import JOB_ID, make_item
from tests.unit.checkpoints.fake_cloud import TOKEN, FakeCloud
from tests.unit.transport.scripted_server import ScriptedServer


class Committer:
    """Records the offered checkpoints."""

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.staged: list[StagedCheckpoint] = []

    def offer(self, staged: StagedCheckpoint) -> None:
        assert staged.path.is_dir()
        self.staged.append(staged)
        self.offered.append(staged.step)


class Trainer:
    def files_open_for_writing(self) -> set[Path]:
        return set()


class Scene:
    """Clock, output directory, and their collector."""

    def __init__(self, root: Path, **more: Any) -> None:
        data, output, staging = (root / name for name in ("data", "output", "staging"))
        output.mkdir()
        self.directories = JobDirectories(root, data, output, staging, root / "params.json")
        self.clock = Clock()
        self.committer = Committer()
        self.store = LocalChunkCache(root / "store", JOB_ID)
        self.harvest = CheckpointCollector(
            self.directories, make_item(lease_token=TOKEN), 5.0, self.store, self.clock, **more
        )
        # Resumed from a checkpoint without files: no name is missing from later ones.
        restored = output / "checkpoint-0"
        restored.mkdir()
        self.harvest.begin(restored)

    def write(self, step: int, *, session: bool = False) -> Path:
        directory = self.directories.output / f"checkpoint-{step}"
        directory.mkdir()
        (directory / "weights").write_text(str(step))
        if session:
            (directory / "baton.json").write_text(json.dumps({"format": 2, "step": step, "metrics": {}}))
        return directory

    def collect(self, after_s: float = 1.0) -> None:
        self.clock.now += after_s
        self.harvest.collect(Trainer(), self.committer, now=True)  # type: ignore[arg-type]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_checkpoint_that_changes_while_it_is_taken_over_is_taken_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign script that wrote one more file at that moment lost the checkpoint: it was never looked at again."""
    directory = scene.write(20)
    scene.collect()

    def write_and_stage(ready: ReadyCheckpoint, staging: Path) -> ReadyCheckpoint:
        (directory / "optimizer").write_text("late")
        return stage(ready, staging)

    monkeypatch.setattr(module, "stage", write_and_stage)
    scene.collect(5)
    assert scene.committer.offered == []
    monkeypatch.undo()
    scene.collect(1)
    assert scene.committer.offered == [], "it has changed, so it has to settle again"
    scene.collect(5)
    assert scene.committer.offered == [20]


def test_a_disk_that_is_full_for_a_moment_does_not_cost_the_checkpoint(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.write(20, session=True)
    with monkeypatch.context() as patch:
        patch.setattr(module, "stage", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        scene.collect()
    scene.collect()
    assert scene.committer.offered == [20]


def test_what_can_never_be_taken_over_is_not_tried_for_ever(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    directory = scene.write(20, session=True)
    os.mkfifo(directory / "pipe")
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            scene.collect()
    assert scene.committer.offered == []
    refused = [record for record in caplog.records if "cannot be staged" in record.getMessage()]
    assert len(refused) == MAX_STAGE_TRIES


def test_trouble_with_one_directory_does_not_lose_another(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that completes in the same pass is announced, too."""
    listed = CheckpointWatcher._directories
    monkeypatch.setattr(CheckpointWatcher, "_directories", lambda self: dict(sorted(listed(self).items())))
    scene.write(10, session=True)
    scene.write(20)
    scene.collect()
    scene.write(15, session=True)

    def broken(_self: Any) -> set[Path]:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "files_open_for_writing", broken)
        scene.collect(5)
    scene.collect()
    assert sorted(scene.committer.offered) == [10, 15, 20]


def test_what_a_script_deletes_too_soon_is_said_in_the_job_s_log(tmp_path: Path) -> None:
    said: list[str] = []
    scene = Scene(tmp_path, log_line=said.append)
    for step in range(1, 6):
        directory = scene.write(step)
        os.mkfifo(directory / "pipe")  # which no link can hold
        scene.collect()
        shutil.rmtree(directory)
        scene.collect()
    assert scene.committer.offered == []
    assert scene.harvest.missed == 5
    assert [line.split()[1] for line in said] == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]
    scene.harvest.begin(None)
    assert scene.harvest.missed == 5, "of the attempt"


@pytest.mark.parametrize(("state", "told"), [('{"max_steps": 3000}', [3000]), ('{"max_steps": -1}', []), ("{}", [])])
def test_the_trainer_s_state_tells_the_last_step(tmp_path: Path, state: str, told: list[int]) -> None:
    """The job showed `20 of ?`."""
    totals: list[int] = []
    scene = Scene(tmp_path, on_total=totals.append)
    (scene.write(20) / "trainer_state.json").write_text(state)
    scene.collect()
    scene.collect(5)
    assert scene.committer.offered == [20]
    assert totals == told
    scene.harvest.begin(scene.directories.output / "checkpoint-20")
    assert totals == told * 2, "known as soon as a step resumes"


class TestCommitting:
    """A staged checkpoint is committed whole or not at all, never as a mixture."""

    @pytest.fixture
    def cloud(self) -> Iterator[FakeCloud]:
        with ScriptedServer() as server:
            yield FakeCloud(server)

    @pytest.fixture
    def transfer(self) -> Iterator[Transfer]:
        made = Transfer(workers=2, pause=lambda *_: None)
        yield made
        made.close()

    def stage(self, scene: Scene, step: int = 20, size_bytes: int = 1000) -> tuple[Path, StagedCheckpoint]:
        """A foreign script's checkpoint of two files, and how it was taken over."""
        directory = scene.directories.output / f"checkpoint-{step}"
        directory.mkdir()
        (directory / "model").write_bytes(random.Random("frozen").randbytes(size_bytes))
        (directory / "optimizer").write_bytes(random.Random(step).randbytes(size_bytes))
        scene.collect()
        scene.collect(5)
        return directory, scene.committer.staged[-1]

    def commit(self, scene: Scene, cloud: FakeCloud, transfer: Transfer, staged: StagedCheckpoint) -> None:
        scene.harvest.commit(cloud, transfer, staged, threading.Event())

    @pytest.mark.parametrize(
        ("said", "expected"),
        [("good", "good"), ("", ""), (None, ""), (7, ""), ("x" * 65, ""), ("a\nb", ""), ("\ud800", "")],
    )
    def test_its_tag_goes_with_it_if_it_can_be_one(
        self, scene: Scene, cloud: FakeCloud, transfer: Transfer, said: object, expected: str
    ) -> None:
        directory = scene.write(4)
        marker = {"format": 2, "step": 4, "metrics": {}, **({} if said is None else {"tag": said})}
        (directory / "baton.json").write_text(json.dumps(marker))
        scene.collect()
        (staged,) = scene.committer.staged
        assert staged.tag == expected
        self.commit(scene, cloud, transfer, staged)
        (manifest,) = cloud.committed
        assert manifest.tag == expected
        assert (b'"tag"' in manifest.canonical_bytes()) == bool(expected), "without one it is named as it was"

    def test_one_that_gets_another_file_before_its_commit_is_taken_again(
        self, scene: Scene, cloud: FakeCloud, transfer: Transfer
    ) -> None:
        """The first of an attempt, written with a pause, was committed without its end."""
        directory, staged = self.stage(scene)
        (directory / "scheduler").write_text("late")
        with pytest.raises(FileChanged, match="scheduler was added"):
            self.commit(scene, cloud, transfer, staged)
        assert cloud.committed == []
        scene.collect()
        scene.collect(5)
        shutil.rmtree(directory)  # being gone is no change
        self.commit(scene, cloud, transfer, scene.committer.staged[-1])
        (manifest,) = cloud.committed
        assert [file.path for file in manifest.files] == ["model", "optimizer", "scheduler"]

    def test_a_committed_one_goes_into_the_store(self, scene: Scene, cloud: FakeCloud, transfer: Transfer) -> None:
        _, staged = self.stage(scene)
        self.commit(scene, cloud, transfer, staged)
        assert not staged.path.exists()
        found = scene.store.newest()
        assert found is not None
        manifest, directory = found
        assert [manifest] == cloud.committed == list(scene.store.manifests)
        assert (directory / "model").read_bytes() == random.Random("frozen").randbytes(1000)

    @pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("a bug")], ids=repr)
    @pytest.mark.parametrize("where", ["store", "report"])
    def test_what_fails_behind_the_commit_does_not_undo_it(
        self, tmp_path: Path, cloud: FakeCloud, transfer: Transfer, error: Exception, where: str
    ) -> None:
        """A checkpoint counts as committed although a step after its commit fails; it counted as skipped before."""
        reported: list[int] = []

        def fails(*_: object, **__: object) -> None:
            raise error

        scene = Scene(
            tmp_path, on_committed=fails if where == "report" else lambda result: reported.append(result.step)
        )
        if where == "store":
            scene.store.committed = fails  # type: ignore[method-assign]
        _, staged = self.stage(scene)
        committer = RealCommitter(
            lambda one, _: self.commit(scene, cloud, transfer, one),
            lambda: True,
            on_lost=pytest.fail,
            over=threading.Event(),
        )
        committer.offer(staged)
        assert committer.drain()
        committer.close()
        assert (committer.committed_steps, committer.skipped_steps, committer.last_error) == ([20], [], None)
        assert [manifest.step for manifest in cloud.committed] == [20]
        assert reported == ([20] if where == "store" else [])

    def test_what_was_committed_before_is_not_sent_again(
        self, scene: Scene, cloud: FakeCloud, transfer: Transfer
    ) -> None:
        _, first = self.stage(scene, 20, 100_000)
        self.commit(scene, cloud, transfer, first)
        _, second = self.stage(scene, 30, 100_000)
        self.commit(scene, cloud, transfer, second)
        sent = [len(request.body) for request in cloud.store.seen if request.method == "PUT"]
        assert sent == [200_000, 100_000], "what has changed alone"
        assert [manifest.step for manifest in cloud.committed] == [20, 30]

    def test_one_in_memory_is_copied_for_a_slow_line_and_not_for_a_fast_one(
        self, scene: Scene, cloud: FakeCloud, transfer: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arena = tmp_path / "arena"
        arena.mkdir()
        (arena / "model").write_bytes(b"first")
        for step, speed, kept in ((10, None, 10), (20, 1e6, 20), (30, 1e9, 20)):
            monkeypatch.setattr(transfer.speed, "upload_bytes_per_s", lambda speed=speed: speed)
            (arena / "model").write_bytes(b"%d" % step)
            self.commit(scene, cloud, transfer, StagedCheckpoint(step, arena, {}, "session", release=lambda: None))
            assert (arena / "model").read_bytes() == b"%d" % step, "it stays where it is"
            found = scene.store.newest()
            assert found is not None
            assert (found[0].step, (found[1] / "model").read_bytes()) == (kept, b"%d" % kept)

    def test_a_repeated_commit_is_made_as_the_first_try(
        self, scene: Scene, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A repeated commit uses the speed and codecs of the first try: other packs would be stored twice."""
        speeds = iter([1e6, 2e6, 3e6])
        seen: list[float | None] = []

        def fails(*_: object, upload_bytes_per_s: float | None, **__: object) -> None:
            seen.append(upload_bytes_per_s)
            raise Unreachable("down")

        monkeypatch.setattr(module, "commit_checkpoint", fails)
        monkeypatch.setattr(transfer.speed, "upload_bytes_per_s", lambda: next(speeds))
        _, staged = self.stage(scene)
        _, newer = self.stage(scene, 30)
        for one in (staged, staged, newer):
            with pytest.raises(Unreachable):
                self.commit(scene, None, transfer, one)  # type: ignore[arg-type]
        assert seen == [1e6, 1e6, 2e6]

    @pytest.mark.parametrize("when", ["before", "between hashing and upload", "after the upload"])
    @pytest.mark.parametrize("same_size", [True, False])
    def test_a_script_that_writes_into_its_former_checkpoint_commits_no_mixture(
        self, scene: Scene, cloud: FakeCloud, transfer: Transfer, when: str, same_size: bool
    ) -> None:
        """A link does not protect from that. `optimizer` is of the next step while `model` is still of this one."""
        directory, staged = self.stage(scene, 20, 200_000)

        def write() -> None:
            with (directory / "optimizer").open("r+b") as file:
                file.write(b"n" * (200_000 if same_size else 300_000))

        commits: list[int] = []
        commit = cloud.commit

        def posted(lease_token: str, manifest: Any) -> Any:
            commits.append(manifest.step)
            if when == "after the upload" and len(commits) == 2:
                pytest.fail("said to be complete")
            answer = commit(lease_token, manifest)
            if when == "between hashing and upload":
                write()
            return answer

        cloud.commit = posted  # type: ignore[method-assign]
        if when == "before":
            write()
        elif when == "after the upload":
            upload = transfer.upload

            def uploaded(*arguments: Any, **options: Any) -> None:
                upload(*arguments, **options)
                write()

            transfer.upload = uploaded  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises((FileChanged, ChecksumMismatch)):
                self.commit(scene, cloud, transfer, staged)
        assert cloud.committed == []
        assert scene.store.newest() is None
        assert len(commits) <= 1, "once it has changed, nothing more is said of it"
