"""Test forks while a thread is inside the store, as DataLoader workers are forked."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import DirectoryStore, _lock_fds
from gpu_client.ring.store.memory import MemoryStore
from tests.unit.ring.reading_scene import Scene


@contextmanager
def child(act: Callable[[], object] = lambda: None) -> Iterator[Callable[[], int]]:
    """A forked process that acts, and then lives until the end. What is given waits for it to have acted: 0 if well."""
    acted, act_end = os.pipe()
    live, live_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(live_end)
        try:
            act()
            os.write(act_end, b"\0")
        except BaseException:
            os.write(act_end, b"\1")
        os.read(live, 1)
        os._exit(0)
    os.close(act_end)
    os.close(live)
    try:
        yield lambda: os.read(acted, 1)[0]
    finally:
        os.close(live_end)
        os.waitpid(pid, 0)
        os.close(acted)


def is_free(root: Path) -> bool:
    """Return whether the ring's lock is free."""
    with (root / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def test_a_process_that_is_forked_while_the_lock_is_held_does_not_keep_it(
    store: DirectoryStore, tmp_path: Path
) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store._lock():
            inside.set()
            assert leave.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(30)
    with child() as acted:
        assert acted() == 0
        assert not is_free(tmp_path), "what a child does is no release"
        leave.set()
        holder.join()
        assert is_free(tmp_path)
        assert store.swap("pointer", b"1", None) is not None
    assert not _lock_fds


def test_a_process_that_is_forked_while_a_thread_waits_for_the_lock_does_not_keep_it(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, asked = fcntl.flock, threading.Event()

    def told(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            asked.set()
        flock(fd, how)

    with store._lock():
        monkeypatch.setattr(fcntl, "flock", told)
        swapped: list[str | None] = []
        waiting = threading.Thread(target=lambda: swapped.append(store.swap("pointer", b"1", None)), daemon=True)
        waiting.start()
        assert asked.wait(30)
        forked = child()
        acted = forked.__enter__()
    try:
        assert acted() == 0
        waiting.join(30)
        assert len(swapped) == 1 and swapped[0] is not None
        monkeypatch.undo()
        assert is_free(tmp_path)
    finally:
        forked.__exit__(None, None, None)


def test_a_process_that_is_forked_inside_leaves_the_lock_to_its_parent(store: DirectoryStore, tmp_path: Path) -> None:
    held = store._lock()
    held.__enter__()
    with child(lambda: held.__exit__(None, None, None)) as acted:
        assert acted() == 0
        assert not is_free(tmp_path)
        held.__exit__(None, None, None)
        assert is_free(tmp_path)


def test_a_process_that_dies_inside_leaves_the_lock_to_nobody(store: DirectoryStore, tmp_path: Path) -> None:
    """A process that dies inside the lock frees the lock, although its child lives on, as a trainer's workers do."""
    live, live_end = os.pipe()
    forked, forked_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with store._lock():
            if os.fork() == 0:
                os.write(forked_end, b"\0")
                os.close(live_end)
                os.read(live, 1)
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(forked, 1), "the grandchild has run its handlers of forks"
    os.close(live)
    try:
        assert is_free(tmp_path)
    finally:
        for fd in (live_end, forked, forked_end):
            os.close(fd)


def test_what_a_thread_held_in_memory_is_free_in_a_forked_process() -> None:
    scene = Scene()
    scene.put(2)
    ring = Ring.open(scene.store)
    with ring._lock, scene.store._lock, child(lambda: ring.newest().slots[1]) as acted:
        assert acted() == 0
    assert len(ring.newest()) == 2


def test_locks_that_are_free_stay_so_in_a_forked_process() -> None:
    ring = Ring.make(MemoryStore(), RingSettings(cap=4))

    def use() -> None:
        assert not ring._lock.locked()
        assert ring.newest().number == 0
        assert ring.store.keys("samples/") == []

    with child(use) as acted:
        assert acted() == 0
