"""Test the way from shared memory to the committer: committed in place, offered once, released after the last read."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_client.agent.control.channel_messages import CheckpointNotice, ProtocolError, parse
from gpu_client.agent.io.committer import Committer, StagedCheckpoint
from gpu_client.agent.workspace.arena import find_checkpoint
from gpu_client.checkpoints.local.directory_files import BadDirectory
from gpu_client.transport.net.cancellation import CancelEvent
from tests.unit.agent.test_checkpoint_collector import Scene


class MemoryScene(Scene):
    """Attempt with an arena and a trainer that stages checkpoints there."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.arena = root / "arena"
        self.place = self.arena / "checkpoint"
        self.place.mkdir(parents=True)
        self.directories = replace(self.directories, arena=self.arena)
        self.harvest._directories = self.directories

    def stage(self, step: int) -> None:
        (self.place / "weights").write_text(str(step))
        unfinished = self.arena / "unfinished"
        unfinished.write_text(json.dumps({"format": 2, "step": step, "metrics": {"loss": 0.5}}))
        unfinished.rename(self.place / "baton.json")


@pytest.fixture
def scene(tmp_path: Path) -> MemoryScene:
    return MemoryScene(tmp_path)


def test_what_lies_complete_in_memory_is_offered_where_it_is_and_once(scene: MemoryScene) -> None:
    scene.collect()
    scene.stage(10)
    scene.write(5, session=True)
    for _ in range(3):
        scene.collect()
    assert scene.committer.offered == [10, 5]
    staged = scene.committer.staged[0]
    assert (staged.path, staged.metrics, staged.created_by) == (scene.place, {"loss": 0.5}, "session")
    staged.discard()
    assert not (scene.place / "baton.json").exists(), "the trainer may go on"
    assert (scene.place / "weights").read_text() == "10", "its memory stays"
    scene.stage(20)
    scene.collect()
    assert scene.committer.offered == [10, 5, 20]


def test_one_that_was_completed_just_before_the_trainer_died_is_taken_still(scene: MemoryScene) -> None:
    scene.collect()
    scene.stage(10)
    scene.harvest.collect_rest(scene.committer, clean_exit=False)  # type: ignore[arg-type]
    assert scene.committer.offered == [10]


def test_one_that_was_not_completed_is_none(scene: MemoryScene) -> None:
    (scene.place / "weights").write_text("half of ...")
    scene.harvest.collect_rest(scene.committer, clean_exit=True)  # type: ignore[arg-type]
    assert scene.committer.offered == []


@pytest.mark.parametrize("ends", ["committed", "given up", "for a newer one"])
def test_memory_is_given_back_however_a_commit_ends_and_not_before(scene: MemoryScene, ends: str) -> None:
    started, go_on = threading.Event(), threading.Event()
    seen: list[tuple[int, bool]] = []

    def commit(staged: StagedCheckpoint, cancel: CancelEvent) -> None:
        started.set()
        assert go_on.wait(20)
        seen.append((staged.step, find_checkpoint(scene.arena) is not None))
        if ends == "given up":
            raise BadDirectory("no checkpoint")

    committer = Committer(commit, lambda: True, on_lost=lambda _: None, over=threading.Event(), retry_s=0.001)
    try:
        if ends == "for a newer one":
            older = scene.write(5)
            committer.offer(StagedCheckpoint(5, older, {}, "session"))
            assert started.wait(20)
        scene.stage(10)
        scene.harvest._offer_arena_checkpoint(committer)
        if ends == "for a newer one":
            newer = scene.write(15)
            committer.offer(StagedCheckpoint(15, newer, {}, "session"))
            assert find_checkpoint(scene.arena) is None, "passed over: the trainer need not wait"
        go_on.set()
        assert committer.drain()
    finally:
        committer.close()
    expected = {"committed": [(10, True)], "given up": [(10, True)], "for a newer one": [(5, False), (15, False)]}
    assert seen == expected[ends]
    assert find_checkpoint(scene.arena) is None
    assert (scene.place / "weights").exists()


def test_the_channel_takes_paths_in_both_places_and_no_others(tmp_path: Path) -> None:
    def line(path: Path, **more: object) -> bytes:
        return json.dumps({"type": "checkpoint", "step": 3, "path": str(path), "metrics": {}, **more}).encode()

    output, arena = tmp_path / "output", tmp_path / "arena"
    for place in (output / "checkpoint-3", arena / "checkpoint"):
        assert parse(line(place), [output, arena]) == CheckpointNotice(3, place, {}, None)
    assert parse(line(arena / "c", stall_s=0.25), [output, arena]) == CheckpointNotice(3, arena / "c", {}, 0.25)
    for odd in ("long", None, float("inf"), True):
        assert parse(line(arena / "c", stall_s=odd), [output, arena]) == CheckpointNotice(3, arena / "c", {}, None)
    for place in (tmp_path / "x", arena / ".." / "x", arena):
        with pytest.raises(ProtocolError, match="not inside"):
            parse(line(place), [output, arena])
