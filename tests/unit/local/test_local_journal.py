"""Test the journal: order, incomplete ends, damage, a kill at every step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from functions.local.emulated import journal as journal_module
from functions.local.emulated.journal import Journal, JournalDamagedError, Recovered


def contents(recovered: Recovered) -> list[Any]:
    return [*(recovered.state or []), *recovered.records]


def reopened(directory: Path) -> list[Any]:
    return contents(Journal(directory).recover())


def filled(directory: Path) -> Journal:
    journal = Journal(directory)
    journal.recover()
    journal.snapshot(["a"])
    journal.append("b")
    journal.append({"c": "ü\n"})
    return journal


def test_an_empty_directory_holds_nothing(tmp_path: Path) -> None:
    assert Journal(tmp_path / "new").recover() == Recovered(None, [])


def test_records_come_back_in_order_after_the_snapshot(tmp_path: Path) -> None:
    filled(tmp_path)  # not closed: as if killed
    assert Journal(tmp_path).recover() == Recovered(["a"], ["b", {"c": "ü\n"}])


def test_a_snapshot_replaces_the_journal(tmp_path: Path) -> None:
    filled(tmp_path).snapshot(["all"])
    assert Journal(tmp_path).recover() == Recovered(["all"], [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.2", "snapshot.json"]


def test_a_torn_last_line_is_ignored_and_does_not_come_back(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with (tmp_path / "journal.1").open("ab") as file:
        file.write(b'{"half": ')
    journal = Journal(tmp_path)
    recovered = journal.recover()
    assert recovered.records == ["b", {"c": "ü\n"}]
    journal.snapshot(contents(recovered))
    journal.append("d")
    assert reopened(tmp_path) == ["a", "b", {"c": "ü\n"}, "d"]


@pytest.mark.parametrize("name", ["journal.1", "snapshot.json"])
def test_damage_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    filled(tmp_path).close()
    path = tmp_path / name
    damaged = path.read_bytes().replace(b'"', b"", 1)
    path.write_bytes(damaged)
    with pytest.raises(JournalDamagedError, match=name):
        Journal(tmp_path).recover()
    assert path.read_bytes() == damaged


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    filled(tmp_path).close()
    path = tmp_path / "snapshot.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(JournalDamagedError, match="format 2"):
        Journal(tmp_path).recover()


def test_a_journal_is_long_when_it_outgrows_its_limit_and_the_state(tmp_path: Path) -> None:
    journal = Journal(tmp_path, limit_bytes=100)
    journal.recover()
    journal.snapshot(["s" * 1000])
    journal.append("r" * 200)
    lengths = [journal.is_long]
    journal.append("r" * 1000)
    lengths.append(journal.is_long)
    journal.snapshot(["s"])
    lengths.append(journal.is_long)
    assert lengths == [False, True, False]


def test_append_needs_a_snapshot_first(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="before the first snapshot"):
        Journal(tmp_path).append("a")


class Killed(BaseException):
    """End of the process."""


class Killer:
    """Allow the first `steps` file operations of this thread, and die in the next; a write dies halfway."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.dead = False
        self.thread = threading.get_ident()

    def step(self) -> None:
        if self.dead or self.left == 0:
            self.dead = True
            raise Killed
        self.left -= 1

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **named: Any) -> Any:
            # Threads of other tests may open files meanwhile.
            if threading.get_ident() == self.thread:
                self.step()
            return call(*arguments, **named)

        return stepped

    def write(self, file: int, data: memoryview) -> int:
        try:
            self.step()
        except Killed:
            os.write(file, data[: len(data) // 2])
            raise
        # Short writes are allowed to happen at any time.
        return os.write(file, data[: max(1, len(data) // 2)])


def play(directory: Path, answered: list[Any], trying: list[Any]) -> None:
    """Run a journal; collect the acknowledged records and the record in progress at the end."""
    journal = Journal(directory)
    state = contents(journal.recover())
    journal.snapshot(state)
    for number in range(6):
        trying[:] = [f"record {number}"]
        journal.append(trying[0])
        state.append(trying[0])
        answered.append(trying[0])
        trying.clear()
        if number % 2:
            journal.snapshot(state)


def test_a_kill_at_any_step_loses_nothing_answered_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = 0
    for steps in range(1000):
        directory = tmp_path / str(steps)
        answered: list[Any] = []
        trying: list[Any] = []
        killer = Killer(steps)
        with monkeypatch.context() as patch:
            for name in ("open", "fsync"):
                patch.setattr(os, name, killer.wrap(getattr(os, name)))
            patch.setattr(journal_module, "_write_all", lambda file, data, killer=killer: write_all(killer, file, data))
            for name in ("replace", "unlink", "mkdir"):
                patch.setattr(Path, name, killer.wrap(getattr(Path, name)))
            try:
                play(directory, answered, trying)
                finished = True
            except Killed:
                finished = False
        for attempt in range(2):  # recovering is itself repeatable
            found = reopened(directory)
            assert found in (answered, answered + trying), f"killed at step {steps}, attempt {attempt}"
        if finished:
            assert found == [f"record {number}" for number in range(6)]
            break
        deaths += 1
    assert finished
    assert deaths > 40


def write_all(killer: Killer, file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[killer.write(file, view) :]
