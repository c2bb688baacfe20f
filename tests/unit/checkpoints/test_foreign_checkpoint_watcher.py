"""Completeness of a checkpoint directory, with a fake clock and no sleeping."""

import io
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from gpu_client.checkpoints.local import foreign_checkpoint_watcher
from gpu_client.checkpoints.local.foreign_checkpoint_watcher import CheckpointWatcher
from gpu_client.checkpoints.local.staging import stage
from tests.unit.checkpoints.watcher_kit import STABLE_S, Scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_session_checkpoint_is_complete_at_once_and_told_once(scene: Scene) -> None:
    scene.session("checkpoint-20", step=20)
    (found,) = scene.ready()
    assert (found.step, found.path, found.metrics, found.created_by) == (
        20,
        scene.output / "checkpoint-20",
        {"loss": 0.5},
        "session",
    )
    assert [file.path for file in found.files] == ["baton.json", "model", "optimizer"]
    assert scene.poll(100) == []
    assert scene.asked == 0


def test_a_marker_that_appears_while_the_files_are_listed_is_taken_with_the_next_poll(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Regression: the marker of a Trainer's directory is added in place. Staging the files that were listed before it
    # came failed, and the checkpoint was never told again.
    directory = scene.write("checkpoint-20")
    real_list = foreign_checkpoint_watcher.list_files

    def list_then_mark(path: Path) -> tuple[foreign_checkpoint_watcher.FileState, ...]:
        files = real_list(path)
        scene.session("checkpoint-20", step=20)
        return files

    monkeypatch.setattr(foreign_checkpoint_watcher, "list_files", list_then_mark)
    assert scene.ready() == []
    monkeypatch.undo()
    (found,) = scene.ready()
    assert [file.path for file in found.files] == ["baton.json", "model", "optimizer"]
    assert stage(found, directory.parent.parent / "staging").path.is_dir()


def test_a_foreign_checkpoint_is_complete_when_left_alone(scene: Scene) -> None:
    scene.write("checkpoint-20")
    assert scene.poll() == []
    assert scene.poll(STABLE_S - 0.1) == []
    (found,) = scene.ready(0.1)
    assert (found.step, found.created_by, found.metrics) == (20, "foreign", {})
    assert scene.poll(100) == []


def test_whatever_files_there_are(scene: Scene) -> None:
    """A bf16 run writes no scaler.pt: no set of names is expected."""
    scene.write("checkpoint-1", **{"pytorch_lora_weights.bin": "x", "random_states_0.pkl": "y"})
    scene.poll()
    assert scene.poll(STABLE_S) == [1]


def test_a_slow_writer_is_waited_for(scene: Scene) -> None:
    for number in range(10):
        scene.write("checkpoint-20", **{f"part-{number}": "x" * (number + 1)})
        assert scene.poll(STABLE_S - 0.5) == []
    scene.write("checkpoint-20", **{"part-9": "y" * 10})  # Same size, other content.
    os.utime(scene.output / "checkpoint-20" / "part-9", ns=(1, 1))
    assert scene.poll(4) == []
    assert scene.poll(STABLE_S) == [20]


def test_a_file_open_for_writing_is_waited_for(scene: Scene) -> None:
    directory = scene.write("checkpoint-20")
    scene.write("checkpoint-10")
    scene.open = {directory / "nested" / "optimizer", Path("/elsewhere/x")}
    scene.poll()
    assert scene.poll(100) == [10]
    scene.open = set()
    assert scene.poll(1) == [20]


def test_open_files_are_matched_through_links_to_the_output_directory(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    now = [0.0]
    opened = {real / "checkpoint-5" / "model"}
    watcher = CheckpointWatcher(tmp_path / "link", lambda: now[0], lambda: opened, STABLE_S)
    (real / "checkpoint-5").mkdir()
    (real / "checkpoint-5" / "model").write_text("x")
    watcher.poll()
    now[0] = 50.0
    assert watcher.poll() == []
    opened.clear()
    assert [found.step for found in watcher.poll()] == [5]


def test_directories_from_before_the_watcher_are_found(scene: Scene) -> None:
    scene.write("checkpoint-1")
    scene.session("checkpoint-2", step=2)
    late = CheckpointWatcher(scene.output, lambda: scene.now, scene.opened, STABLE_S)
    late.mark_seen(scene.output / "checkpoint-0")
    assert [found.step for found in late.poll()] == [2]
    scene.now += STABLE_S
    assert [found.step for found in late.poll()] == [1]


def test_rotated_away_while_waiting(scene: Scene) -> None:
    directory = scene.write("checkpoint-20")
    scene.poll()
    shutil.rmtree(directory)
    assert scene.poll(STABLE_S) == [20]
    scene.write("checkpoint-20")  # Written anew: waits anew.
    assert scene.poll() == []
    assert scene.poll(STABLE_S) == [20]


def test_one_that_is_being_removed_is_not_told_again(scene: Scene) -> None:
    directory = scene.write("checkpoint-20")
    scene.poll()
    assert scene.poll(STABLE_S) == [20]
    (directory / "model").unlink()
    assert scene.poll(1) == []
    assert scene.poll(100) == []


def test_one_removed_and_written_anew_is_told_again(scene: Scene) -> None:
    directory = scene.session("checkpoint-20", step=20)
    assert scene.poll() == [20]
    shutil.rmtree(directory)
    assert scene.poll() == []
    scene.session("checkpoint-20", step=20)
    assert scene.poll() == [20]


def test_several_come_by_step_also_when_an_older_one_settles_later(scene: Scene) -> None:
    scene.write("checkpoint-100")
    scene.write("checkpoint-20")
    scene.write("checkpoint-3")
    scene.poll()
    assert scene.poll(STABLE_S) == [3, 20, 100]
    scene.write("checkpoint-7")
    scene.poll()
    assert scene.poll(STABLE_S) == [7]


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-abc",
        "checkpoint-",
        "checkpoint",
        "checkpoint--5",
        "checkpoint-5.tmp",
        ".checkpoint-5.tmp",
        "xcheckpoint-5",
        "checkpoint-5 ",
        "checkpoint-٥",
        "checkpoint-1e3",
        "checkpoint-99999999999999",
        "Checkpoint-5",
        "checkpoint-" + "9" * 200,
    ],
)
def test_other_names_are_not_checkpoints(scene: Scene, name: str) -> None:
    scene.write(name)
    scene.poll()
    assert scene.poll(STABLE_S) == []
    assert scene.watcher.final_poll(clean_exit=True) == []


def test_leading_zeros_are_a_number_too(scene: Scene) -> None:
    scene.write("checkpoint-00010")
    scene.session("checkpoint-000020", step=20)
    assert scene.poll() == [20]
    assert scene.poll(STABLE_S) == [10]


def test_links_and_files_with_such_a_name_are_ignored(scene: Scene, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model").write_text("x")
    (scene.output / "checkpoint-5").symlink_to(elsewhere)
    (scene.output / "checkpoint-6").write_text("a file")
    (scene.output / "checkpoint-7").symlink_to("missing")
    scene.poll()
    assert scene.poll(STABLE_S) == []


def test_nested_directories_belong_to_their_checkpoint(scene: Scene) -> None:
    directory = scene.write("checkpoint-5")
    (directory / "checkpoint-4" / "unet").mkdir(parents=True)
    (directory / "checkpoint-4" / "unet" / "w").write_text("x")
    scene.poll()
    (found,) = scene.ready(STABLE_S)
    assert [file.path for file in found.files] == ["checkpoint-4/unet/w", "model", "optimizer"]
    (directory / "checkpoint-4" / "unet" / "w").write_text("changes deep inside are changes")


def test_a_change_deep_inside_is_a_change(scene: Scene) -> None:
    directory = scene.write("checkpoint-5")
    (directory / "unet").mkdir()
    (directory / "unet" / "w").write_text("x")
    scene.poll()
    (directory / "unet" / "w").write_text("xy")
    assert scene.poll(STABLE_S) == []
    assert scene.poll(STABLE_S) == [5]


def test_an_empty_directory_is_no_checkpoint(scene: Scene) -> None:
    (scene.output / "checkpoint-5" / "unet").mkdir(parents=True)
    scene.write("checkpoint-6", touched="")
    scene.poll()
    assert scene.poll(100) == []
    assert scene.watcher.final_poll(clean_exit=True) == []
    (scene.output / "checkpoint-5" / "unet" / "w").write_text("x")
    assert scene.poll() == []  # The wait starts with the file.
    assert scene.poll(STABLE_S) == [5]


def test_one_that_lacks_what_the_last_one_had_gets_more_time(scene: Scene) -> None:
    scene.write("checkpoint-10", **{"model-1.bin": "x", "optimizer.bin": "x", "random_states_0.pkl": "x"})
    scene.poll()
    assert scene.poll(STABLE_S) == [10]
    scene.write("checkpoint-20", **{"model-2.bin": "x"})
    scene.poll()
    assert scene.poll(STABLE_S * 2) == []  # The optimizer takes long to gather.
    scene.write("checkpoint-20", **{"optimizer.bin": "x", "random_states_7.pkl": "x"})
    assert scene.poll() == []
    assert scene.poll(STABLE_S) == [20]
    scene.write("checkpoint-30", **{"model-3.bin": "x"})  # It does not come at all: no endless wait.
    scene.poll()
    assert scene.poll(STABLE_S * foreign_checkpoint_watcher.INCOMPLETE_PATIENCE) == [30]


@pytest.mark.parametrize(
    "marker",
    [
        {"format": 2, "step": 21},
        {"format": 1, "step": 20},
        {"format": 3, "step": 20},
        {"step": 20},
        {"format": 2, "step": "20"},
        {"format": 2, "step": True},
        {"format": 2, "step": 20, "metrics": []},
        ["format", 2],
        "text",
    ],
)
def test_a_marker_that_does_not_fit_is_not_taken(scene: Scene, marker: object) -> None:
    scene.session("checkpoint-20", marker)
    scene.poll()
    assert scene.poll(STABLE_S) == []
    assert scene.watcher.final_poll(clean_exit=True) == []


def test_a_marker_that_is_still_being_copied_is_waited_for(scene: Scene) -> None:
    directory = scene.write("checkpoint-20")
    (directory / "baton.json").write_text('{"format": 2, "st')
    assert scene.poll() == []
    (directory / "baton.json").write_text('{"format": 2, "step": 20, "metrics": {}}')
    assert scene.poll() == [20]


def test_metrics_are_cleaned_not_refused(scene: Scene) -> None:
    directory = scene.write("checkpoint-20")
    (directory / "baton.json").write_text(
        '{"format": 2, "step": 20, "metrics": {"loss": NaN, "lr": 1e-4, "n": 3, "bad name": 1, "t": "x", "b": true, '
        '"huge": 1' + "0" * 400 + "}}"
    )
    (found,) = scene.ready()
    assert found.metrics == {"lr": 1e-4, "n": 3.0}


def test_marker_traps(scene: Scene) -> None:
    """A link or a pipe in the marker's place neither blocks nor leads out."""
    link = scene.write("checkpoint-1")
    (link / "baton.json").symlink_to("/etc/passwd")
    pipe = scene.write("checkpoint-2")
    os.mkfifo(pipe / "baton.json")
    nested = scene.write("checkpoint-3")
    (nested / "baton.json").write_text("[" * 200_000)
    scene.poll()
    assert scene.poll(STABLE_S) == []


def test_at_a_clean_end_everything_present_counts(scene: Scene) -> None:
    scene.write("checkpoint-30")
    scene.session("checkpoint-20", step=20)
    scene.open = {scene.output / "checkpoint-30" / "model"}
    assert [found.step for found in scene.watcher.final_poll(clean_exit=True)] == [20, 30]
    assert scene.watcher.final_poll(clean_exit=True) == []


def test_after_a_crash_only_committed_ones_count(scene: Scene) -> None:
    scene.write("checkpoint-10")
    scene.poll()
    assert scene.poll(STABLE_S) == [10]
    scene.write("checkpoint-30", model="half writt")
    scene.session("checkpoint-20", step=20)
    scene.poll()
    scene.session("checkpoint-25", step=25)
    scene.now += 1000
    assert [found.step for found in scene.watcher.final_poll(clean_exit=False)] == [25]


def test_what_a_crash_may_have_cut_off_is_told(scene: Scene) -> None:
    scene.session("checkpoint-20", step=20)
    scene.write("checkpoint-30")
    scene.write("checkpoint-40", model="half writt")
    assert [found.step for found in scene.watcher.final_poll(clean_exit=False)] == [20]
    assert scene.said == [
        "[baton] checkpoint-30 in the output directory is not taken over: the script ended before the directory had "
        "settled, so a file may be truncated"
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_truncated_tensor_file_is_never_taken_and_the_job_is_told(scene: Scene, name: str) -> None:
    """A full disk truncates a file while the script goes on: no resume could load the checkpoint."""
    stream = io.BytesIO()
    torch.save({"a": torch.ones(9)}, stream)
    content = save({"a": torch.ones(9)}) if name == "model.safetensors" else stream.getvalue()
    path = scene.write("checkpoint-20") / name
    path.write_bytes(content[:-1])
    scene.poll()
    assert scene.poll(STABLE_S * foreign_checkpoint_watcher.INCOMPLETE_PATIENCE * 10) == []
    assert scene.watcher.final_poll(clean_exit=True) == []
    (told,) = scene.said
    assert f"checkpoint-20 in the output directory is not whole: {name} is truncated: " in told
    assert told.endswith("Baton does not take it over unless the file becomes whole; is the disk full?")
    path.write_bytes(content)
    scene.poll()
    assert scene.poll(STABLE_S * foreign_checkpoint_watcher.INCOMPLETE_PATIENCE) == [20]


def test_a_file_that_is_never_closed_is_told(scene: Scene) -> None:
    """A log that the script writes into its checkpoint's directory, for instance."""
    scene.open = {scene.write("checkpoint-20") / "log"}
    scene.poll()
    assert scene.poll(STABLE_S * foreign_checkpoint_watcher.INCOMPLETE_PATIENCE - 1) == []
    assert scene.said == []
    assert scene.poll(1) == []
    assert scene.said == [
        "[baton] checkpoint-20 in the output directory is not taken over yet: a process of the script has a file in it "
        "open for writing, unchanged for 30 s"
    ]


def test_what_the_agent_put_there_is_not_told(scene: Scene) -> None:
    restored = scene.session("checkpoint-40", step=40)
    scene.watcher.mark_seen(restored)
    scene.session("checkpoint-50", step=50)
    assert scene.poll() == [50]


def test_no_output_directory(scene: Scene) -> None:
    shutil.rmtree(scene.output)
    assert scene.poll() == []
    scene.output.mkdir()
    scene.session("checkpoint-1", step=1)
    assert scene.poll() == [1]


def test_a_tree_too_deep_for_any_manifest_is_not_a_checkpoint(scene: Scene) -> None:
    """A thousand directories within each other ended the attempt: Python's recursion has an end."""
    directory = scene.session("checkpoint-20", step=20)
    directory.joinpath(*["d" * 200] * 4).mkdir(parents=True)
    scene.session("checkpoint-30", step=30)
    assert scene.poll() == [30]
