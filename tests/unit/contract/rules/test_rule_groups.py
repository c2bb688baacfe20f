"""Functions of a group of jobs: what they give, with values missing, NaN and infinite; what is refused."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

import pytest

from baton.contract.rules.document.loader import load_values
from baton.contract.rules.document.rule_placement import collect_group_values
from baton.contract.rules.engine.group_statistics import GroupValue, compute_group_statistic
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import State
from baton.contract.rules.language.checker import check_condition
from baton.contract.rules.language.faults import Code
from baton.contract.rules.language.function_signatures import GROUPS
from baton.contract.rules.metrics import Kind, Metric, MetricCatalog

NAN, INF = math.nan, math.inf
METRICS = MetricCatalog([Metric("acc", goal="max"), Metric("flag", Kind.BOOL), Metric("plain")])


class Group:
    """Values of (metric, step) of all jobs, this one's first."""

    def __init__(self, values: Mapping[tuple[str, int | None], Sequence[float | None]] | None) -> None:
        self.values = values

    def members(self, metric: str, step: int | None) -> Sequence[float] | None:
        if self.values is None:
            return None
        return [value for value in self.values.get((metric, step), ()) if value is not None]

    def own(self, metric: str, step: int | None) -> float | None:
        return (self.values or {}).get((metric, step), [None])[0]


def value_of(text: str, group: Group | None, **given: object) -> float | bool | None:
    """The operand `text`, as a verdict tells it."""
    rule = {"name": "r", "when": f"{text} > 0", "do": "stop"}
    loaded = load_values({"rules": [rule], "metrics": {"acc": {"goal": "max"}, "flag": {"kind": "bool"}}})
    assert loaded.rules is not None, loaded.faults
    evaluator = Evaluator(loaded.rules, group)
    evaluator.observe(given, step=1, now=1.0, event="heartbeat")
    (status,) = evaluator.statuses()
    (operand,) = (one for one in status.operands if one.text.startswith("group_"))
    return operand.value


@pytest.mark.parametrize(
    ("function", "values", "expected"),
    [
        ("count", [2, 3, 1, 4], 4),
        ("count", [2, None, NAN, INF], 3),
        ("count", [None, 3], 1),
        ("count", [None, None], 0),
        ("mean", [1, 2, 6], 3),
        ("mean", [None, 2, 6], 4),
        ("mean", [NAN, 2, 6], 4),
        ("mean", [NAN, NAN], NAN),
        ("mean", [INF, 2], INF),
        ("mean", [-INF, 2, 3], -INF),
        ("mean", [INF, -INF], NAN),
        ("mean", [INF, INF], INF),
        ("mean", [1e308, 1e308, 1e308], 1e308),
        ("mean", [1e16, 1.0, -1e16, 1.0], 0.5),
        ("mean", [None], None),
        ("median", [5, 1, 3], 3),
        ("median", [5, 1, 3, 4], 3.5),
        ("median", [1e308, 1.5e308], 1.25e308),
        ("median", [NAN, 1, 3], 2),
        ("median", [INF, 1, 3], 3),
        ("median", [None], None),
        ("min", [5, 1, NAN], 1),
        ("max", [5, 1, NAN], 5),
        ("max", [5, INF], INF),
        ("min", [NAN], NAN),
        ("max", [None], None),
        ("rank", [1, 2, 3, 4], 0),
        ("rank", [2, 1, 3, 4], 0.25),
        ("rank", [4, 2, 3, 1], 0.75),
        ("rank", [2, 2, 2, 2], 0),
        ("rank", [3, 2, 2, 3], 0.5),
        ("rank", [7], 0),
        ("rank", [None, 2, 3], None),
        ("rank", [2, None, 1], 0.5),
        ("rank", [NAN, 2, INF, NAN], 0.5),
        ("rank", [INF, 2, NAN, 3], 0.5),
        ("rank", [-INF, 2, NAN], 0),
        ("rank", [2, NAN, NAN], 0),
    ],
)
@pytest.mark.parametrize("step", [None, 500])
def test_what_they_give(function: str, values: list[float | None], expected: float | None, step: int | None) -> None:
    text = f"group_{function}(loss)" if step is None else f"group_{function}(loss, {step})"
    other = 500 if step is None else None
    found = value_of(text, Group({("loss", step): values, ("loss", other): [99.0, 98.0]}), loss=77.0)
    assert found == pytest.approx(expected, rel=1e-15, nan_ok=True) if expected is not None else found is None


@pytest.mark.parametrize("function", GROUPS)
@pytest.mark.parametrize("group", [None, Group(None)], ids=["no control plane", "in no group"])
def test_without_a_group_nothing_of_one_is_known(function: str, group: Group | None) -> None:
    assert value_of(f"{function}(loss)", group, loss=1.0) is None


def test_the_order_of_the_jobs_does_not_matter() -> None:
    chance = random.Random(3)
    for _ in range(200):
        values = [chance.choice([chance.gauss(0, 1e9), 1e-9, NAN, INF]) for _ in range(chance.randint(1, 9))]
        shuffled = chance.sample(values, len(values))
        for function in GROUPS:
            first, second = (compute_group_statistic(function, order, values[0], "min") for order in (values, shuffled))
            assert first == second or (first != first and second != second)


def test_they_agree_with_the_standard_library_on_what_is_finite() -> None:
    chance = random.Random(4)
    for _ in range(200):
        values = [chance.gauss(0, 100) for _ in range(chance.randint(1, 12))]
        own = chance.choice(values)
        told = {name: compute_group_statistic(name, values, own, "max") for name in GROUPS}
        assert told["group_mean"] == pytest.approx(statistics.mean(values), rel=1e-12, abs=1e-12)
        assert told["group_median"] == pytest.approx(statistics.median(values))
        assert (told["group_min"], told["group_max"]) == (min(values), max(values))
        assert told["group_rank"] == sorted(values, reverse=True).index(own) / len(values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("group_rank(loss)", 0.5),  # less is better
        ("group_rank(acc)", 0.25),  # declared: more is better
        ("group_rank(acc, min)", 0.5),
        ("group_rank(loss, max)", 0.25),
        ("group_rank(plain, 500, max)", 0.25),
        ("group_rank(plain, 500, min)", 0.5),
    ],
)
def test_the_goal_says_which_is_better(text: str, expected: float) -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    group = Group({(name, step): values for name in ("loss", "acc", "plain") for step in (None, 500)})
    assert value_of(text, group) == expected


def test_the_worst_half_at_step_500_is_stopped() -> None:
    """The rule of the docs selects the three of six jobs with the greatest loss, and no job of a group below four."""
    rule = {"name": "worst-half", "when": "group_count(loss, 500) >= 4 and group_rank(loss, 500) >= 0.5", "do": "stop"}
    loaded = load_values({"rules": [rule]})
    assert loaded.rules is not None and loaded.warnings == []
    assert collect_group_values(loaded.rules) == {GroupValue("loss", 500)}
    losses: list[float] = [0.9, 0.4, NAN, 0.7, 0.5, 0.8]
    values: dict[tuple[str, int | None], list[float | None]] = {}
    stopped = {}
    for there in range(1, 7):
        for job in range(there):
            mine: list[float | None] = [losses[job], *(losses[one] for one in range(there) if one != job)]
            values["loss", 500] = mine
            evaluator = Evaluator(loaded.rules, Group(values))
            fired = evaluator.observe({"loss": 0.1}, step=600, now=1.0, event="heartbeat")
            if [one.state for one in fired] == [State.FIRED]:
                stopped.setdefault(there, []).append(job)
    assert stopped == {4: [0, 2], 5: [0, 2], 6: [0, 2, 5]}


def test_a_rule_is_checked_whenever_anything_comes_since_others_change_it() -> None:
    loaded = load_values({"rules": [{"name": "r", "when": "group_max(loss) > 5 and loss < 9", "do": "stop"}]})
    assert loaded.rules is not None
    values: dict[tuple[str, int | None], list[float | None]] = {("loss", None): [1.0, 2.0]}
    evaluator = Evaluator(loaded.rules, Group(values))
    assert not evaluator.observe({"loss": 1.0}, step=1, now=1.0, event="timer")
    values["loss", None] = [1.0, 6.0]
    assert [one.state for one in evaluator.observe({}, step=1, now=2.0, event="timer")] == [State.FIRED]


@pytest.mark.parametrize(
    ("text", "code", "remedy"),
    [
        ("group_rank(plain) > 0.5", Code.WRONG_ARITY, "group_rank(plain, min)"),
        ("group_mean(loss, 1.5) > 1", Code.INVALID_WINDOW, "whole number"),
        ("group_mean(loss, 10m) > 1", Code.INVALID_WINDOW, "whole number"),
        ("group_mean(loss, 1e13) > 1", Code.INVALID_WINDOW, "whole number"),
        ("group_mean(loss, -5) > 1", Code.INVALID_WINDOW, "whole number"),
        ("group_mean(loss, step) > 1", Code.INVALID_WINDOW, "whole number"),
        ("group_mean(loss, min) > 1", Code.INVALID_WINDOW, "whole number"),
        ("group_rank(loss, 5, 3) > 1", Code.WRONG_ARITY, "group_rank(x, 500)"),
        ("group_rank(loss, min, 5) > 1", Code.WRONG_ARITY, "group_rank(x, 500)"),
        ("group_rank(loss, 5, best) > 1", Code.WRONG_TYPE, "min or max"),
        ("group_mean(loss, 5, max) > 1", Code.WRONG_ARITY, "group_mean(x, 500)"),
        ("group_mean() > 1", Code.WRONG_ARITY, "group_mean(x, 500)"),
        ("group_mean(loss + 1) > 1", Code.WRONG_TYPE, "Name a metric"),
        ("group_mean(flag) > 1", Code.WRONG_TYPE, "condition"),
        ("group_mean(loss)", Code.WRONG_TYPE, "Compare it"),
        ("group_mean(step.time) > 1", Code.WRONG_TYPE, "a duration"),
        ("group_average(loss) > 1", Code.UNKNOWN_FUNCTION, "Did you mean group_"),
        ("group_mean > 1", Code.WRONG_ARITY, "group_mean(x, 500)"),
        *(
            (f"group_max({name}) > 0", Code.WRONG_TYPE, "that trainings report")
            for name in ("cost", "failures", "interruptions", "heartbeat.age", "queue.age")
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_remedy(text: str, code: Code, remedy: str) -> None:
    (fault,) = check_condition(text, METRICS).faults
    assert (fault.code, remedy in fault.remedy) == (code, True), fault.remedy


@pytest.mark.parametrize(
    "text", ["group_count(flag) > 3", "group_mean(step.time) > 2s", "group_max(step) > step + 100"]
)
def test_what_is_right_is_taken(text: str) -> None:
    assert check_condition(text, METRICS).faults == []


def test_what_is_kept_of_every_job_is_bounded_and_told_once() -> None:
    def said(steps: range) -> dict[str, object]:
        rules = [
            {
                "name": f"r{step}",
                "when": f"group_rank(loss, {step}) > 0.5",
                "clear": "group_mean(loss) < 1",
                "do": "stop",
            }
            for step in steps
        ]
        return {"rules": rules}

    loaded = load_values(said(range(15)))
    assert loaded.rules is not None
    assert collect_group_values(loaded.rules) == {GroupValue("loss"), *(GroupValue("loss", n) for n in range(15))}
    (fault,) = load_values(said(range(16))).faults
    assert fault.code == Code.TOO_LARGE and "17" in fault.reason
