"""Whatever the rules and whatever was reported: a history decides what the evaluator decided row by row."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.rules.document import load_values
from baton.contract.rules.evaluating import Evaluator
from baton.contract.rules.limits import LIMITS, Limits
from baton.contract.rules.rule import Rule, RuleSet
from gpu_client.backtest import trying
from gpu_client.backtest.history import Builder, History
from gpu_client.backtest.trying import Trial, streamed, tried
from tests.properties.profiles import machine_settings
from tests.properties.test_rule_fuzz import EXPRESSION, SOUND

NAMES = ("loss", "eval.loss", "x", "grad_norm", "wall", "gpu.mem", "ckpt.age")
WINDOW = st.sampled_from(["1", "2", "3", "4", "7", "20", "1s", "5s", "20s", "1m"])
NAME = st.sampled_from(["loss", "x", "step", "eval.loss"])
BOUND = st.sampled_from(["0", "1", "2", "-1", "0.1", "x", "loss", "1e16", "inf"])
AGGREGATE = st.one_of(
    st.builds("{}({}, {})".format, st.sampled_from(["mean", "std", "slope", "zscore", "ema"]), NAME, WINDOW),
    st.builds("{}({}, {})".format, st.sampled_from(["min", "max", "median", "delta"]), NAME, WINDOW),
    st.builds("count({}, {})".format, NAME, st.sampled_from(["1s", "5s", "1m"])),
    st.builds("lag({}, {})".format, NAME, st.sampled_from(["1", "2", "9"])),
    st.builds("{}({}, {})".format, st.sampled_from(["best", "since_best"]), NAME, st.sampled_from(["min", "max"])),
    st.builds("since_best({}, min, {})".format, NAME, st.sampled_from(["0.1", "0.5", "2"])),
    st.builds("at({}, {})".format, NAME, NAME),
    st.builds("count({})".format, NAME),
    NAME,
)
NUMBER = st.one_of(
    AGGREGATE,
    st.builds("({} {} {})".format, AGGREGATE, st.sampled_from("+-*/%"), AGGREGATE | st.sampled_from(["2", "0.1", "0"])),
    st.builds("abs({})".format, AGGREGATE),
    st.builds("log({})".format, AGGREGATE),
    st.builds("coalesce({}, {})".format, AGGREGATE, AGGREGATE),
    st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), AGGREGATE, AGGREGATE),
    st.builds("clamp({}, -1, 1)".format, AGGREGATE),
    st.builds("-{}".format, AGGREGATE),
)
COMPARISON = st.one_of(
    st.builds("{} {} {}".format, NUMBER, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), BOUND | NUMBER),
    st.builds("{} < {} <= {}".format, BOUND, NUMBER, BOUND),
    st.builds("{}({}, {})".format, st.sampled_from(["rising", "falling", "changed"]), NAME, WINDOW),
    st.builds("{}({})".format, st.sampled_from(["isnan", "isfinite", "missing"]), NUMBER),
    st.builds("age({}) > {}".format, NAME, st.sampled_from(["0", "1s", "20s"])),
    st.sampled_from(["flag", "changed(flag, 2)", "missing(flag)", "count(flag) > 2", "coalesce(flag, x > 0)", "true"]),
)
CONDITION = st.one_of(
    COMPARISON,
    st.builds("not {}".format, st.builds("({})".format, COMPARISON)),
    st.builds("{} {} {}".format, COMPARISON, st.sampled_from(["and", "or"]), COMPARISON),
    st.builds("({} or {}) and not ({})".format, COMPARISON, COMPARISON, COMPARISON),
    SOUND,
    EXPRESSION,
)
PERIOD = st.sampled_from(["1 check", "3 checks", "1 step", "7 steps", "1s", "5s", "1m", "2500ms", "0 steps"])
HOLD = PERIOD | st.sampled_from(["2 of 3", "3 of 3", "1 of 4", "5 of 20", "2 of all", "6 of all"])
RULE = st.fixed_dictionaries(
    {"when": CONDITION},
    optional={
        "for": HOLD,
        "warmup": PERIOD,
        "cooldown": PERIOD,
        "clear": CONDITION,
        "max_fires": st.integers(1, 3),
        "on": st.sampled_from(["step", "evaluate", "log", "start", ["evaluate", "step"], ["evaluate", "start"]]),
    },
)
PERIODIC = st.fixed_dictionaries(
    {"when": CONDITION, "every": st.sampled_from(["1 step", "3 steps", "10 steps", "1s", "7s", "1m"])},
    optional={"for": HOLD, "cooldown": PERIOD, "clear": CONDITION},
)
VALUE = st.one_of(
    st.integers(-2, 2).map(float),
    st.sampled_from([0.1, 0.2, 0.3, 0.1 + 0.2, 1 / 3]),
    st.floats(-5, 5),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, 1e16, 1e150, 1e-150]),
    st.none(),
)
ROW = st.tuples(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("loss", "x", "eval.loss", "flag"), VALUE))
    | st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=4),
    st.sampled_from([0, 1, 1, 1, 2, 5, 40]),
    st.sampled_from([0.0, 0.1, 1.0, 1.0, 1.0, 2.5, 30.0, 1e6, -5.0]),
)
Row = tuple[dict[str, float | None], int, float]


@st.composite
def streams(draw: st.DrawFn) -> list[Row]:
    """Short ones of all kinds; longer ones that repeat a few rows, as plateaus and ties do."""
    rows = draw(st.lists(ROW, max_size=30))
    if draw(st.booleans()):
        rows = [row for row in rows for _ in range(draw(st.integers(0, 12)))]
    return rows


def rule_set(*rules: dict[str, Any], limits: Limits = LIMITS) -> RuleSet:
    """Those that are sound."""
    metrics = {"flag": {"kind": "bool"}}
    named = [{"name": f"rule-{number}", "do": "save", **rule} for number, rule in enumerate(rules)]
    sound = [one for one in named if load_values({"rules": [one], "metrics": metrics}).rules is not None]
    loaded = load_values({"rules": sound, "metrics": metrics}, limits=limits)
    assert loaded.rules is not None
    return loaded.rules


def placed(stream: list[Row], *, timed: bool = True) -> list[tuple[dict[str, float | None], int, float]]:
    """With steps and times from the beginning on."""
    step, now, found = 0, 1000.0, []
    for metrics, steps, seconds in stream:
        step, now = step + steps, now + seconds
        found.append((metrics, step, now if timed else 0.0))
    return found


def history_of(stream: list[Row], *, timed: bool = True) -> History:
    builder = Builder()
    for metrics, step, now in placed(stream, timed=timed):
        builder.add(step, now if timed else None, metrics)
    return builder.history()


STEP_AND_EVALUATION = "epoch"
"""Stands for a row that is both, for evaluators take one event at a time. No rule here is checked at epochs."""


def with_both(rule: Rule) -> Rule:
    """A row that is no evaluation is a step and a log: `step` here."""
    events = {"step" if event == "log" else event for event in rule.on}
    return replace(rule, on=frozenset(events | {STEP_AND_EVALUATION} if events & {"step", "evaluate"} else events))


def told_by_the_evaluator(rules: RuleSet, stream: list[Row], *, timed: bool = True) -> dict[str, list[tuple[Any, ...]]]:
    """State, row and, of the first firing, operands."""
    evaluator = Evaluator(rules._replace(rules=tuple(map(with_both, rules.rules))))
    found: dict[str, list[tuple[Any, ...]]] = {rule.name: [] for rule in rules.rules}
    first = placed(stream)[0][2] if stream else 0.0
    walls = accumulate((now - first for _, _, now in placed(stream)), max)
    derives = timed and not any("wall" in metrics for metrics, _, _ in stream)
    before: int | None = None
    for row, ((metrics, step, now), wall) in enumerate(zip(placed(stream, timed=timed), walls, strict=True)):
        event = "step"
        if any(name.startswith("eval.") and value is not None for name, value in metrics.items()):
            event = "evaluate" if step == before else STEP_AND_EVALUATION
        before = step
        given = {**metrics, "wall": wall} if derives else metrics
        for verdict in evaluator.observe(given, step=step, now=now, event=event):
            found[verdict.rule].append((str(verdict.state), row, verdict.operands))
    return found


def same(left: Any, right: Any) -> bool:
    return (left == right and type(left) is type(right)) or (left != left and right != right)


def agree(trial: Trial, told: list[tuple[Any, ...]]) -> None:
    fired = [row for state, row, _ in told if state == "fired"]
    assert trial.fired.tolist() == fired
    assert trial.cleared.tolist() == [row for state, row, _ in told if state == "cleared"]
    assert len(told) == len(trial.fired) + len(trial.cleared)
    if fired:
        operands = next(operands for state, _, operands in told if state == "fired")
        assert [text for text, _ in trial.operands] == [one.text for one in operands]
        pairs = zip(trial.operands, operands, strict=True)
        assert all(same(value, one.value) for (_, value), one in pairs), (trial.operands, operands)


@pytest.mark.parametrize("block_rows", [4, 8192])
@machine_settings(runs=400, steps=1)
@given(
    rules=st.lists(RULE | PERIODIC, min_size=1, max_size=4),
    stream=streams(),
    timed=st.sampled_from([True, True, False]),
)
def test_all_decisions_are_those_of_the_evaluator(
    block_rows: int, rules: list[dict[str, Any]], stream: list[Row], timed: bool
) -> None:
    sound = rule_set(*rules)
    if not stream or not sound.rules:
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trying, "BLOCK_ROWS", block_rows)
        patched.setattr(trying, "_PATIENCE", 10**9)
        history = history_of(stream, timed=timed)
        trials = tried(sound, history)
    told = told_by_the_evaluator(sound, stream, timed=timed)
    for trial in trials:
        assert not trial.streamed
        agree(trial, told[trial.rule.name])
    for rule in sound.rules:
        agree(streamed(sound, rule, history), told[rule.name])


def chosen_rule(chance: random.Random) -> dict[str, Any]:  # noqa: C901 - one case for each
    """One that is likely to fire now and then on the streams below."""
    metric = lambda: chance.choice(["loss", "loss", "x", "eval.loss", "step"])  # noqa: E731
    window = lambda: chance.choice(["2", "3", "5", "16", "17", "40", "5s", "30s", "2m"])  # noqa: E731

    def number() -> str:
        kind = chance.randrange(12)
        name = metric()
        if kind < 5:
            function = chance.choice(["mean", "std", "slope", "zscore", "ema", "min", "max", "median", "delta"])
            return f"{function}({name}, {window()})"
        if kind == 5:
            return f"{chance.choice(['best', 'since_best'])}({name}, {chance.choice(['min', 'max'])})"
        if kind == 6:
            return f"since_best({name}, min, {chance.choice([0.1, 0.5])})"
        if kind == 7:
            return chance.choice([f"lag({name}, 3)", f"at({name}, {metric()})", f"count({name}, 20s)"])
        if kind == 8:
            return f"({number()} {chance.choice('+-*/%')} {chance.choice([number(), '2', '0.1'])})"
        if kind == 9:
            return chance.choice(["abs({})", "log(abs({}))", "-{}", "clamp({}, -1, 1)"]).format(number())
        if kind == 10:
            return chance.choice(["coalesce({}, {})", "min({}, {})", "max({}, {})"]).format(number(), number())
        return name

    def condition(depth: int = 0) -> str:
        kind = chance.randrange(9)
        if kind < 5 or depth > 2:
            operator = chance.choice(["<", "<=", ">", ">=", "<", ">", "==", "!="])
            bound = chance.choice(["0", "0.1", "0.2", "1", "-0.5", "2", metric(), number()])
            return f"{number()} {operator} {bound}"
        if kind == 5:
            return f"{chance.choice(['rising', 'falling', 'changed'])}({metric()}, {chance.choice(['1', '2', '4s'])})"
        if kind == 6:
            return chance.choice(["flag", f"isnan({number()})", f"missing({number()})", f"age({metric()}) > 4s"])
        if kind == 7:
            return f"not ({condition(depth + 1)})"
        return f"({condition(depth + 1)}) {chance.choice(['and', 'or'])} ({condition(depth + 1)})"

    periods = ["1 check", "2 checks", "9 checks", "3 steps", "30 steps", "2s", "15s", "1m"]
    said: dict[str, Any] = {"when": condition()}
    if chance.random() < 0.5:
        said["for"] = chance.choice([*periods, "2 of 3", "3 of 7", "10 of 20", "3 of all", "9 of all"])
    for key in ("warmup", "cooldown"):
        if chance.random() < 0.3:
            said[key] = chance.choice(periods)
    if chance.random() < 0.2:
        said["clear"] = condition()
    if chance.random() < 0.2:
        said["max_fires"] = chance.randint(1, 3)
    due = chance.random()
    if due < 0.1:
        said["every"] = chance.choice(["2 steps", "10 steps", "3s", "20s"])
    elif due < 0.2:
        said["on"] = chance.choice(["step", "evaluate", "log"])
    return said


def chosen_value(chance: random.Random, kind: str, level: float, row: int, odd: float) -> float | None:
    if chance.random() < odd:
        return chance.choice([math.nan, math.inf, -math.inf, 1e300, -1e18, 1e-200, None])
    match kind:
        case "noise":
            return chance.gauss(level, 1)
        case "plateau":
            return level
        case "whole":
            return float(chance.randint(-2, 2))
        case "tenths":
            return chance.randint(-3, 3) / 10
        case "drift":
            return level - row / 10
        case _:
            return 1e8 + chance.random()


def chosen_stream(chance: random.Random, rows: int) -> list[Row]:
    """Noise, plateaus, steps, whole numbers, tenths, spikes, gaps and what is not finite, one after the other."""
    found: list[Row] = []
    kinds = ["noise", "plateau", "whole", "tenths", "drift", "far"]
    kind, level, left = "noise", 0.0, 0
    odd = chance.choice([0.0, 0.0, 0.01, 0.1])
    for row in range(rows):
        if not left:
            kind, level, left = chance.choice(kinds), chance.choice([0.0, 0.1, 1.0, 1e6]), chance.randint(5, 80)
        left -= 1

        value = partial(chosen_value, chance, kind, level, row, odd)
        metrics = {"loss": value()} if chance.random() < 0.97 else {}
        metrics |= {"x": value()} if chance.random() < 0.5 else {}
        metrics |= {"flag": chance.choice([0.0, 1.0])} if chance.random() < 0.2 else {}
        found.append((metrics, chance.choice([0, 1, 1, 1, 3]), chance.choice([0.0, 0.5, 1.0, 1.0, 1.0, 10.0])))
        if chance.random() < 0.1:
            found.append(({"eval.loss": value()}, 0, 0.5))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_decisions_of_many_rules_on_longer_streams(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    # a window over a duration that holds few points lets the oldest go
    limits = LIMITS if seed % 3 else LIMITS._replace(duration_points=6)
    sound = rule_set(*(chosen_rule(chance) for _ in range(25)), limits=limits)
    stream = chosen_stream(chance, 400)
    monkeypatch.setattr(trying, "BLOCK_ROWS", chance.choice([32, 100, 8192]))
    if seed % 2:
        monkeypatch.setattr(trying, "_PATIENCE", 10**9)
    told = told_by_the_evaluator(sound, stream)
    for trial in tried(sound, history_of(stream)):
        agree(trial, told[trial.rule.name])


@pytest.mark.parametrize(
    "when",
    [
        "group_rank(loss, 2) >= 0.5",
        "group_count(loss) > 0 or loss > 2",
        "group_mean(loss) < loss and loss > 2",
        "not (loss > 2 and loss < group_max(loss))",
        "missing(group_rank(loss))",
        "coalesce(group_median(loss, 2), x) > 0",
    ],
)
def test_what_other_jobs_reported_is_not_known(when: str) -> None:
    stream: list[Row] = [({"loss": float(row), "x": float(row % 2)}, 1, 1.0) for row in range(6)]
    sound = rule_set({"when": when}, {"when": when, "for": "2 checks", "clear": "group_min(x) > 0 or loss > 4"})
    told = told_by_the_evaluator(sound, stream)
    trials = tried(sound, history_of(stream))
    assert [trial.streamed for trial in trials] == [False, False]
    for trial in trials:
        agree(trial, told[trial.rule.name])
