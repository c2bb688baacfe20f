"""Test faults of the replaced rule language: absent metrics, results that are no truth value, clocks."""

from __future__ import annotations

import pytest

from baton.contract.rules.document.loader import load_values
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import State
from baton.contract.rules.language.checker import check_condition
from baton.contract.rules.language.faults import Code
from tests.kits.rules.expressions import METRICS, value_of


def evaluator_of(when: str, **more: object) -> Evaluator:
    loaded = load_values({"rules": [{"name": "r", "when": when, "do": "stop", **more}]})
    assert loaded.rules is not None, loaded.faults
    return Evaluator(loaded.rules)


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("m > 0 and true", "the action fired"),
        ("true and m > 0", "the action fired"),
        ("not m > 0", "false in silence"),
        ("m > 0 or x > 1", "the training died"),
        ("1 + m > 2", "the training died"),
        ("2 < m * 3", "the training died"),
        ("0 < m < 1", "skipped"),
        ("coalesce(m, m) > 0", "no such function"),
        ("abs(m) < 3", "skipped"),
    ],
)
def test_a_metric_that_is_not_there_is_unknown_wherever_it_stands(text: str, before: str) -> None:
    assert value_of(text, x=0.0) is None, before
    evaluator = evaluator_of(text, on="step")
    assert not evaluator.observe({"x": 0.0}, step=1, now=1.0)
    assert [one.state for one in evaluator.statuses()] == [State.UNKNOWN]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("m and true", Code.WRONG_TYPE),
        ("not m", Code.WRONG_TYPE),
        ("m or x", Code.WRONG_TYPE),
        ("count(x) and x > 1", Code.WRONG_TYPE),
        ("len(m)", Code.UNKNOWN_FUNCTION),
        ("str(m) == 1", Code.UNKNOWN_FUNCTION),
        ("2 + 2", Code.WRONG_TYPE),
        ("m == None", Code.SYNTAX),
        ("m.x__y > 1 and __import__(m) > 1", Code.UNKNOWN_FUNCTION),
        ("__class__ > 1", Code.SYNTAX),
        ("a; b", Code.SYNTAX),
        ("m = true", Code.SYNTAX),
    ],
)
def test_what_was_true_by_accident_or_ended_the_training_is_refused(text: str, code: Code) -> None:
    checked = check_condition(text, METRICS)
    assert checked.typed is None
    assert checked.faults[0].code is code and checked.faults[0].remedy


def test_two_underscores_in_a_row_are_part_of_a_name() -> None:
    """A name may contain two underscores in a row; the replaced language refused them, even within a text."""
    assert evaluator_of("a__b > 1").observe({"a__b": 2.0}, step=1, now=1.0)


def test_what_is_not_known_neither_counts_nor_resets() -> None:
    evaluator = evaluator_of("x > 0", on="step", **{"for": "3 checks"})
    found = []
    for step, value in enumerate([1.0, None, 1.0, None, None, 1.0, 1.0], 1):
        found += [step for _ in evaluator.observe({"x": value}, step=step, now=0.0)]
    assert found == [6]


def test_a_window_before_the_first_evaluation_decides_nothing() -> None:
    """A window without a value decides nothing; in the replaced language a KeyError ended the training."""
    evaluator = evaluator_of("mean(eval.loss, 2) > 1 or lag(eval.loss, 1) > 1", on=["step", "evaluate"])
    assert not any(evaluator.observe({"loss": 9.0}, step=step, now=0.0) for step in range(5))
    assert not evaluator.observe({"eval.loss": 2.0}, step=5, now=0.0, event="evaluate")
    assert evaluator.observe({"eval.loss": 2.0}, step=6, now=0.0, event="evaluate")


@pytest.mark.parametrize("stream", [[1.0] * 8, [1.0, None] * 4, [1.0, float("nan")] * 4, [float("inf")] * 8])
def test_it_fires_once_while_it_lasts_and_not_every_third_time(stream: list[float | None]) -> None:
    """A rule fires once while its condition holds; a patience of 2 fired at every third true check."""
    evaluator = evaluator_of("x > 0 or isnan(x)", **{"for": "3 checks"})
    fired = [step for step, x in enumerate(stream) for _ in evaluator.observe({"x": x}, step=step, now=0.0)]
    assert len(fired) == 1


JUMP_S = 6 * 3600.0


def test_a_clock_that_jumps_ahead_counts_as_time_that_has_gone() -> None:
    """The time that a machine slept counts in durations, in windows and in ages."""
    held = evaluator_of("x > 0", **{"for": "10m"})
    window = evaluator_of("count(x, 10m) < 2", on="step")
    aged = evaluator_of("age(y) > 1h", on="step")
    cooled = evaluator_of("x > 0", cooldown="1h")
    fired: dict[str, list[int]] = {}
    for step, now in enumerate([0.0, 1.0, 2.0, 2.0 + JUMP_S, 3.0 + JUMP_S]):
        for name, evaluator in (("held", held), ("window", window), ("aged", aged), ("cooled", cooled)):
            metrics = {"x": 1.0, **({"y": 1.0} if step == 0 else {})}
            found = evaluator.observe(metrics, step=step, now=now)
            fired.setdefault(name, []).extend(step for one in found if one.state is State.FIRED)
    assert fired == {"held": [3], "window": [0, 3], "aged": [3], "cooled": [0, 3]}


def test_a_clock_that_jumps_back_stands_still_until_it_is_caught_up() -> None:
    evaluator = evaluator_of("x > 0", **{"for": "10s"}, cooldown="1h")
    times = [100.0, 100.0 - JUMP_S, 105.0, -1e300, 109.0, 110.0, 100.0, 3709.0, 3721.0]
    found = [step for step, now in enumerate(times) for _ in evaluator.observe({"x": 1.0}, step=step, now=now)]
    assert found == [5], "it cools down until 3710, and would have to hold for ten seconds more"
    assert evaluator.statuses()[0].at == 3721.0
