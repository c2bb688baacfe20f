"""Reports of several ranks, reduced to one observation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from controller_kit import rule

from gpu_client.controller.rank_aggregation import Observation, RankAggregator
from gpu_client.controller.rule_engine import RuleEngine


def engine_of(when: str) -> RuleEngine:
    engine = RuleEngine(lambda decision: None)
    assert engine.install(1, rule("r", when), step=0) == ""
    return engine


def reduced(when: str, *reports: dict[str, Any]) -> dict[str, object]:
    """Return the observation of the first rank."""
    return observed(engine_of(when), reports)


def observed(engine: RuleEngine, reports: Sequence[dict[str, Any]]) -> dict[str, object]:
    gatherings = [RankAggregator() for _ in reports]
    for gathering, report in zip(gatherings, reports, strict=True):
        gathering.add_step(1, report, now=0.0)
    rows = [gathering.contribution(engine) for gathering in gatherings]
    (found,) = gatherings[0].reduce_rows(rows, engine)
    return dict(found.metrics)


@pytest.mark.parametrize(
    ("when", "reports", "expected"),
    [
        ("loss > 1", [{"loss": 1.0}, {"loss": 2.0}], {"loss": 1.5}),
        ("loss > 1", [{"loss": 0.1}] * 3, {"loss": 0.1}),
        ("loss > 1", [{"loss": 0.1}, {}], {"loss": 0.1}),
        ("loss > 1", [{}, {"other": 1.0}], {}),
        ("loss > 1", [{"loss": 1.0}, {"loss": None}], {"loss": 1.0}),
        ("loss > 1", [{"loss": 1.0}, {"loss": "text"}], {"loss": 1.0}),
        ("loss > 1", [{"loss": 1.0}, {"loss": math.nan}], {"loss": math.nan}),
        ("loss > 1", [{"loss": 1.0}, {"loss": math.inf}], {"loss": math.inf}),
        ("loss > 1", [{"loss": -math.inf}, {"loss": math.inf}], {"loss": math.nan}),
        ("step.time > 1s", [{"step.time": 1.0}, {"step.time": 3.0}], {"step.time": 3.0}),
        ("gpu.mem > 1GB", [{"gpu.mem": 1.0}, {"gpu.mem": math.nan}], {"gpu.mem": math.nan}),
        ("lr > 1 and loss > 1", [{"learning_rate": 1.0}, {"loss": 3.0}], {"lr": 1.0, "loss": 3.0}),
    ],
)
def test_values_of_all_become_one(when: str, reports: list[dict[str, Any]], expected: dict[str, float]) -> None:
    found = reduced(when, *reports)
    assert found.keys() == expected.keys()
    assert all(found[name] == value or math.isnan(value) for name, value in expected.items())
    assert [math.isnan(value) for value in found.values()] == [math.isnan(value) for value in expected.values()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("about", "values", "expected"),
    [
        ("{}", [1.0, 2.0, 6.0], 3.0),
        ("{reduce: mean}", [1.0, 2.0, 6.0], 3.0),
        ("{reduce: max}", [1.0, 2.0, 6.0], 6.0),
        ("{reduce: min}", [1.0, 2.0, 6.0], 1.0),
        ("{reduce: sum}", [1.0, 2.0, 6.0], 9.0),
        ("{reduce: min}", [1.0, math.nan, 6.0], math.nan),
        ("{reduce: sum}", [1.0, None, 6.0], 7.0),
        ("{kind: duration}", [1.0, 2.0, 6.0], 6.0),
        ("{kind: size, reduce: min}", [1.0, 2.0, 6.0], 1.0),
        ("{kind: bool}", [False, True, False], 1.0),
        ("{kind: bool, reduce: min}", [False, True, True], 0.0),
    ],
)
def test_a_declared_metric_is_reduced_as_it_says(about: str, values: list[Any], expected: float) -> None:
    unit = "s" if "duration" in about else "B" if "size" in about else ""
    when = {"s": "own.x > 1s", "B": "own.x > 1kB", "": "own.x > 1"}[unit] if "bool" not in about else "own.x"
    engine = RuleEngine(lambda decision: None)
    text = f"metrics: {{own.x: {about}}}\nrules: [{{name: r, when: {when}, do: save}}]"
    assert engine.install(1, text, step=0) == ""
    found = observed(engine, [{"own/x": value} for value in values])["own.x"]
    assert found == expected or (math.isnan(expected) and math.isnan(found))  # type: ignore[arg-type]


def test_steps_and_events_come_in_the_order_in_which_they_were_told() -> None:
    engine, first = engine_of("loss > 1"), RankAggregator()
    first.add_event(Observation("evaluate", 1, 0.5, {"eval.loss": 1.0}))
    first.add_step(2, {"loss": 1.0}, now=1.0)
    first.add_step(2, {"grad_norm": 1.0}, now=1.5)
    first.add_event(Observation("epoch", 2, 2.0, {}))
    rows = [first.contribution(engine), RankAggregator().contribution(engine)]
    assert [one.event for one in first.reduce_rows(rows, engine)] == ["evaluate", "step", "epoch"]
    first.add_event(Observation("save", 2, 2.5, {}))
    rows = [first.contribution(engine), RankAggregator().contribution(engine)]
    assert [one.event for one in first.reduce_rows(rows, engine)] == ["save"]


def test_what_nobody_has_looked_at_can_be_saved_and_goes_on_all_the_same() -> None:
    engine, first = engine_of("loss > 1"), RankAggregator()
    first.add_event(Observation("save", 3, 4.0, {"step": 3}))
    first.add_step(4, {"loss": 7.0, "other": object()}, now=5.0)
    state = first.state(engine)
    assert state == [
        {"event": "save", "step": 3, "now": 4.0, "metrics": {}},
        {"event": "step", "step": 4, "now": 5.0, "metrics": {"loss": 7.0}},
    ]
    resumed = RankAggregator()
    resumed.load_state(state)
    for gathering in (first, resumed):
        rows = [gathering.contribution(engine), [1.0, math.nan]]
        saved, found = gathering.reduce_rows(rows, engine)
        assert (saved.event, found.step, found.now) == ("save", 4, 5.0)
        assert math.isnan(found.metrics["loss"])  # type: ignore[arg-type]
    assert resumed.take_rest() == []
