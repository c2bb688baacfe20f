"""Test slots, purging, the state file, a full disk."""

import errno
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from gpu_client.agent.workspace import slots as module
from gpu_client.agent.workspace.slots import AgentState, DiskFullError, Workspace, WorkspaceError, disk_errors
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from tests.unit.agent.agent_kit import make_manifest

JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"
OTHER_JOB = JOB.replace("1", "2")


def test_the_layout_of_an_attempt(tmp_path: Path) -> None:
    with Workspace.open(tmp_path / "new" / "root", "a") as space:
        job = space.prepare(JOB, 3)
        for directory in (job.data, job.output, job.staging):
            assert directory.is_dir()
            assert not list(directory.iterdir())
            assert directory.is_relative_to(space.slot)
        assert job.root.name == f"{JOB}.3"
        assert job.params.parent == job.root
        assert stat.S_IMODE(space.slot.stat().st_mode) == 0o700


def test_two_agents_get_different_slots_and_do_not_disturb_each_other(tmp_path: Path) -> None:
    with Workspace.open(tmp_path, "same-id") as first, Workspace.open(tmp_path, "same-id") as second:
        assert first.slot != second.slot
        kept = first.prepare(JOB, 1).output / "model"
        kept.write_text("weights")
        second.prepare(JOB, 1)
        second.purge()
        with Workspace.open(tmp_path, "third"):
            assert kept.read_text() == "weights"


def test_a_closed_slot_is_used_again(tmp_path: Path) -> None:
    first = Workspace.open(tmp_path, "a")
    slot = first.slot
    first.close()
    first.close()
    with Workspace.open(tmp_path, "b") as second:
        assert second.slot == slot


def test_a_crashed_agents_slot_is_taken_over_purged_and_its_state_told_once(tmp_path: Path) -> None:
    crashed = Workspace.open(tmp_path, "a")
    left = crashed.prepare(JOB, 7).data / "big"
    left.write_bytes(b"x" * 1000)
    crashed.write_state(JOB, 7, "training", 1_700_000_000)
    crashed.close()  # What the kernel does for a killed agent.

    with Workspace.open(tmp_path, "a") as again:
        assert not left.exists()
        assert again.take_previous_state() == AgentState("a", JOB, 7, "training", 1_700_000_000)
        assert again.take_previous_state() is None
    with Workspace.open(tmp_path, "a") as third:
        assert third.take_previous_state() is None


def test_an_agent_returns_to_the_slot_that_it_crashed_in(tmp_path: Path) -> None:
    first, second = Workspace.open(tmp_path, "a"), Workspace.open(tmp_path, "b")
    second.prepare(JOB, 2)
    second.write_state(JOB, 2, "uploading", 5)
    first.close()
    second.close()
    with Workspace.open(tmp_path, "b") as again:
        assert again.slot == second.slot
        previous = again.take_previous_state()
        assert previous is not None
        assert previous.phase == "uploading"


def test_the_disk_of_other_crashed_agents_is_freed_but_their_state_stays(tmp_path: Path) -> None:
    first, second = Workspace.open(tmp_path, "a"), Workspace.open(tmp_path, "b")
    left = second.prepare(JOB, 2).data / "big"
    left.write_text("x")
    second.write_state(JOB, 2, "training", 5)
    first.close()
    second.close()
    with Workspace.open(tmp_path, "c") as other:
        assert other.slot == first.slot
        assert not left.exists()
    with Workspace.open(tmp_path, "b") as again:
        assert again.take_previous_state() is not None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"agent_id": "a"}', "\x00" * 50, '{"agent_id":"a","epoch":"x"}'])
def test_a_damaged_state_is_no_state(tmp_path: Path, content: str) -> None:
    with Workspace.open(tmp_path, "a") as space:
        state = space.slot / "agent-state.json"
    state.write_text(content)
    with Workspace.open(tmp_path, "a") as again:
        assert again.take_previous_state() is None


def test_the_state_is_replaced_not_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Workspace.open(tmp_path, "a") as space:
        space.write_state(JOB, 1, "training", 5)

        def full(*_args: object, **_kwargs: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(json, "dump", full)
        with pytest.raises(DiskFullError):
            space.write_state(JOB, 1, "uploading", 6)
        monkeypatch.undo()
        state = json.loads((space.slot / "agent-state.json").read_text())
        assert state["phase"] == "training"
        assert not list(space.slot.glob(".state-*"))


def test_what_a_crash_left_of_a_state_is_removed(tmp_path: Path) -> None:
    with Workspace.open(tmp_path, "a") as space:
        (space.slot / ".state-xyz").write_text("half")
        space.purge()
        assert not list(space.slot.glob(".state-*"))


def test_purge_never_follows_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep")
    outside.chmod(0o555)
    with Workspace.open(tmp_path / "root", "a") as space:
        job = space.prepare(JOB, 1)
        (job.data / "link-to-directory").symlink_to(outside)
        (job.data / "link-to-file").symlink_to(outside / "precious")
        (job.data / "broken").symlink_to("/nowhere/at/all")
        (job.data / "loop").symlink_to(job.data)
        job.output.rmdir()
        job.output.symlink_to(outside)
        assert space.purge() == ()
        assert not job.root.exists()
        # Even if the trainer replaced our own directories.
        for name in ("jobs", "trash"):
            shutil.rmtree(space.slot / name)
            (space.slot / name).symlink_to(outside)
        assert space.purge() == ()
        assert not (space.slot / "jobs").is_symlink()
        assert list(space.prepare(JOB, 2).data.iterdir()) == []
    assert (outside / "precious").read_text() == "keep"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o555


def test_files_in_use_and_odd_names_are_removed(tmp_path: Path) -> None:
    with Workspace.open(tmp_path, "a") as space:
        job = space.prepare(JOB, 1)
        with (job.output / "held").open("wb") as held:
            (job.output / "sp ace\n€\x01").write_text("x")
            os.mkfifo(job.output / "pipe")
            deep = job.output.joinpath(*["d" * 100] * 20)
            deep.mkdir(parents=True)
            assert space.purge() == ()
            held.write(b"still works")
        assert not job.root.exists()


def test_what_cannot_be_removed_is_told_and_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Workspace.open(tmp_path, "a") as space:
        stubborn = space.prepare(JOB, 1).data / "file"
        stubborn.write_text("x")

        def refuse(*_args: object, **_kwargs: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "unlink", refuse)
        leftovers = space.purge()
        assert any(path.name == "file" for path in leftovers)
        assert list(space.prepare(JOB, 1).data.iterdir()) == []
        monkeypatch.undo()
        assert space.purge() == ()  # Tried again next time.


def test_jobs_that_cannot_be_moved_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_self: Path, _target: Path) -> Path:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with Workspace.open(tmp_path, "a") as space:
        monkeypatch.setattr(Path, "rename", busy)
        with pytest.raises(WorkspaceError, match="busy"):
            space.purge()


@pytest.mark.parametrize("job_id", ["", "../x", "a/b", ".", "a b", "x" * 200, "a\n"])
def test_a_job_id_is_not_a_path(tmp_path: Path, job_id: str) -> None:
    with Workspace.open(tmp_path, "a") as space:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match="job id"):
            space.prepare(job_id, 1)
        assert sorted(tmp_path.rglob("*")) == before


def test_free_space(tmp_path: Path) -> None:
    with Workspace.open(tmp_path, "a") as space:
        assert space.free_bytes() > 0
        space.require_free(1)
        with pytest.raises(DiskFullError) as caught:
            space.require_free(10**18)
        assert caught.value.needed_bytes == 10**18
        assert 0 < caught.value.free_bytes < 10**18


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_typed_error(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskFullError, match="disk full"), disk_errors(tmp_path / "not" / "there"):
        raise OSError(number, "full")


def test_other_disk_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_all_slots_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SLOTS", 1)
    with Workspace.open(tmp_path, "a"), pytest.raises(WorkspaceError, match="all 1 slots"):
        Workspace.open(tmp_path, "b")


def test_no_depth_of_directories_is_too_deep_to_remove(tmp_path: Path) -> None:
    """A job that left a thousand directories within each other ended every agent that ever started there again."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    with Workspace.open(tmp_path, "a") as space:
        job = space.prepare("job-1", 1)
        here = os.open(job.output, os.O_RDONLY)
        for _ in range(3000):  # its path is longer than the system takes
            os.mkdir("d", dir_fd=here)
            os.symlink(outside, "link", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        try:
            assert space.purge() == ()
            assert list((space.slot / "trash").iterdir()) == []
        finally:
            subprocess.run(["rm", "-rf", str(space.slot)], check=True)  # or pytest fails over it as well
    assert (outside / "kept").read_text() == "x"


class TestStores:
    """Files that outlive an attempt, and files that do not."""

    def keep(self, space: Workspace, job_id: str = JOB, *, step: int = 10) -> Path:
        """Make a committed checkpoint in the job's store."""
        staged = space.prepare(job_id, 1).staging / "checkpoint"
        staged.mkdir()
        (staged / "model").write_bytes(b"weights" * 10_000)
        LocalChunkCache(space.stores, job_id).record_committed(make_manifest(job_id, step, 1, staged), staged)
        return space.stores / job_id / f"{step}-1" / "files" / "model"

    def disk(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        usage = shutil._ntuple_diskusage(10**12, 0, free_bytes)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def test_a_store_outlives_the_attempt_the_agent_and_its_crash(self, tmp_path: Path) -> None:
        with Workspace.open(tmp_path, "a") as space:
            model = self.keep(space)
            space.purge()
            assert list((space.slot / "jobs").iterdir()) == []
        with Workspace.open(tmp_path, "a") as again:
            again.prepare(JOB, 2)
            assert model.read_bytes() == b"weights" * 10_000
            assert LocalChunkCache(again.stores, JOB).newest() is not None

    def test_a_finished_jobs_store_goes_and_others_stay(self, tmp_path: Path) -> None:
        with Workspace.open(tmp_path, "a") as space:
            model, other = self.keep(space), self.keep(space, OTHER_JOB)
            space.purge(finished=JOB)
            assert not model.exists()
            assert other.exists()

    def test_stores_give_way_oldest_first_and_the_next_jobs_own_last(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Workspace.open(tmp_path, "a") as space:
            self.disk(monkeypatch, 10**9)
            mine, other = self.keep(space), self.keep(space, OTHER_JOB)
            assert mine.exists()
            self.disk(monkeypatch, 300_000)
            space.prepare(JOB, 2)
            assert mine.exists()
            assert not other.exists()
            self.disk(monkeypatch, 1000)
            space.prepare(JOB, 3)
            assert list(space.stores.iterdir()) == []
            assert list((space.slot / "trash").iterdir()) == []

    def test_abandoned_slots_keep_no_more_than_their_share(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Workspace.open(tmp_path, "a"), Workspace.open(tmp_path, "b") as second:
            model = self.keep(second)
        with Workspace.open(tmp_path, "c"):
            assert model.exists()
        self.disk(monkeypatch, 1000)
        with Workspace.open(tmp_path, "c"):
            assert not model.exists()

    def test_what_a_job_puts_in_the_stores_place_is_removed_not_followed(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_text("keep")
        with Workspace.open(tmp_path / "root", "a") as space:
            shutil.rmtree(space.stores)
            space.stores.symlink_to(outside)
            space.prepare(JOB, 1)
            assert not space.stores.is_symlink()
            (space.stores / JOB).symlink_to(outside)
            (space.stores / "file").touch()
            deep = space.stores.joinpath(OTHER_JOB, *["d" * 100] * 20)
            deep.mkdir(parents=True)
            space.stores.chmod(0)
            space.prepare(JOB, 2)
            assert sorted(path.name for path in space.stores.iterdir()) == [OTHER_JOB]
        assert (outside / "precious").read_text() == "keep"

    def test_stores_give_way_to_what_a_job_needs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with Workspace.open(tmp_path, "a") as space:
            model = self.keep(space)

            def usage(_: object) -> object:
                return shutil._ntuple_diskusage(10**9, 0, 1 if model.exists() else 1000)  # type: ignore[attr-defined]

            monkeypatch.setattr(shutil, "disk_usage", usage)
            space.require_free(1)
            assert model.exists()
            space.require_free(1000)
            assert not model.exists()
            assert list((space.slot / "trash").iterdir()) == []
            with pytest.raises(DiskFullError, match="1000 bytes free, 1001 needed"):
                space.require_free(1001)
            assert LocalChunkCache(space.stores, JOB).newest() is None

    def test_stores_that_cannot_be_looked_through_stop_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object, **__: object) -> list[Path]:
            raise OSError(errno.EIO, "Input/output error")

        with Workspace.open(tmp_path, "a") as space:
            monkeypatch.setattr(module, "find_excess_caches", broken)
            assert space.prepare(JOB, 1).output.is_dir()
            assert space.purge() == ()
