"""Tests marked `alone`: nobody else is running while they do, and nobody waits for ever."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import conftest
from tests.kits.runner.alone import turn
from tests.kits.waiting import soon


class House:
    """Two files to lock, and who is in."""

    def __init__(self, folder: Path) -> None:
        self.floor, self.door = folder / "floor", folder / "door"
        self.floor.touch()
        self.door.touch()
        self.inside: list[str] = []
        self._leave: dict[str, threading.Event] = {}
        self._guests: list[threading.Thread] = []

    def comes(self, name: str, *, alone: bool = False) -> None:
        """Somebody comes, and stays until told to leave."""
        leave = self._leave[name] = threading.Event()

        def visit() -> None:
            with turn(alone=alone, floor=self.floor, door=self.door):
                self.inside.append(name)
                leave.wait(10)
                self.inside.remove(name)

        guest = threading.Thread(target=visit)
        self._guests.append(guest)
        guest.start()

    def leaves(self, name: str) -> None:
        self._leave[name].set()

    def somebody_is_in_the_door(self) -> bool:
        with self.door.open() as door:
            try:
                fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def close(self) -> None:
        for leave in self._leave.values():
            leave.set()
        for guest in self._guests:
            guest.join(10)
            assert not guest.is_alive()


@contextmanager
def opened(folder: Path) -> Iterator[House]:
    house = House(folder)
    try:
        yield house
    finally:
        house.close()


def test_many_run_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as house:
        house.comes("a")
        house.comes("b")
        soon(lambda: sorted(house.inside) == ["a", "b"])


def test_who_must_be_alone_waits_and_is_passed_by_nobody(tmp_path: Path) -> None:
    with opened(tmp_path) as house:
        house.comes("a")
        soon(lambda: house.inside == ["a"])
        house.comes("alone", alone=True)
        soon(house.somebody_is_in_the_door)
        house.comes("late")
        assert house.inside == ["a"]
        house.leaves("a")
        soon(lambda: house.inside == ["alone"])
        soon(house.somebody_is_in_the_door)
        house.leaves("alone")
        soon(lambda: house.inside == ["late"])


def test_a_process_that_was_left_behind_keeps_nobody_out(tmp_path: Path) -> None:
    with opened(tmp_path) as house:
        reading, writing = os.pipe()
        with turn(alone=True, floor=house.floor, door=house.door):
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
        try:
            house.comes("next", alone=True)
            soon(lambda: house.inside == ["next"])
        finally:
            os.close(reading)
            os.close(writing)
            os.waitpid(child, 0)


class Marked:
    """As much of a test as the hook looks at."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return getattr(pytest.mark, name).mark if name in self._marks else None


@pytest.mark.parametrize(("marks", "alone"), [((), False), (("slow",), False), (("slow", "alone"), True)])
def test_the_mark_is_heeded(marks: tuple[str, ...], alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def watched_turn(*, alone: bool) -> Iterator[None]:
        told.append(f"came, alone: {alone}")
        yield
        told.append("left")

    monkeypatch.setattr(conftest, "turn", watched_turn)
    protocol = conftest.pytest_runtest_protocol(Marked(*marks))  # type: ignore[arg-type]
    next(protocol)
    assert told == [f"came, alone: {alone}"], "and the test runs"
    with pytest.raises(StopIteration) as done:
        protocol.send(True)
    assert done.value.value is True and told[1:] == ["left"]
