"""Files shorter than they declare: their detection, and the wait for a checkpoint with such a file."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from gpu_client.checkpoints.local import truncated_files
from gpu_client.checkpoints.local.foreign_checkpoint_watcher import INCOMPLETE_PATIENCE
from gpu_client.checkpoints.local.truncated_files import find_missing_part
from tests.unit.checkpoints.watcher_kit import STABLE_S, Scene


def torch_bytes() -> bytes:
    stream = io.BytesIO()
    torch.save({"weights": torch.arange(1000.0)}, stream)
    return stream.getvalue()


SAFETENSORS = save({"a": torch.arange(100.0), "b": torch.ones(3)}, {"format": "pt"})
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", SAFETENSORS), ("optimizer.pt", torch_bytes()), ("trainer_state.json", b'{"max_steps": 9}')],
)
def test_cut_anywhere_it_is_missed_and_whole_it_is_not(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert find_missing_part(tmp_path, [name]) is None
    first = 4 if name == "optimizer.pt" else 0  # a zip archive is told by its first four bytes
    for size in {first, first + 1, 9, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:size])
        assert str(find_missing_part(tmp_path, [name])).startswith(name), size


def test_space_that_was_reserved_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(len(SAFETENSORS)))
    assert (
        str(find_missing_part(tmp_path, ["model.safetensors"]))
        == "model.safetensors has no readable safetensors header"
    )


def test_an_index_misses_its_shards(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "model.safetensors.index.json").write_text(INDEX)
    names = [f"unet/model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(SAFETENSORS)
    index = "unet/model.safetensors.index.json"
    assert find_missing_part(tmp_path, [index, *names]) is None
    missing = find_missing_part(tmp_path, [index, names[0]])
    assert str(missing) == f"{index} names model-00002-of-00002.safetensors, which is absent"
    assert missing is not None and not missing.truncated, "the index may be left from another model"


@pytest.mark.parametrize("content", [b"", b"text", b"\x80\x02}q\x00."])
def test_other_files_are_whole(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "scheduler.pt").write_bytes(content)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert find_missing_part(tmp_path, ["scheduler.pt", "pipe.safetensors"]) is None


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", "model.safetensors.index.json"])
def test_a_git_lfs_pointer_is_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert find_missing_part(tmp_path, [name]) is None


@pytest.mark.parametrize("name", ["trainer_state.json", "model.safetensors.index.json"])
def test_a_json_file_that_is_too_long_to_be_read_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A JSON file above the size bound counts as whole; cut off at the bound, it was no JSON."""
    (tmp_path / name).write_text('{"weight_map": {"a": "elsewhere"}, "log_history": []}')
    monkeypatch.setattr(truncated_files, "MAX_JSON_BYTES", 20)
    assert find_missing_part(tmp_path, [name]) is None


def test_an_endless_tensor_is_no_header(tmp_path: Path) -> None:
    header = b'{"a": {"data_offsets": [0, Infinity]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert (
        str(find_missing_part(tmp_path, ["model.safetensors"]))
        == "model.safetensors has no readable safetensors header"
    )


def test_a_checkpoint_with_a_short_file_is_waited_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    directory = scene.write("checkpoint-20")
    (directory / "model.safetensors").write_bytes(SAFETENSORS[:-1])
    scene.poll()
    assert scene.poll(INCOMPLETE_PATIENCE * STABLE_S - 1) == []
    (directory / "model.safetensors").write_bytes(SAFETENSORS)
    assert scene.poll() == []
    assert scene.poll(STABLE_S) == [20]


class TestAFileThatStaysShort:
    """An index that names shards which are not there came from a copied model: no checkpoint was ever taken."""

    @pytest.fixture
    def scene(self, tmp_path: Path) -> Scene:
        return Scene(tmp_path)

    def write(self, scene: Scene, step: int) -> Path:
        directory = scene.write(f"checkpoint-{step}")
        (directory / "model.safetensors.index.json").write_text(INDEX)
        return directory

    def test_it_costs_time_and_not_the_checkpoint(self, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
        for step in (20, 40):
            self.write(scene, step)
            scene.poll()
            assert scene.poll(INCOMPLETE_PATIENCE * STABLE_S - 1) == []
            with caplog.at_level(logging.WARNING):
                assert scene.poll(1) == [step]
            assert f"checkpoint-{step} is taken over as it is: model.safetensors.index.json names" in caplog.text

    def test_a_successor_does_not_shorten_the_time(self, scene: Scene) -> None:
        for step in (20, 40):
            self.write(scene, step)
            scene.poll()
        assert scene.poll(INCOMPLETE_PATIENCE * STABLE_S - 1) == []
        assert scene.poll(1) == [20, 40]

    def test_one_that_is_open_is_still_written(self, scene: Scene) -> None:
        scene.open = {self.write(scene, 20) / "model-00001-of-00002.safetensors"}
        scene.poll()
        assert scene.poll(100 * STABLE_S) == []

    def test_behind_a_clean_exit_it_is_taken_and_behind_a_crash_it_is_not(self, scene: Scene) -> None:
        self.write(scene, 20)
        assert scene.watcher.final_poll(clean_exit=False) == []
        assert [one.step for one in scene.watcher.final_poll(clean_exit=True)] == [20]
        assert "is not whole" in scene.said[-1]

    def test_one_that_is_removed_is_missed(self, scene: Scene) -> None:
        directory = self.write(scene, 20)
        scene.poll()
        shutil.rmtree(directory)
        assert scene.poll() == []
        assert scene.watcher.missed == [20]
        assert len(scene.said) == 1

    def test_the_job_is_told_once_for_each_kind_of_file(self, scene: Scene) -> None:
        for step in (20, 40):
            self.write(scene, step)
            scene.poll()
            scene.poll(STABLE_S)
            scene.poll(STABLE_S)
        assert scene.said == [
            "[baton] checkpoint-20 in the output directory is not whole: model.safetensors.index.json names "
            "model-00001-of-00002.safetensors, which is absent. Baton takes it over as it is once it has not "
            "changed for 30 s, or when the script has exited with code 0"
        ]
        (scene.output / "checkpoint-40" / "model.safetensors").write_bytes(SAFETENSORS[:-1])
        scene.poll()
        scene.poll(STABLE_S)
        assert len(scene.said) == 2

    def test_what_a_file_says_stays_one_line_of_the_log(self, scene: Scene) -> None:
        directory = scene.write("checkpoint-20")
        (directory / "x.index.json").write_text(json.dumps({"weight_map": {"a": "\n\ud800" + "x" * 10_000}}))
        scene.poll()
        scene.poll(STABLE_S)
        (line,) = scene.said
        assert line.isprintable()
        assert len(line) < 1000


def test_the_first_one_has_more_time(tmp_path: Path) -> None:
    """The first checkpoint waits longer: which files belong to a checkpoint is known only from a finished one."""
    scene = Scene(tmp_path, resumed=False)
    scene.write("checkpoint-20", **{"model": "weights"})
    scene.poll()
    assert scene.poll(STABLE_S * INCOMPLETE_PATIENCE - 1) == []
    scene.write("checkpoint-20", **{"optimizer": "state"})
    scene.poll()
    assert scene.poll(STABLE_S * INCOMPLETE_PATIENCE) == [20]
    scene.write("checkpoint-40")
    scene.poll()
    assert scene.poll(STABLE_S) == [40]


@pytest.mark.parametrize("last", ["trainer_state.json", "random_states_0.pkl"])
def test_the_first_one_with_what_trainers_write_last_has_not(tmp_path: Path, last: str) -> None:
    scene = Scene(tmp_path, resumed=False)
    scene.write("checkpoint-20", **{"model": "weights", last: "{}"})
    scene.poll()
    assert scene.poll(STABLE_S) == [20]
