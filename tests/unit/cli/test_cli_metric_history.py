"""The metric history of all attempts contains each step once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from baton.contract.worker.metric_history import MetricHistory, join_attempts
from baton.contract.worker.output import MetricPoint
from gpu_client.cli.insight.metric_history import goal_of, merge_nodes, summarize_metrics


def points(epoch: int, steps: Iterable[int], **metrics: float) -> list[MetricPoint]:
    said = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
    said = said or {"loss": epoch / 10}
    return [MetricPoint(epoch=epoch, step=step, at=step, metrics=said) for step in steps]


def seen(history: MetricHistory) -> list[tuple[int, int]]:
    return [(point.epoch, point.step) for point in history.kept]


def void(history: MetricHistory) -> list[tuple[int, int]]:
    return [(point.epoch, point.step) for point in history.void]


def test_one_attempt_is_its_history() -> None:
    history = join_attempts(points(1, range(1, 6)))
    assert seen(history) == [(1, step) for step in range(1, 6)]
    assert history.void == []


@pytest.mark.parametrize("known", [True, False])
def test_what_lies_behind_the_step_that_the_next_attempt_resumed_from_is_void(known: bool) -> None:
    told = [*points(1, range(1, 9)), *points(2, range(5, 8)), *points(3, range(7, 10))]
    history = join_attempts(told, {1: None, 2: 4, 3: 6} if known else None)
    assert seen(history) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6), (3, 7), (3, 8), (3, 9)]
    assert void(history) == [(1, 5), (1, 6), (1, 7), (1, 8), (2, 7)]


def test_a_sparse_attempt_does_not_keep_what_it_went_back_behind() -> None:
    """An attempt that resumed at 4 and first reports 8 voids the steps 5 to 7 of the attempt before."""
    history = join_attempts([*points(1, range(1, 8)), *points(2, (8, 12))], {1: None, 2: 4})
    assert seen(history) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 8), (2, 12)]


def test_an_attempt_that_began_anew_voids_everything() -> None:
    history = join_attempts([*points(1, range(1, 8)), *points(2, range(1, 3))], {1: None, 2: None})
    assert seen(history) == [(2, 1), (2, 2)]


def test_an_attempt_that_reported_nothing_yet_changes_nothing() -> None:
    assert seen(join_attempts(points(1, range(1, 4)), {1: None, 2: 1})) == [(1, 1), (1, 2), (1, 3)]


def test_a_damaged_checkpoint_leads_further_back_than_was_planned() -> None:
    history = join_attempts([*points(1, range(1, 9)), *points(2, range(3, 6))], {1: None, 2: 6})
    assert seen(history) == [(1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]


def test_an_attempt_that_goes_back_itself() -> None:
    """A step of a plan that is tried again, on the same machine."""
    history = join_attempts([*points(1, range(1, 6)), *points(1, range(3, 8), loss=0.9)], {1: None})
    assert seen(history) == [(1, step) for step in range(1, 8)]
    assert [point.metrics["loss"] for point in history.kept] == [0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9]
    assert void(history) == [(1, 3), (1, 4), (1, 5)]


def test_points_of_one_step_are_one() -> None:
    told = [*points(1, [10], loss=0.5), *points(1, [10], **{"eval.loss": 0.7}), *points(1, [11], loss=0.4)]
    history = join_attempts(told)
    assert [point.metrics for point in history.kept] == [{"loss": 0.5, "eval.loss": 0.7}, {"loss": 0.4}]


def test_an_evaluation_that_comes_late_is_put_where_it_belongs() -> None:
    told = [*points(1, (10, 11, 13), loss=0.5), *points(1, [10, 12], **{"eval.loss": 0.7}), *points(1, [14], loss=0.4)]
    history = join_attempts(told)
    assert seen(history) == [(1, step) for step in (10, 11, 12, 13, 14)]
    assert history.kept[0].metrics == {"loss": 0.5, "eval.loss": 0.7}
    assert history.kept[2].metrics == {"eval.loss": 0.7}
    assert history.void == []


def test_where_it_resumed_is_said_without_metrics_and_hides_nothing() -> None:
    """Trainings say once how far they are before they begin."""
    told = [*points(1, range(1, 6)), MetricPoint(epoch=2, step=3, at=1, metrics={}), *points(2, range(4, 7))]
    for resumed in ({1: None, 2: 3}, None):
        history = join_attempts(told, resumed)
        assert seen(history) == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
        assert history.kept[2].metrics == {"loss": 0.1}


def test_whatever_comes_each_step_is_there_once_and_nothing_vanishes() -> None:
    told = [point for epoch, begin, end in ((1, 5, 40), (2, 20, 21), (3, 1, 60), (5, 30, 90), (6, 90, 95))
            for point in points(epoch, range(begin, end))]  # fmt: skip
    history = join_attempts(told)
    steps = [point.step for point in history.kept]
    assert steps == sorted(set(steps))
    assert len(history.kept) + len(history.void) == len(told)


def test_a_metric_in_a_few_numbers() -> None:
    told = [
        *points(1, [1], loss=0.9), *points(1, [2], loss=math.inf), *points(1, [3], loss=0.2),
        *points(1, [4], loss=0.2), *points(1, [5], accuracy=0.5),
    ]  # fmt: skip
    told.append(MetricPoint(epoch=1, step=6, at=6, metrics={"loss": "nan"}))
    [found] = summarize_metrics(["loss", "nothing"], told)
    assert (found.points, found.not_finite, found.first) == (5, 2, 0.9)
    assert math.isnan(found.last)
    assert (found.best, found.best_step, found.lowest, found.highest) == (0.2, 3, 0.2, 0.9)
    [odd] = summarize_metrics(["x"], points(1, [1], x=math.nan))
    assert odd.best is None and odd.lowest is None


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("loss", "min"),
        ("eval/loss", "min"),
        ("val.my_loss", "min"),
        ("eval.accuracy", "max"),
        ("lr", None),
        ("x", None),
    ],
)
def test_which_values_are_better(name: str, goal: str | None) -> None:
    assert goal_of(name) == goal


def test_the_loss_comes_first() -> None:
    told = points(1, [1], lr=1.0, **{"train/f1": 1.0, "eval.accuracy": 1.0, "eval.loss": 1.0, "loss": 1.0})
    assert join_attempts(told).names() == ["loss", "eval.loss", "eval.accuracy", "lr", "train/f1"]


def node(seat: int, at: float, rounds: dict[int, dict[str, Any]]) -> MetricHistory:
    found = [
        MetricPoint(epoch=1 + seat, step=step, at=at + step, seat=seat, metrics=metrics)
        for step, metrics in rounds.items()
    ]
    return join_attempts(found)


def test_nodes_are_merged_to_the_loss_of_the_world() -> None:
    nodes = [
        node(0, 0, {1: {"loss": 9.0, "world.loss": 3.0, "world.nodes": 2, "lr": 0.1, "gpu.temp": 60.0}}),
        node(
            1, 0, {1: {"loss": 1.0, "world.loss": 3.0, "world.nodes": 2, "lr": 0.3, "gpu.temp": 70.0}, 2: {"loss": 2.0}}
        ),
    ]
    merged = merge_nodes(nodes)
    assert [(one.epoch, one.step, one.seat) for one in merged.kept] == [(1, 1, None), (1, 2, None)]
    first = {"loss": 3.0, "world.loss": 3.0, "world.nodes": 2.0, "lr": pytest.approx(0.2), "gpu.temp": 70.0}
    assert [one.metrics for one in merged.kept] == [first, {"loss": 2.0}]
    assert merged.void == []


def test_a_round_that_a_later_world_repeats_is_void() -> None:
    gone = node(0, 0, {1: {"world.loss": 3.0}, 2: {"world.loss": 2.0}})
    later = node(1, 100, {2: {"world.loss": 2.5, "loss": 7.0}})
    merged = merge_nodes([gone, later])
    assert [(one.step, one.metrics["loss"]) for one in merged.kept] == [(1, 3.0), (2, 2.5)]
    assert void(merged) == [(1, 2)]


def test_nan_at_one_node_is_nan_of_the_training() -> None:
    (point,) = merge_nodes([node(0, 0, {1: {"loss": "nan"}}), node(1, 0, {1: {"loss": 1.0}})]).kept
    assert point.metrics["loss"] == "nan"
