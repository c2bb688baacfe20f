"""Test the agent's side of the shared memory: creation, removal after any death, turns."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_client.agent.workspace.arena import (
    find_checkpoint,
    make_arena,
    release_checkpoint,
    remove_arena,
    remove_dead_arenas,
)
from gpu_client.agent.workspace.slots import Workspace

ROOT = Path(__file__).parents[3]
JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"
AGENT = """
import sys
from pathlib import Path
from gpu_client.agent.workspace.slots import Workspace

root, memory, job = sys.argv[1:]
print(Workspace.open(Path(root), "a", Path(memory)).prepare(job, 1).arena, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    return path


def mark(arena: Path, step: int, **more: object) -> None:
    directory = arena / "checkpoint"
    directory.mkdir(exist_ok=True)
    marker = {"format": 2, "step": step, "metrics": {"loss": 0.5}, "created_by": "session", **more}
    (directory / "unfinished").write_text(json.dumps(marker))
    (directory / "unfinished").rename(directory / "baton.json")


def test_an_attempt_has_private_memory_and_leaves_none(tmp_path: Path, memory: Path) -> None:
    with Workspace.open(tmp_path / "root", "a", memory) as space:
        first = space.prepare(JOB, 1).arena
        assert first is not None and first.parent == memory
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        (first / "checkpoint").mkdir()
        (first / "checkpoint" / "model.safetensors").write_bytes(b"x")
        second = space.prepare(JOB, 2).arena
        assert list(memory.iterdir()) == [second], "an attempt's memory is never used by another"
        space.purge()
        assert list(memory.iterdir()) == []


def test_what_a_killed_agent_left_is_removed_by_the_next_also_in_another_slot(tmp_path: Path, memory: Path) -> None:
    one, two = (Workspace.open(tmp_path / "root", name, memory) for name in "ab")
    left = [space.prepare(JOB, 1).arena for space in (one, two)]
    one.close()
    two.close()  # what the kernel does for killed agents
    assert all(path is not None and path.is_dir() for path in left)
    with Workspace.open(tmp_path / "root", "c", memory):
        assert list(memory.iterdir()) == []


def test_two_agents_do_not_touch_each_others_memory(tmp_path: Path, memory: Path) -> None:
    with Workspace.open(tmp_path / "root", "a", memory) as one, Workspace.open(tmp_path / "root", "b", memory) as two:
        kept = one.prepare(JOB, 1).arena
        two.prepare(JOB, 1)
        two.purge()
        assert list(memory.iterdir()) == [kept]


def test_without_such_a_place_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Workspace.open(tmp_path / "root", "a", tmp_path / "missing") as space:
        assert space.prepare(JOB, 1).arena is None
    assert "no shared memory" in caplog.text
    with Workspace.open(tmp_path / "root", "a") as space:
        assert space.prepare(JOB, 1).arena is None


@pytest.mark.parametrize("kind", ["another directory", "a link", "a file", "nothing"])
def test_a_note_that_a_job_has_changed_harms_nothing(tmp_path: Path, memory: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    named = memory / "baton-arena-locked-1"
    if kind == "another directory":
        named = precious
    elif kind == "a link":
        named.symlink_to(precious)
    elif kind == "a file":
        named.write_text("no directory")
    (tmp_path / "arena").write_text(str(named))
    remove_arena(tmp_path)
    assert (precious / "file").read_text() == "kept"
    assert not (tmp_path / "arena").exists()


def test_a_deep_tree_of_a_hostile_job_goes_too(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = make_arena(memory, tmp_path)
    assert held is not None
    monkeypatch.chdir(held.path)
    for _ in range(1500):
        Path("d").mkdir()
        os.chdir("d")
    monkeypatch.undo()
    remove_arena(tmp_path)
    os.close(held.lock_fd)
    assert list(memory.iterdir()) == []


def test_an_agent_that_starts_removes_the_memory_of_dead_ones_in_other_workspaces(tmp_path: Path, memory: Path) -> None:
    line = [sys.executable, "-c", AGENT, str(tmp_path / "one"), str(memory), JOB]
    with subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        left = Path(agent.stdout.readline().strip())
        assert left.parent == memory
        (left / "checkpoint").mkdir()
        (left / "checkpoint" / "model.safetensors").write_bytes(b"x")
        with Workspace.open(tmp_path / "two", "b", memory) as living:
            assert left.exists(), "its agent lives"
            kept = living.prepare(JOB, 1).arena
            agent.kill()
            agent.wait(60)
            assert left.exists(), "the dead remove nothing"
            with Workspace.open(tmp_path / "three", "c", memory):
                assert list(memory.iterdir()) == [kept]
            living.purge()
            assert list(memory.iterdir()) == []


def test_memory_that_is_no_agents_stays(tmp_path: Path, memory: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (memory / "baton-arena-0123456789abcdef").mkdir()
    (memory / "baton-arena-locked-link").symlink_to(tmp_path / "precious")
    (memory / "baton-arena-locked-file").write_text("no directory")
    (memory / "other").mkdir()
    before = sorted(memory.iterdir())
    with Workspace.open(tmp_path / "root", "a", memory):
        assert sorted(memory.iterdir()) == before
    assert (tmp_path / "precious" / "file").read_text() == "kept"


def test_memory_that_another_agent_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mkdir, made = Path.mkdir, list[Path]()

    def mkdir_and_lose(path: Path, *given: int, **more: bool) -> None:
        mkdir(path, *given, **more)
        if path.parent == memory:
            made.append(path)
            if len(made) % 3:
                remove_dead_arenas(memory)

    monkeypatch.setattr(Path, "mkdir", mkdir_and_lose)
    held = make_arena(memory, tmp_path)
    assert held is not None and len(made) == 3
    assert list(memory.iterdir()) == [held.path]
    remove_dead_arenas(memory)
    assert list(memory.iterdir()) == [held.path]
    os.close(held.lock_fd)
    monkeypatch.setattr(Path, "mkdir", lambda path, *given, **more: (mkdir(path, *given, **more), path.rmdir()))
    assert make_arena(memory, tmp_path) is None
    assert "no shared memory" in caplog.text


def test_a_checkpoint_is_the_agents_until_it_is_given_back(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_checkpoint(memory) is None
    (memory / "checkpoint").mkdir()
    assert find_checkpoint(memory) is None, "files without a marker are no checkpoint"
    mark(memory, 7)
    first = find_checkpoint(memory)
    assert first is not None
    assert (first.step, first.path, first.metrics) == (7, memory / "checkpoint", {"loss": 0.5})
    assert find_checkpoint(memory) == first
    release_checkpoint(memory)
    release_checkpoint(memory)
    assert find_checkpoint(memory) is None
    mark(memory, 7)
    again = find_checkpoint(memory)
    assert again is not None and again.version != first.version, "the same step, but another checkpoint"
    assert caplog.text == ""


@pytest.mark.parametrize("wrong", [{"format": 3}, {"step": "7"}, {"step": True}, {"step": -1}, {"step": 10**30}])
def test_a_marker_that_makes_no_sense_is_no_checkpoint(
    memory: Path, caplog: pytest.LogCaptureFixture, wrong: dict[str, object]
) -> None:
    with caplog.at_level(logging.WARNING):
        mark(memory, 7, **wrong) if "step" not in wrong else mark(memory, **wrong)  # type: ignore[arg-type]
        assert find_checkpoint(memory) is None
    assert "not usable" in caplog.text
