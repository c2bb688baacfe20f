"""Scripts that delete a checkpoint before it has settled, with a fake clock and real files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gpu_client.checkpoints.local.staging import ReadyCheckpoint, require_unchanged, stage
from tests.unit.checkpoints.watcher_kit import STABLE_S, Scene

LOOK_S = 0.5


class Script:
    """Saves every two seconds, keeps one checkpoint, and is looked at twice a second."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.last: Path | None = None
        self.taken: list[ReadyCheckpoint] = []

    def look(self) -> None:
        self.taken.extend(stage(one, self.scene.staging) for one in self.scene.ready(LOOK_S))

    def save(self, step: int) -> None:
        self.last = self.scene.write(f"checkpoint-{step}", model=f"weights {step}", optimizer=f"state {step}")

    def train(self) -> None:
        for _ in range(4):
            self.look()

    def accelerates(self, *steps: int) -> None:
        """accelerate's order, and diffusers': the old one is removed before the new one is written."""
        for step in steps:
            if self.last:
                shutil.rmtree(self.last)
            self.save(step)
            self.train()

    def trainers(self, *steps: int, looks: int = 0) -> None:
        """The Hugging Face Trainer's order: the old one is removed behind the new one. `looks`: between the two."""
        for step in steps:
            last = self.last
            self.save(step)
            for _ in range(looks):
                self.look()
            if last:
                shutil.rmtree(last)
            self.train()

    @property
    def steps(self) -> list[int]:
        for one in self.taken:
            for name in ("model", "optimizer"):
                assert str(one.step) in (one.path / name).read_text(), "of one step, and whole"
        return [one.step for one in self.taken]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(Scene(tmp_path, resumed=False))


def test_deleted_before_the_next_is_written(script: Script) -> None:
    script.accelerates(25, 50, 75, 100)
    assert script.steps == [50, 75], "of the first nothing tells that it was whole; the last one is there"
    assert script.scene.watcher.missed == [25]


def test_deleted_behind_the_next_in_no_time(script: Script) -> None:
    script.trainers(25, 50, 75, 100)
    assert (script.steps, script.scene.watcher.missed) == ([50, 75], [25])


def test_a_successor_that_takes_time_shows_that_the_former_is_whole(script: Script) -> None:
    script.trainers(25, 50, 75, looks=1)
    assert (script.steps, script.scene.watcher.missed) == ([25, 50], [])


def test_a_resumed_script_loses_not_even_the_first(tmp_path: Path) -> None:
    script = Script(Scene(tmp_path, resumed=False))
    restored = script.scene.write("checkpoint-50", model="weights 50", optimizer="state 50")
    script.scene.watcher.mark_seen(restored)
    script.accelerates(75, 100)
    assert script.steps == [75]


def test_one_whose_last_file_nobody_saw_is_not_taken(script: Script) -> None:
    script.accelerates(25, 50)
    shutil.rmtree(script.scene.output / "checkpoint-50")
    script.last = script.scene.write("checkpoint-75", model="weights 75")
    script.look()
    (script.last / "optimizer").write_text("state 75")
    shutil.rmtree(script.last)
    script.look()
    assert (script.steps, script.scene.watcher.missed) == ([50], [25, 75])


def test_what_is_written_until_the_end_and_deleted_is_taken_with_its_end(script: Script) -> None:
    script.accelerates(25, 50)
    with (script.scene.output / "checkpoint-50" / "model").open("a") as file:
        file.write(" and more")
    shutil.rmtree(script.scene.output / "checkpoint-50")
    script.look()
    assert script.steps == [50]
    assert (script.taken[0].path / "model").read_text() == "weights 50 and more"


def test_a_directory_that_is_renamed_and_written_into_is_no_checkpoint_of_its_former_step(script: Script) -> None:
    script.accelerates(25, 50)
    renamed = (script.scene.output / "checkpoint-50").rename(script.scene.output / "checkpoint-75")
    (renamed / "model").write_text("weights 75")
    script.look()
    assert script.steps == []
    assert script.scene.watcher.missed == [25, 50]


def test_one_whose_deletion_is_seen_half_way_is_taken_whole(script: Script) -> None:
    script.accelerates(25, 50)
    (script.scene.output / "checkpoint-50" / "model").unlink()
    script.look()
    shutil.rmtree(script.scene.output / "checkpoint-50")
    script.look()
    assert script.steps == [50]


def test_a_successor_does_not_make_a_half_deleted_one_a_checkpoint(script: Script) -> None:
    script.trainers(25)
    (script.scene.output / "checkpoint-25" / "model").unlink()
    script.save(50)
    script.look()
    script.look()
    assert script.steps == []


def test_where_links_are_refused_the_loss_is_told(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    script.accelerates(25, 50, 75)
    assert (script.steps, script.scene.watcher.missed) == ([], [25, 50])
    script.trainers(100, 125, looks=1)
    assert script.steps == [75, 100], "copied while the next one is written"


def test_what_was_held_is_staged_as_it_is_and_nothing_else_stays(script: Script) -> None:
    script.accelerates(25, 50, 75)
    (staged,) = script.taken
    require_unchanged(staged.path, staged.files)
    script.scene.watcher.close()
    assert list(script.scene.staging.iterdir()) == [staged.path]


def test_one_that_settles_leaves_no_links(script: Script) -> None:
    script.save(25)
    script.look()
    assert len(list(script.scene.staging.iterdir())) == 1
    script.scene.now += 6 * STABLE_S
    script.look()
    assert script.steps == [25]
    assert list(script.scene.staging.iterdir()) == [script.taken[0].path]


def test_after_a_crash_the_one_before_the_torn_one_is_taken(script: Script) -> None:
    script.trainers(25)
    script.scene.write("checkpoint-50", model="half writt")
    found = script.scene.watcher.final_poll(clean_exit=False)
    assert [one.step for one in found] == [25]


def test_a_part_that_was_missed_is_not_the_measure_of_the_next(script: Script) -> None:
    script.accelerates(25, 50, 75)
    for step in (100, 125):
        shutil.rmtree(script.last or Path())
        script.last = script.scene.write(f"checkpoint-{step}", model="weights")
        script.train()
    script.accelerates(150)
    assert (script.steps, script.scene.watcher.missed) == ([50, 75], [25, 100, 125])


def test_what_cannot_be_opened_hinders_no_other_checkpoint(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (scene.write("checkpoint-10") / "folder.safetensors").symlink_to("/tmp")
    scene.write("checkpoint-20")
    scene.poll()
    assert 20 in [*scene.poll(STABLE_S), *scene.poll(6 * STABLE_S)]


class TestARunOfFewerFiles:
    """The files of an earlier checkpoint are the measure of the next ones, but not if all of these fall short."""

    def test_resumed_with_fewer_ranks_it_misses_two(self, script: Script) -> None:
        ranks = {f"random_states_{rank}.pkl": "x" for rank in range(4)}
        restored = script.scene.write("checkpoint-25", model="weights 25", optimizer="state 25", **ranks)
        script.scene.watcher.mark_seen(restored)
        script.accelerates(50, 75, 100, 125, 150)
        assert (script.steps, script.scene.watcher.missed) == ([100, 125], [50, 75])

    def test_and_so_it_does_where_links_are_refused(self, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refused)
        restored = script.scene.write("checkpoint-25", model="weights 25", optimizer="state 25", scaler="x")
        script.scene.watcher.mark_seen(restored)
        script.trainers(50, 75, 100, 125, looks=1)
        assert (script.steps, script.scene.watcher.missed) == ([100], [50, 75])

    def test_one_that_was_seen_once_says_nothing_of_the_next(self, script: Script) -> None:
        """A checkpoint that the watcher saw once is not committed, and is no measure of the next."""
        script.accelerates(25, 50, 75)
        for step in (100, 125, 150, 175):
            shutil.rmtree(script.last or Path())
            script.last = script.scene.write(f"checkpoint-{step}", model=f"weights {step}")
            script.look()
            script.scene.write(f"checkpoint-{step}", optimizer=f"state {step}")
        shutil.rmtree(script.last or Path())
        script.look()
        assert script.steps == [50, 75]

    def test_nor_does_the_first(self, script: Script) -> None:
        """A first checkpoint of which the watcher saw a part is no measure of the next one."""
        for step in (25, 50):
            if script.last:
                shutil.rmtree(script.last)
            script.last = script.scene.write(f"checkpoint-{step}", model=f"weights {step}")
            script.look()
            script.scene.write(f"checkpoint-{step}", optimizer=f"state {step}")
        shutil.rmtree(script.last or Path())
        script.look()
        assert script.steps == []
        script.last = None
        script.accelerates(75, 100, 125)
        assert script.steps == [100]

    def test_one_has_to_have_what_either_of_the_two_before_had(self, script: Script) -> None:
        script.accelerates(25, 50, 75)
        for step, *names in ((100, "model", "scheduler"), (125, "model"), (150, "model"), (175, "model", "scheduler")):
            shutil.rmtree(script.last or Path())
            script.last = script.scene.write(f"checkpoint-{step}", **dict.fromkeys(names, f"of {step}"))
            script.train()
        script.accelerates(200)
        assert script.scene.watcher.missed == [25, 100, 125, 150]
        assert [one.step for one in script.taken] == [50, 75, 175]


def test_a_successor_makes_no_checkpoint_of_one_whose_files_an_asynchronous_writer_still_writes(
    script: Script,
) -> None:
    script.trainers(25, looks=1)
    script.scene.now += 6 * STABLE_S
    script.look()
    assert script.steps == [25]
    lacking = script.scene.write("checkpoint-50", model="weights 50")
    script.look()
    script.scene.write("checkpoint-75", model="weights 75")
    script.look()
    script.look()
    assert script.steps == [25]
    (lacking / "optimizer").write_text("state 50")
    script.look()
    script.look()
    assert script.steps == [25, 50]


def test_a_file_that_was_written_under_another_name_first_costs_no_checkpoint(script: Script) -> None:
    """A look that saw the other name kept a link by it, and then the links were not the files."""
    script.accelerates(25)
    for step in (50, 75):
        shutil.rmtree(script.last or Path())
        script.last = script.scene.write(f"checkpoint-{step}", **{"optimizer.tmp": f"state {step}"})
        script.look()
        (script.last / "optimizer.tmp").rename(script.last / "optimizer")
        script.scene.write(f"checkpoint-{step}", model=f"weights {step}")
        script.train()
    assert script.steps == [50]
    assert sorted(path.name for path in script.taken[0].path.iterdir()) == ["model", "optimizer"]


def test_a_link_in_the_place_of_a_checkpoint_is_told(script: Script) -> None:
    for step in (25, 50):
        (script.scene.output / f"checkpoint-{step}").symlink_to("/tmp")
        script.look()
    assert script.scene.said == ["[baton] checkpoint-25 in the output directory is a symbolic link and is ignored"]
