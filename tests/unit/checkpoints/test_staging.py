"""Staging of a complete checkpoint, so that no script can delete it or change it unnoticed."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpu_client.checkpoints.local import foreign_checkpoint_watcher
from gpu_client.checkpoints.local.staging import ReadyCheckpoint, StagingError, require_unchanged, stage
from gpu_client.transport.errors import FileChanged
from tests.unit.checkpoints.watcher_kit import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def found_in(scene: Scene, name: str = "checkpoint-20") -> ReadyCheckpoint:
    directory = scene.session(name, step=int(name.rpartition("-")[2]))
    (directory / "unet").mkdir()
    (directory / "unet" / "w").write_text("deep")
    (found,) = scene.ready()
    return found


def test_staged_files_survive_rotation(scene: Scene, tmp_path: Path) -> None:
    found = found_in(scene)
    staged = stage(found, tmp_path / "staging").path
    assert (staged / "model").samefile(found.path / "model")  # A link: no time, no space.
    shutil.rmtree(found.path)
    assert (staged / "model").read_text() == "weights"
    assert (staged / "unet" / "w").read_text() == "deep"
    assert [file.path for file in foreign_checkpoint_watcher.list_files(staged)] == [file.path for file in found.files]
    assert list((tmp_path / "staging").iterdir()) == [staged]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_links_are_impossible_files_are_copied(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def impossible(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, "no")

    found = found_in(scene)
    monkeypatch.setattr(os, "link", impossible)
    staged = stage(found, tmp_path / "staging").path
    assert not (staged / "model").samefile(found.path / "model")
    assert (staged / "unet" / "w").read_text() == "deep"


def test_a_full_disk_while_staging_is_an_error_and_leaves_nothing(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    found = found_in(scene)
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space"):
        stage(found, tmp_path / "staging")
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("what", ["all", "one", "changed", "added"])
def test_a_checkpoint_that_changed_since_is_not_staged_in_part(scene: Scene, tmp_path: Path, what: str) -> None:
    found = found_in(scene)
    if what == "all":
        shutil.rmtree(found.path)
    elif what == "one":
        (found.path / "model").unlink()
    elif what == "changed":
        (found.path / "model").write_text("others")
    else:
        (found.path / "more").write_text("x")
    with pytest.raises(StagingError):
        stage(found, tmp_path / "staging")
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("target", ["/etc/hostname", "../../elsewhere/secret", "unet", "."])
def test_links_that_lead_out_or_to_directories_are_refused(scene: Scene, tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    directory = scene.session("checkpoint-20", step=20)
    (directory / "unet").mkdir()
    (directory / "link").symlink_to(target)
    (found,) = scene.ready()
    with pytest.raises(StagingError):
        stage(found, tmp_path / "staging")
    assert list((tmp_path / "staging").iterdir()) == []


def test_links_inside_the_output_directory_become_files(scene: Scene, tmp_path: Path) -> None:
    (scene.output / "base").write_text("shared")
    directory = scene.session("checkpoint-20", step=20)
    (directory / "link").symlink_to("../base")
    (found,) = scene.ready()
    staged = stage(found, tmp_path / "staging").path
    assert not (staged / "link").is_symlink()
    assert (staged / "link").read_text() == "shared"


class TestWritingIntoStagedFiles:
    """A link keeps a file from being pulled away, not from being written to."""

    def test_what_is_left_alone_is_unchanged(self, scene: Scene, tmp_path: Path) -> None:
        (scene.output / "base").write_text("shared")
        directory = scene.session("checkpoint-20", step=20)
        (directory / "link").symlink_to("../base")
        (found,) = scene.ready()
        staged = stage(found, tmp_path / "staging")
        assert (staged.step, staged.metrics, staged.created_by) == (found.step, found.metrics, found.created_by)
        shutil.rmtree(found.path)
        require_unchanged(staged.path, staged.files)

    @pytest.mark.parametrize("how", ["in place", "appended", "cut", "removed", "added", "all"])
    def test_what_is_written_to_is_not(self, scene: Scene, tmp_path: Path, how: str) -> None:
        found = found_in(scene)
        staged = stage(found, tmp_path / "staging")
        model = found.path / "model"
        if how == "in place":
            with model.open("r+b") as file:
                file.write(b"W")
        elif how == "appended":
            with model.open("ab") as file:
                file.write(b"more")
        elif how == "cut":
            os.truncate(model, 1)
        elif how == "removed":
            (staged.path / "model").unlink()
        elif how == "added":
            (staged.path / "more").touch()
        else:
            shutil.rmtree(staged.path)
        with pytest.raises(FileChanged, match=r"model|more|cannot be read"):
            require_unchanged(staged.path, staged.files)

    def test_a_script_that_replaces_its_files_disturbs_nobody(self, scene: Scene, tmp_path: Path) -> None:
        found = found_in(scene)
        staged = stage(found, tmp_path / "staging")
        (found.path / "new").write_text("others")
        (found.path / "new").rename(found.path / "model")
        require_unchanged(staged.path, staged.files)
        assert (staged.path / "model").read_text() == "weights"


def test_a_checkpoint_may_be_staged_twice(scene: Scene, tmp_path: Path) -> None:
    found = found_in(scene)
    assert stage(found, tmp_path / "staging").path != stage(found, tmp_path / "staging").path
