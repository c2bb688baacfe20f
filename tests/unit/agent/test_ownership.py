"""Test that jobs of another tenant find no files in a workspace."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from pathlib import Path

import pytest

from gpu_client.agent.app import program
from gpu_client.agent.workspace.ownership import MARK, is_owned_by, owner_id, write_mark
from gpu_client.agent.workspace.slots import Workspace, WorkspaceError
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from tests.unit.agent.agent_kit import make_manifest

JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"
URL = "https://api.example/stage"
KEY = "baton_k3f9k3f9_averylongsecretindeed"
OTHER_KEY = "baton_m4g0m4g0_averylongsecretindeed"
ME = owner_id(URL, KEY)
WEIGHTS = random.Random("weights").randbytes(50_000)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def work(space: Workspace) -> Path:
    """Kill an attempt that has committed a checkpoint. Returns the path of the chunk's bytes."""
    job = space.prepare(JOB, 1)
    staged = job.staging / "checkpoint"
    staged.mkdir()
    (staged / "model").write_bytes(WEIGHTS)
    manifest = make_manifest(JOB, 10, 1, staged)
    LocalChunkCache(space.stores, JOB).record_committed(manifest, staged)
    (job.data / "input").write_bytes(WEIGHTS)
    if job.arena is not None:
        (job.arena / "model").write_bytes(WEIGHTS)
    space.write_state(JOB, 1, "training", 5, lease_token="the-lease-token")
    return space.stores / JOB / "10-1" / "files" / "model"


def bytes_below(*places: Path) -> list[Path]:
    return [path for place in places for path in place.rglob("*") if path.is_file() and WEIGHTS in path.read_bytes()]


def test_the_same_key_finds_what_it_left(root: Path, memory: Path) -> None:
    with Workspace.open(root, "a", memory, owner=ME) as space:
        model = work(space)
    with Workspace.open(root, "a", memory, owner=owner_id(URL + "/", KEY)) as again:
        again.prepare(JOB, 2)
        assert model.read_bytes() == WEIGHTS
        found = LocalChunkCache(again.stores, JOB).newest()
        assert found is not None
        chunk = LocalChunkCache(again.stores, JOB).find(found[0].chunks[0].blake3)
        assert chunk is not None and chunk.path == model, "a resumed attempt finds its chunks"
        previous = again.take_previous_state()
        assert previous is not None and previous.lease_token == "the-lease-token"


@pytest.mark.parametrize(
    "other", [owner_id(URL, OTHER_KEY), owner_id("https://other.example/stage", KEY)], ids=["key", "URL"]
)
@pytest.mark.parametrize("agent_id", ["a", "b"])
def test_another_key_or_control_plane_finds_nothing(root: Path, memory: Path, other: str, agent_id: str) -> None:
    """A job of the next tenant, which runs as the same user, could read checkpoints of the one before."""
    with Workspace.open(root, "a", memory, owner=ME) as space:
        work(space)
        (space.slot / "left").write_bytes(WEIGHTS)
        assert len(bytes_below(root, memory)) == 4
    with Workspace.open(root, agent_id, memory, owner=other) as next_one:
        assert bytes_below(root, memory) == []
        assert "the-lease-token" not in "".join(path.read_text() for path in root.rglob("*") if path.is_file())
        assert next_one.take_previous_state() is None, "its lease token is not for this control plane"
        assert LocalChunkCache(next_one.stores, JOB).newest() is None
        model = work(next_one)
    with Workspace.open(root, agent_id, memory, owner=other):
        assert model.exists()
    with Workspace.open(root, agent_id, memory, owner=ME):
        assert bytes_below(root, memory) == []


def test_what_is_not_marked_goes(root: Path) -> None:
    """Older agents left no mark, so the owner of the directory is unknown."""
    with Workspace.open(root, "a", owner=ME) as space:
        model = work(space)
        (space.slot / MARK).unlink()
    with Workspace.open(root, "a", owner=ME):
        assert not model.exists()


def test_a_key_without_an_id_is_another_one_each_time(root: Path) -> None:
    owners = {owner_id(URL, key) for key in ("secretsecret", "secretsecret", "baton_UPPERCASE_secret", "baton_id_s")}
    assert len(owners) == 4
    assert "secret" not in "".join(owners)


def test_abandoned_slots_of_others_are_cleared_too(root: Path, memory: Path) -> None:
    with Workspace.open(root, "a", memory, owner=ME), Workspace.open(root, "b", memory, owner=ME) as second:
        work(second)
    with Workspace.open(root, "d", memory, owner=owner_id(URL, OTHER_KEY)) as other:
        assert other.slot != second.slot
        assert bytes_below(root, memory) == []
        assert not (second.slot / "agent-state.json").exists()


def test_a_living_agent_with_another_key_is_left_alone_and_told_of(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Workspace.open(root, "a", memory, owner=ME) as living:
        work(living)
        with Workspace.open(root, "b", memory, owner=ME):
            assert caplog.text == ""
        with caplog.at_level(logging.WARNING), Workspace.open(root, "b", memory, owner=owner_id(URL, OTHER_KEY)):
            assert "seems to have another API key" in caplog.text
            assert len(bytes_below(root, memory)) == 3


@pytest.mark.parametrize("where", ["own slot", "abandoned slot"])
def test_where_something_stays_no_job_is_run(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    other = owner_id(URL, OTHER_KEY)
    first_owner = other if where == "abandoned slot" else ME
    with (
        Workspace.open(root, "a", memory, owner=first_owner),
        Workspace.open(root, "b", memory, owner=ME) as second,
    ):
        work(second)
    agent_id = "b" if where == "own slot" else "a"

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(WorkspaceError, match="another API key"):
            Workspace.open(root, agent_id, memory, owner=other)
        with pytest.raises(WorkspaceError, match="another API key"):
            Workspace.open(root, agent_id, memory, owner=other)
    with Workspace.open(root, agent_id, memory, owner=other):
        assert bytes_below(root, memory) == []


def test_shared_memory_that_stays_is_no_less(root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Workspace.open(root, "a", memory, owner=ME) as space:
        work(space)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", lambda _: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
        for _ in range(2):
            with pytest.raises(WorkspaceError, match="another API key"):
                Workspace.open(root, "a", memory, owner=owner_id(URL, OTHER_KEY))
    with Workspace.open(root, "a", memory, owner=owner_id(URL, OTHER_KEY)):
        assert list(memory.iterdir()) == []


@pytest.mark.parametrize("change", ["garbage", "list", "other type", "pipe", "link", "directory", "no hex", "deep"])
def test_a_mark_that_a_job_has_changed_is_none(root: Path, tmp_path: Path, change: str) -> None:
    with Workspace.open(root, "a", owner=ME) as space:
        model, mark = work(space), space.slot / MARK
    text = mark.read_text()
    mark.unlink()
    if change == "pipe":
        os.mkfifo(mark)
    elif change == "link":
        (tmp_path / "elsewhere").write_text(text)
        mark.symlink_to(tmp_path / "elsewhere")
    elif change == "directory":
        mark.mkdir()
    else:
        texts = {
            "garbage": "\x00\xff",
            "list": "[]",
            "other type": '{"key": 3, "digest": ""}',
            "no hex": '{"key": "xyz", "digest": ""}',
            "deep": "[" * 4000,
        }
        mark.write_text(texts[change])
    with Workspace.open(root, "a", owner=ME) as again:
        assert not model.exists()
        assert is_owned_by(again.slot, ME)


def test_a_mark_says_nothing_of_the_key(tmp_path: Path) -> None:
    write_mark(tmp_path, ME)
    first = (tmp_path / MARK).read_text()
    write_mark(tmp_path, ME)
    assert json.loads(first)["digest"] != json.loads((tmp_path / MARK).read_text())["digest"]
    assert not any(part in first for part in (*KEY.split("_"), "api.example"))
    assert is_owned_by(tmp_path, ME)
    assert not is_owned_by(tmp_path, owner_id(URL, OTHER_KEY))
    assert not is_owned_by(tmp_path / "nothing", ME)
    assert [path.name for path in tmp_path.iterdir()] == [MARK]


def test_the_agent_clears_before_it_claims(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[int] = []

    class WorkerLoop:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def run(self) -> int:
            seen.append(len(bytes_below(root, memory)))
            return 0

    monkeypatch.setattr(program, "WorkerLoop", WorkerLoop)
    for name, value in {"API_URL": URL, "WORKSPACE": root, "ARENA_DIR": memory, "WORKER_ID": "a"}.items():
        monkeypatch.setenv(f"BATON_{name}", str(value))
    with Workspace.open(root, "a", memory, owner=ME) as space:
        work(space)
    for key in (KEY, OTHER_KEY):
        monkeypatch.setenv("BATON_API_KEY", key)
        assert program.main() == 0
    assert seen == [1, 0], "the store is kept for the same key"
