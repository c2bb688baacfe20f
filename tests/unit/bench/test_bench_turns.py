"""Taking turns: one runs at a time, and only its own turns count."""

from __future__ import annotations

import pytest

from bench.harness.turns import Subject, overlap_s, take_turns


class Stage:
    """A clock that only sleeping moves, and what happens on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running: set[str] = set()
        self.worked_s: dict[str, float] = {}

    def sleep(self, seconds: float) -> None:
        for name in self.running:
            self.worked_s[name] = self.worked_s.get(name, 0.0) + seconds
        self.now += seconds

    def clock(self) -> float:
        return self.now


class FakeProcess:
    def __init__(self, stage: Stage, name: str) -> None:
        self._stage, self._name = stage, name

    def suspend(self) -> None:
        self._stage.running.discard(self._name)

    def resume(self) -> None:
        self._stage.running.add(self._name)
        working = {name.split("/")[0] for name in self._stage.running}
        assert len(working) == 1 or all(seconds >= 1 for seconds in self._stage.worked_s.values()), working


def subject(stage: Stage, name: str, work_s: float) -> Subject:
    family = [FakeProcess(stage, f"{name}/{part}") for part in ("agent", "trainer")]
    return Subject(family, lambda: stage.worked_s.get(f"{name}/trainer", 0.0) >= work_s)


def test_each_gets_its_turns_until_all_have_ended() -> None:
    stage = Stage()
    short, long = subject(stage, "short", 1.0), subject(stage, "long", 1.5)
    take_turns([short, long], timeout_s=60, slice_s=0.5, clock=stage.clock, sleep=stage.sleep)
    assert short.turns == [(0.0, 0.5), (1.0, 1.5)]
    assert long.turns == [(0.5, 1.0), (1.5, 2.0), (2.0, 2.5)]
    # Afterwards all go on, to come to their ends.
    assert stage.running == {"short/agent", "short/trainer", "long/agent", "long/trainer"}


def test_one_that_never_ends_does_not_hold_up_the_bench_for_ever() -> None:
    stage = Stage()
    endless = Subject([], lambda: False)
    with pytest.raises(TimeoutError, match="not over after 3 s"):
        take_turns([endless], timeout_s=3, slice_s=0.5, clock=stage.clock, sleep=stage.sleep)


def test_only_what_lies_within_the_turns_counts() -> None:
    turns = [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    assert overlap_s((0.5, 4.25), turns) == pytest.approx(0.5 + 1.0 + 0.25)
    assert overlap_s((1.0, 2.0), turns) == 0.0
    assert overlap_s((0.25, 0.5), turns) == pytest.approx(0.25)
