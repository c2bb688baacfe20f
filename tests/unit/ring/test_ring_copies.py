"""Test the generator pool: an unreachable store ends none of the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.records import PUBLISHER
from gpu_client.ring.generating.generator_pool import GeneratorPool
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock
from tests.unit.ring.ring_kit import MortalStore
from tests.unit.ring.ring_scene import Scene


class Told:
    """The session's part that records reports."""

    should_stop = False

    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []

    def report(self, step: int, total: int, **metrics: object) -> None:
        self.reports.append((step, total))

    def phase(self, name: str, done: int, total: int) -> None: ...


class Process:
    """A process that ends after its fifth poll."""

    made: list[Process]

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        if command[0] == "missing":
            raise FileNotFoundError(command[0])
        self.looks_left = 5
        self.returncode: int | None = None
        self.killed = self.waited = False
        self.made.append(self)

    def poll(self) -> int | None:
        self.looks_left -= 1
        if self.looks_left <= 0 and self.returncode is None:
            self.returncode = 0
        return self.returncode

    def kill(self) -> None:
        self.killed = self.returncode is None
        self.returncode = self.returncode if self.returncode is not None else -9

    def terminate(self) -> None: ...

    def wait(self) -> None:
        self.waited = True


class Unreachable(MortalStore):
    """Cannot be reached any more, once it is cut off."""

    cut_off = False

    def _do(self, operation: Callable[[], Any]) -> Any:
        if self.cut_off:
            raise OSError("no route")
        return operation()


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    made: list[Process] = []
    monkeypatch.setattr(Process, "made", made, raising=False)
    monkeypatch.setattr("gpu_client.ring.generating.generator_pool.subprocess.Popen", Process)
    return made


def watched(store: Unreachable, told: Told, *programs: str, again: bool = True) -> GeneratorPool:
    clock = Clock()
    ring = (
        Ring.open(store, clock=clock)
        if store.record("ring.json")
        else Ring.make(store, RingSettings(cap=8), clock=clock)
    )
    found = GeneratorPool(
        ring,
        {f"w-{number}": [program] for number, program in enumerate(programs)},
        {},
        told,
        count=4,
        again=again,
        clock=clock,
        pause=lambda seconds: clock.advance(1.0),
    )
    # Without a thread; it holds the publisher's record, which it gives up at the end.
    found._maintainer.start = lambda: None  # type: ignore[method-assign]
    assert found._maintainer.turn()
    return found


def test_a_store_that_cannot_be_reached_is_passed_over_until_the_copies_end(processes: list[Process]) -> None:
    store, told = Unreachable(MemoryStore()), Told()
    found = watched(store, told, "a", "b")
    assert store.store.record(PUBLISHER) is not None
    store.cut_off = True
    assert found.run() == 0
    assert [one.returncode for one in processes] == [0, 0]
    assert not any(one.killed for one in processes)
    assert told.reports == []


def test_what_was_put_is_told_again_once_the_store_is_back(processes: list[Process]) -> None:
    store, told = Unreachable(MemoryStore()), Told()
    found = watched(store, told, "a", "b")
    store.swap("generators/w-0", b'{"put": 3}', None)
    store.cut_off = True
    poll = Process.poll

    def back(one: Process) -> int | None:
        store.cut_off = one.looks_left > 2
        return poll(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Process, "poll", back)
        assert found.run() == 0
    assert told.reports[-1] == (3, 4)
    assert not any(one.killed for one in processes)
    assert store.record(PUBLISHER) is None, "left to others at once"


def test_one_that_cannot_be_started_leaves_no_other_one_behind(processes: list[Process]) -> None:
    store = Unreachable(MemoryStore())
    with pytest.raises(FileNotFoundError, match="missing"):
        watched(store, Told(), "a", "missing", "b").run()
    [only] = processes
    assert only.killed and only.waited


@pytest.mark.parametrize("again", [True, False])
def test_what_was_counted_under_names_that_never_come_again_goes_at_the_end(
    processes: list[Process], again: bool
) -> None:
    """The counts of names that never come again are deleted at the end; each start of a pool left two of them."""
    store, told = Unreachable(MemoryStore()), Told()
    found = watched(store, told, "a", "b", again=again)
    folder = "generators/" if again else "copies/"
    store.swap(f"{folder}w-0", b'{"put": 3}', None)
    store.swap(f"{folder}w-1", b'{"put": 1}', None)
    store.swap("generators/job-1", b'{"put": 9}', None)
    poll = Process.poll

    def forgotten(one: Process) -> int | None:
        if one.looks_left == 2 and not again:
            store.delete(["copies/w-0"])  # by a collector: it has ended
        return poll(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Process, "poll", forgotten)
        assert found.run() == 0
    assert told.reports[-1] == (4, 4)
    assert store.keys("copies/") == []
    kept = ["generators/job-1", *(["generators/w-0", "generators/w-1"] if again else [])]
    assert store.keys("generators/") == kept


def test_where_the_store_cannot_be_reached_at_the_end_a_collector_forgets_them(
    processes: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(lease_s=10.0)
    store = Unreachable(scene.store)
    found = watched(store, Told(), "a", "b", again=False)
    for name in ("w-0", "w-1", "alive"):
        store.swap(f"copies/{name}", b'{"put": 3}', None)
    store.swap("generators/job-1", b'{"put": 9}', None)
    alive = scene.writer("alive")
    store.cut_off = True
    assert found.run() == 0
    assert "cannot be deleted now" in caplog.text
    scene.collector.collect()
    scene.clock.advance(10.0)
    alive.renew()
    scene.collector.collect()
    assert len(scene.store.keys("copies/")) == 3, "whoever has only just gone may come back"
    scene.bury(alive)
    assert scene.store.keys("copies/") == ["copies/alive"]
    assert scene.store.keys("generators/") == ["generators/job-1"]
    alive.close()
    scene.bury()
    assert scene.store.keys("copies/") == []
