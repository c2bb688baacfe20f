"""The metrics that the agent receives: every new value with its step, in at most five messages a second."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_client.agent.control.channel_messages import Point, TrainingProgress, parse
from gpu_client.training.channel import MAX_CARRIED, PROGRESS_INTERVAL_S, AgentChannel
from tests.kits.clock import Clock
from tests.kits.waiting import until


class Ear:
    """An agent's end that only listens."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self.clock = Clock()
        self.channel = AgentChannel(str(path), lambda directive: None, clock=self.clock)
        self._connection, _ = self._listener.accept()

    def report(self, step: int, total: int, metrics: dict[str, object]) -> None:
        """And wait until it is under way: one that is not gives way to the next."""
        self.channel.report(step, total, metrics)
        until(lambda: self.channel._progress is None)

    def heard(self) -> list[TrainingProgress]:
        """Close the channel; return all progress that the training sent."""
        self.channel.close()
        data = b""
        while piece := self._connection.recv(65536):
            data += piece
        found = [parse(line, []) for line in data.splitlines()]
        return [one for one in found if isinstance(one, TrainingProgress)]

    def points(self) -> list[Point]:
        return [point for one in self.heard() for point in one.points]

    def close(self) -> None:
        self._listener.close()
        self._connection.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    ear = Ear(tmp_path / "c")
    yield ear
    ear.close()


def test_a_report_is_a_point(ear: Ear) -> None:
    ear.channel.report(1, 10, {"loss": 0.5})
    (progress,) = ear.heard()
    assert progress == TrainingProgress(1, 10, {"loss": 0.5})
    assert progress.points == (Point(1, {"loss": 0.5}),)


def test_what_is_not_finite_is_told_in_words(ear: Ear) -> None:
    ear.channel.report(10, 10, {"loss": math.nan, "a": math.inf, "b": -math.inf, "lr": 0.1})
    (progress,) = ear.heard()
    assert progress.metrics == {"lr": 0.1}
    assert progress.nonfinite == {"loss": "nan", "a": "inf", "b": "-inf"}
    assert progress.points == (Point(10, {"lr": 0.1, "loss": "nan", "a": "inf", "b": "-inf"}),)


def test_an_evaluation_is_not_lost_behind_the_report_that_came_just_before(ear: Ear) -> None:
    """The report was delayed by 0.2 s, and then replaced by the next step's report."""
    ear.report(100, 1000, {"loss": 0.5})
    ear.clock.now += PROGRESS_INTERVAL_S / 4
    ear.channel.report(100, 1000, {"eval_loss": 0.7})
    ear.clock.now += 10
    ear.channel.report(101, 1000, {"loss": 0.4})
    assert ear.points() == [Point(100, {"loss": 0.5}), Point(100, {"eval_loss": 0.7}), Point(101, {"loss": 0.4})]


def test_what_is_noted_beside_the_reports_comes_with_the_next_one(ear: Ear) -> None:
    ear.channel.add_metrics(50, {"eval.loss": 0.7})
    ear.report(51, 1000, {"loss": 0.4})
    ear.channel.add_metrics(51, {"eval.loss": math.nan})
    assert ear.points() == [Point(50, {"eval.loss": 0.7}), Point(51, {"loss": 0.4}), Point(51, {"eval.loss": "nan"})]


def test_numbers_of_earlier_steps_are_shown_but_no_news(ear: Ear) -> None:
    ear.channel.report(7, 10, {"loss": 0.5, "epoch": 0.7}, new={"epoch": 0.7})
    (progress,) = ear.heard()
    assert progress.metrics == {"loss": 0.5, "epoch": 0.7}
    assert progress.points == (Point(7, {"epoch": 0.7}),)


def test_how_far_something_between_steps_is_makes_no_point(ear: Ear) -> None:
    ear.channel.report(0, 10, {"images": 7, "images_total": 20}, phase=("images", 7, 20), new={})
    (progress,) = ear.heard()
    assert progress.phase == ("images", 7)
    assert progress.points == ()


def test_the_newest_of_what_came_too_fast_counts(ear: Ear) -> None:
    ear.report(1, 1000, {"loss": 1})
    for step in range(2, 1000):
        ear.channel.report(step, 1000, {"loss": step})
    assert [point.step for point in ear.points()] == [1, 999]


def test_what_waits_is_bounded(ear: Ear) -> None:
    for number in range(10 * MAX_CARRIED):
        ear.channel.add_metrics(1, {f"m{number}": number})
    ear.channel.report(2, 10, {"loss": 1})
    carried, own = ear.points()
    assert len(carried.metrics) == MAX_CARRIED
    assert own == Point(2, {"loss": 1})


def line(**fields: Any) -> bytes:
    return json.dumps({"type": "progress", "step": 5, "total": 10, **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "points"),
    [
        ({"metrics": {"loss": 1.0}, "nonfinite": {"a": "nan", "b": "infinite", "c": 1.0, "no name": "nan"}},
         (Point(5, {"loss": 1.0, "a": "nan"}),)),
        ({"nonfinite": ["nan"]}, (Point(5, {}),)),
        ({"points": [{"step": 4, "metrics": {"loss": "nan", "a": "x", "b": True, "c": 10**400}}]},
         (Point(4, {"loss": "nan"}),)),
        ({"points": ["x", 7, {"step": 4}]}, (Point(4, {}),)),
        ({"points": "x"}, (Point(5, {}),)),
    ],
)  # fmt: skip
def test_a_stranger_s_words_are_taken_as_far_as_they_make_sense(fields: dict[str, Any], points: Any) -> None:
    progress = parse(line(**fields), [])
    assert isinstance(progress, TrainingProgress)
    assert progress.points == points
