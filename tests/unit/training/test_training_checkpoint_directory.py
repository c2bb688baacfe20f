"""Complete checkpoint directories: finding, verifying, publishing; errors name the damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.errors import CheckpointDamagedError, CheckpointWriteError


def make(output: Path, step: int, content: bytes = b"weights") -> Path:
    staged = checkpoint_directory.staging_path(output, step)
    (staged / "inner").mkdir(parents=True)
    (staged / "model.bin").write_bytes(content)
    (staged / "inner" / "empty").write_bytes(b"")
    checkpoint_directory.write_marker(staged, step, {"loss": 0.5}, "session", {"model": "tensors"})
    final = checkpoint_directory.checkpoint_path(output, step)
    checkpoint_directory.publish(staged, final)
    return final


def test_publish_leaves_one_verified_directory_and_nothing_else(tmp_path: Path) -> None:
    final = make(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]
    marker = checkpoint_directory.verify(final)
    assert (marker.step, marker.metrics, marker.created_by) == (7, {"loss": 0.5}, "session")
    assert set(marker.files) == {"model.bin", "inner/empty"}
    raw = json.loads((final / "baton.json").read_text())
    assert raw["format"] == 2 and raw["step"] == 7 and raw["created_by"] == "session"


def test_publish_replaces_a_directory_of_that_name(tmp_path: Path) -> None:
    foreign = tmp_path / "checkpoint-7"
    foreign.mkdir()
    (foreign / "half").write_bytes(b"x")
    make(tmp_path, 7, b"new")
    assert (foreign / "model.bin").read_bytes() == b"new"
    assert not (foreign / "half").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]


def test_a_marker_can_be_added_in_place(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-3"
    directory.mkdir()
    (directory / "pytorch_model.bin").write_bytes(b"abc")
    checkpoint_directory.write_marker(directory, 3, {}, "script", {})
    assert checkpoint_directory.verify(directory).created_by == "script"
    assert checkpoint_directory.list_checkpoints(tmp_path) == [(3, directory)]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_only_marked_directories_with_proper_names_count_and_steps_are_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        make(tmp_path, step)
    (tmp_path / "checkpoint-200").mkdir()  # no marker
    for name in ("checkpoint-x", "checkpoint-007", "checkpoint-5-old", "checkpoint-"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "baton.json").write_text("{}")
    (tmp_path / "checkpoint-300").write_text("a file")
    assert [step for step, _ in checkpoint_directory.list_checkpoints(tmp_path)] == [9, 10, 100]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, 1)
    for name in (".checkpoint-2.tmp", ".checkpoint-3.old", ".checkpoint-mine", "other"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / ".baton.json.tmp").write_text("{")
    checkpoint_directory.clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".checkpoint-mine", "checkpoint-1", "other"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: flip(d / "model.bin"), "altered"),
        (lambda d: (d / "model.bin").write_bytes(b"w"), "1 bytes instead of 7"),
        (lambda d: (d / "model.bin").unlink(), r"lacks its file model\.bin"),
        (lambda d: (d / "baton.json").unlink(), r"has no baton\.json"),
        (lambda d: (d / "baton.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "baton.json").write_text("[]"), "not a JSON object"),
        (lambda d: (d / "baton.json").write_text('{"format": 2}'), "the step is 'None'"),
        (lambda d: (d / "baton.json").write_text('{"format": 1}'), "reads format 2"),
        (lambda d: (d / "baton.json").write_text('{"format": 3}'), "reads format 2"),
        (lambda d: (d / "baton.json").write_bytes(b"\xff\xfe"), "cannot be read"),
    ],
)
def test_damage_is_named_with_a_remedy(tmp_path: Path, damage: object, says: str) -> None:
    final = make(tmp_path, 7)
    assert callable(damage)
    damage(final)
    with pytest.raises(CheckpointDamagedError, match=says) as caught:
        checkpoint_directory.verify(final)
    assert "Resume" in caught.value.remedy


def test_a_marker_the_agent_could_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_directory, "MARKER_MAX_BYTES", 500)
    directory = tmp_path / "checkpoint-3"
    directory.mkdir()
    for index in range(5):
        (directory / f"{index}").write_bytes(b"")
    with pytest.raises(CheckpointWriteError, match="5 files"):
        checkpoint_directory.write_marker(directory, 3, {}, "script", {})
    assert not (directory / "baton.json").exists()


@pytest.mark.parametrize(("durable", "at_least"), [(True, 3), (False, 0)])
def test_the_disk_is_waited_for_only_where_the_directory_is_all_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, at_least: int
) -> None:
    # Under an agent the directory dies with the machine, and each wait for the disk is time that training stands still.
    synced: list[int] = []
    monkeypatch.setattr(checkpoint_directory.os, "fsync", synced.append)
    staged, final = checkpoint_directory.staging_path(tmp_path, 3), checkpoint_directory.checkpoint_path(tmp_path, 3)
    staged.mkdir()
    (staged / "model.safetensors").write_bytes(b"weights")
    checkpoint_directory.write_marker(staged, 3, {}, "session", {}, durable=durable)
    checkpoint_directory.publish(staged, final, durable=durable)
    assert checkpoint_directory.verify(final).step == 3
    assert len(synced) >= at_least and bool(synced) == durable
