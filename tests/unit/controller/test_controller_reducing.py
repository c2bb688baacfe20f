"""What several processes reported, as one observation."""

from __future__ import annotations

import math
from typing import Any

import pytest
from controller_kit import Together, rule

from gpu_client.controller.engine import Engine
from gpu_client.controller.reducing import Gathering, Observed


def engine_of(when: str) -> Engine:
    engine = Engine(lambda decision: None)
    assert engine.install(1, rule("r", when), step=0) == ""
    return engine


def reduced(when: str, *reports: dict[str, Any]) -> dict[str, object]:
    """What the first of so many processes gets to see."""
    together, engine = Together(len(reports)), engine_of(when)
    gatherings = [Gathering(together.rank(number)) for number in range(len(reports))]
    for gathering, report in zip(gatherings, reports, strict=True):
        gathering.hand_in(1, report, now=0.0)
        assert gathering.exchange(engine) == []
    (found,) = gatherings[0].finish()
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
    engine = Engine(lambda decision: None)
    text = f"metrics: {{own.x: {about}}}\nrules: [{{name: r, when: {when}, do: save}}]"
    assert engine.install(1, text, step=0) == ""
    together = Together(len(values))
    gatherings = [Gathering(together.rank(number)) for number in range(len(values))]
    for gathering, value in zip(gatherings, values, strict=True):
        gathering.hand_in(1, {"own/x": value}, now=0.0)
        gathering.exchange(engine)
    (found,) = gatherings[0].finish()
    assert found.metrics["own.x"] == expected or (math.isnan(expected) and math.isnan(found.metrics["own.x"]))  # type: ignore[arg-type]


def test_steps_and_events_come_in_the_order_in_which_they_were_told() -> None:
    together, engine = Together(2), engine_of("loss > 1")
    first, second = (Gathering(together.rank(number)) for number in range(2))
    first.note(Observed("evaluate", 1, 0.5, {"eval.loss": 1.0}))
    first.hand_in(2, {"loss": 1.0}, now=1.0)
    first.hand_in(2, {"grad_norm": 1.0}, now=1.5)
    first.note(Observed("epoch", 2, 2.0, {}))
    for gathering in (first, second):
        assert gathering.exchange(engine) == []
    first.note(Observed("save", 2, 2.5, {}))
    assert [one.event for one in first.exchange(engine)] == ["evaluate", "step", "epoch"]
    second.exchange(engine)
    assert [one.event for one in first.exchange(engine)] == ["save"]


def test_what_is_under_way_can_be_saved_and_goes_on_all_the_same() -> None:
    together, engine = Together(2), engine_of("loss > 1")
    first, second = (Gathering(together.rank(number)) for number in range(2))
    for gathering, loss in ((first, 1.0), (second, math.nan)):
        gathering.hand_in(3, {"loss": loss, "other": object()}, now=4.0)
        gathering.exchange(engine)
    first.hand_in(4, {"loss": 7.0, "other": object()}, now=5.0)
    state = first.state(engine)
    assert state == {
        "gathered": [{"event": "step", "step": 3, "now": 4.0, "metrics": {"loss": "nan"}}],
        "mine": [{"event": "step", "step": 4, "now": 5.0, "metrics": {"loss": 7.0}}],
    }
    resumed = Gathering(Together(1).rank(0))
    resumed.load_state(state)
    for gathering in (first, resumed):
        (found,) = gathering.exchange(engine)
        assert (found.step, found.now) == (3, 4.0) and math.isnan(found.metrics["loss"])  # type: ignore[arg-type]
    assert [(one.step, one.metrics) for one in resumed.finish()] == [(4, {"loss": 7.0})]
