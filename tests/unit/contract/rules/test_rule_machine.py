"""The state machine of a rule: tables for each of its parts, and any of them together against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.rules.document.actions import Save, Stop
from baton.contract.rules.document.loader import load_values
from baton.contract.rules.document.rule import Rule
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import Operand, State, Verdict
from tests.kits.rules.naive_evaluator import NaiveRule, World
from tests.properties.profiles import machine_settings


def evaluator_of(*rules: dict[str, Any], **more: Any) -> Evaluator:
    """Rules that save; what is not said is as in documents."""
    said = [{"name": f"rule-{number}", "do": "save", **rule} for number, rule in enumerate(rules)]
    loaded = load_values({"rules": said, **more})
    assert loaded.rules is not None, loaded.faults
    return Evaluator(loaded.rules)


def told(values: str, rule: dict[str, Any]) -> str:
    """Return F (fired), C (cleared) or a dot for each value of x under `x > 0`: 1, 0, ? (missing), - (not reported)."""
    evaluator = evaluator_of({"when": "x > 0", **rule})
    found = ""
    for step, value in enumerate(values):
        metrics = {} if value == "-" else {"x": None if value == "?" else float(value)}
        verdicts = evaluator.observe(metrics, step=step, now=step * 10.0)
        found += {State.FIRED: "F", State.CLEARED: "C"}[verdicts[0].state] if verdicts else "."
    return found


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        # edges: once while it lasts, again after it was false
        ("0110110", {}, ".F.CF.C"),
        ("011?110", {}, ".F....C"),
        ("1-1-0-1", {}, "F...C.F"),
        # for
        ("0110111", {"for": "3 checks"}, "......F"),
        ("01?11", {"for": "3 checks"}, "....F"),
        ("0101011", {"for": "3 of 5"}, ".....F."),
        ("1000110", {"for": "3 of 5"}, "......."),
        ("10?1001", {"for": "3 of all"}, "......F"),
        ("1011010", {"for": "2 of all", "cooldown": "1 check"}, "..F.CFC"),
        ("11001100", {"for": "2 of all", "cooldown": "1 check"}, ".FC..FC."),
        ("10110101", {"for": "2 of all", "cooldown": "1 check"}, "..F.CFC."),
        ("1?1??1", {"for": "3 of 3"}, ".....F"),
        ("0111100", {"for": "2 steps"}, "...F.C."),
        ("0101110", {"for": "2 steps"}, ".....FC"),
        ("0111100", {"for": "20s"}, "...F.C."),
        ("0111100", {"for": "21s"}, "....FC."),
        # warm-up
        ("1111110", {"warmup": "3 steps"}, "...F..C"),
        ("1111110", {"warmup": "30s"}, "...F..C"),
        ("1111110", {"warmup": "3 checks"}, "...F..C"),
        ("1111110", {"warmup": "2 steps", "for": "2 checks"}, "...F..C"),
        # once, max_fires
        ("1010101", {"once": True}, "FC....."),
        ("1010101", {"max_fires": 2}, "FCFC..."),
        # cooldown: fires again while it lasts
        ("1111111", {"cooldown": "3 steps"}, "F..F..F"),
        ("1111111", {"cooldown": "3 checks"}, "F..F..F"),
        ("1111111", {"cooldown": "30s"}, "F..F..F"),
        ("1111111", {"cooldown": "30s", "for": "2 checks"}, ".F...F."),
        ("1010101", {"cooldown": "3 steps"}, "FC..FC."),
        ("1111111", {"cooldown": "2 steps", "max_fires": 2}, "F.F...."),
    ],
)
def test_tables(values: str, rule: dict[str, Any], expected: str) -> None:
    assert told(values, rule) == expected


def test_a_value_as_it_was_when_another_metric_came() -> None:
    evaluator = evaluator_of(
        {"when": "at(epoch, loss) > 2", "on": "step"}, {"when": "at(step, loss) > 2", "on": "step"}
    )
    seen = []
    for step, metrics in enumerate(
        [
            {"epoch": 3.0},
            {"loss": 1.0, "epoch": 1.0},
            {"epoch": 2.5},
            {"epoch": 2.9, "loss": 1.0},
            {"loss": 1.0, "epoch": None},
        ]
    ):
        evaluator.observe(metrics, step=step, now=0.0)
        seen.append([one.operands[0].value for one in evaluator.statuses()])
    assert seen == [[None, None], [1.0, 1.0], [1.0, 1.0], [2.9, 3.0], [None, 4.0]]


def test_hysteresis() -> None:
    evaluator = evaluator_of(
        {"when": "x > 10", "clear": "x < 5"}, {"when": "x > 10", "clear": "x < 5", "cooldown": "4 steps"}
    )
    found: list[list[str]] = [[], []]
    for step, value in enumerate([11, 9, 12, 4, 11, 6, 3, 11, 11, 11]):
        for verdict in evaluator.observe({"x": float(value)}, step=step, now=0.0):
            found[int(verdict.rule[-1])].append(f"{verdict.state} {step}")
    assert found[0] == ["fired 0", "cleared 3", "fired 4", "cleared 6", "fired 7"]
    assert found[1] == ["fired 0", "cleared 3", "fired 4", "cleared 6", "fired 8"]


def test_patience_is_a_rule_s_own_whatever_makes_it_due() -> None:
    evaluator = evaluator_of({"when": "x > 0", "on": ["log", "evaluate"], "for": "3 checks"})
    fired = [
        bool(evaluator.observe({"x": 1.0}, step=step, now=0.0, event=event))
        for step, event in enumerate(["log", "evaluate", "step", "log", "evaluate"])
    ]
    assert fired == [False, False, False, True, False]


def test_a_rule_is_due_when_its_own_metrics_come() -> None:
    evaluator = evaluator_of(
        {"when": "eval.loss > 1", "for": "2 checks"},
        {"when": "loss > 1 and step > 2", "for": "2 checks"},
        {"when": "step > 3"},
        {"when": "age(eval.loss) > 15s"},
        {"when": "x > 0", "every": "4 steps"},
        {"when": "x > 0", "every": "25s"},
    )
    found: dict[str, list[int]] = {}
    for step in range(12):
        metrics = {"loss": 2.0, "x": 1.0 - step % 2} if step != 4 else {}
        metrics |= {"eval.loss": 2.0} if step in (2, 8) else {}
        for verdict in evaluator.observe(metrics, step=step, now=step * 10.0):
            found.setdefault(verdict.rule, []).append(step if verdict.state is State.FIRED else -step)
    # step 4 brings no loss: the step alone makes no check of it
    assert found == {
        "rule-0": [8],
        "rule-1": [5],
        "rule-2": [4],
        "rule-3": [4, -8, 10],
        "rule-4": [8],
        "rule-5": [0, -3, 6, -9],
    }
    assert [verdict.next_step for verdict in evaluator.statuses()][4] == 12
    assert [verdict.next_at for verdict in evaluator.statuses()][5] == 115.0


def test_nan_is_seen_at_its_step_and_no_false_success_follows() -> None:
    evaluator = evaluator_of(
        {"when": "isnan(loss)", "do": {"stop": {"outcome": "failed"}}}, {"when": "loss < 1", "do": "stop"}
    )
    found: list[tuple[str, int, Any]] = []
    for step, loss in enumerate([2.0, 1.5, float("nan"), float("nan")]):
        found += [(one.rule, one.step, one.actions) for one in evaluator.observe({"loss": loss}, step=step, now=0.0)]
    assert found == [("rule-0", 2, (Stop(outcome="failed"),))]


def test_what_is_told_of_a_rule() -> None:
    evaluator = evaluator_of(
        {"when": "mean(loss, 2) > 2", "for": "5 checks", "every": "100 steps", "severity": "error", "mode": "dry_run"},
        {"when": "loss > 2 and x > 1"},
        {"when": "x > 1", "for": "3 of 5", "warmup": "10 checks"},
        {"when": "loss > 1", "once": True},
        {"when": "loss > 1", "cooldown": "1h", "for": "50 steps"},
    )
    states = [verdict.describe() for verdict in evaluator.statuses()]
    assert states[0] == "armed, 0 of 5, last value unknown, next check step 100"
    fired: list[Verdict] = []
    for step in range(300, 1200, 100):
        fired += evaluator.observe({"loss": 2.31}, step=step, now=step * 1.0)
        if step == 500:
            told_at_500 = evaluator.statuses()[0]
    assert told_at_500.describe() == "pending, 2 of 5, last value 2.31, next check step 600"
    states = [verdict.describe() for verdict in evaluator.statuses()]
    assert states == [
        "fired, last value 2.31, next check step 1200",
        "unknown, loss = 2.31, x = unknown",
        "armed, 0 of 3 (of the last 5), last value unknown",
        "spent, last value 2.31",
        "cooldown, counts in 2900s, last value 2.31",
    ]
    first = next(one for one in fired if one.rule == "rule-0")
    assert (first.step, first.severity, first.mode, first.actions) == (800, "error", "dry_run", (Save(),))
    assert first.operands == (Operand("mean(loss, 2)", 2.31),)


WAITING = [
    ({"warmup": "200 steps"}, {150: "warmup, counts from step 200"}, 200),
    ({"warmup": "10m"}, {10: "warmup, counts in 600s", 40: "warmup, counts in 300s"}, 70),
    ({"warmup": "3 checks"}, {10: "warmup, counts in 3 checks", 30: "warmup, counts in 1 check"}, 40),
    ({"cooldown": "25 steps"}, {10: "cooldown, counts from step 35", 30: "cooldown, counts from step 35"}, 40),
    ({"cooldown": "5m"}, {10: "cooldown, counts in 300s", 30: "cooldown, counts in 100s"}, 40),
    ({"cooldown": "3 checks"}, {10: "cooldown, counts in 3 checks", 30: "cooldown, counts in 1 check"}, 40),
]


@pytest.mark.parametrize(("rule", "said", "fires_at"), WAITING)
def test_it_is_told_when_a_rule_counts_again(rule: dict[str, str], said: dict[int, str], fires_at: int) -> None:
    evaluator = evaluator_of({"when": "loss > 1", **rule})
    fired: list[int] = []
    for step in range(10, 210, 10):
        fired += [one.step for one in evaluator.observe({"loss": 2.0}, step=step, now=step * 10.0)]
        if step in said:
            assert evaluator.statuses()[0].describe() == f"{said[step]}, last value 2"
    later = [step for step in fired if step > 10]
    assert later[0] == fires_at, "then, and not before"


def test_a_metric_that_comes_late_or_never() -> None:
    evaluator = evaluator_of({"when": "late > 0"}, {"when": "never > 0 or late > 1"}, {"when": "missing(late)"})
    assert [one.rule for one in evaluator.observe({"loss": 1.0}, step=0, now=0.0)] == ["rule-2"]
    assert [(one.rule, str(one.state)) for one in evaluator.observe({"late": 2.0}, step=1, now=1.0)] == [
        ("rule-0", "fired"), ("rule-1", "fired"), ("rule-2", "cleared"),
    ]  # fmt: skip
    assert [one.rule for one in evaluator.observe({"late": None}, step=2, now=2.0)] == ["rule-2"]


class Explosive:
    """A value that fails when it is looked at."""

    def __float__(self) -> float:
        raise RuntimeError("boom")


@pytest.mark.parametrize("value", ["2.0", b"2", Explosive(), [1.0], {"loss": 1.0}, object(), 1j])
def test_what_is_no_number_disables_only_the_rules_that_need_it(value: object) -> None:
    evaluator = evaluator_of({"when": "loss > 1"}, {"when": "loss > 1", "on_error": "stop"}, {"when": "x > 1"})
    found = [evaluator.observe({"loss": value, "x": 2.0}, step=step, now=0.0) for step in range(5)]
    assert [[str(one.state) for one in verdicts] for verdicts in found] == [
        ["error", "error", "fired"], ["error", "error"], ["error", "error"], [], [],
    ]  # fmt: skip
    assert found[0][0].reason.startswith("loss is no number (")
    assert found[0][0].actions == ()
    assert found[0][1].actions == (Stop(outcome="failed"),)
    assert [str(one.state) for one in evaluator.statuses()] == ["disabled", "disabled", "fired"]


def test_a_fault_inside_is_counted_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = evaluator_of({"when": "loss > 1"}, {"when": "x > 1"})

    def broken() -> bool:
        raise ZeroDivisionError("a bug")

    evaluator._machines[0].condition = broken
    assert [one.reason for one in evaluator.observe({"loss": 2.0, "x": 2.0}, step=0, now=0.0)] == [
        "ZeroDivisionError: a bug",
        "",
    ]


def test_a_fault_inside_an_operand_is_told_as_unknown() -> None:
    evaluator = evaluator_of({"when": "loss > 1"})

    def broken() -> float:
        raise OverflowError("a bug")

    evaluator._operands["rule-0"] = [("loss", broken)]
    (verdict,) = evaluator.observe({"loss": 2.0}, step=0, now=0.0)
    assert (str(verdict.state), [one.value for one in verdict.operands]) == ("fired", [None])


@pytest.mark.parametrize(("value", "expected"), [(3, True), (True, False), (10**400, True), (-(10**400), False)])
def test_other_numbers_are_numbers(value: object, expected: bool) -> None:
    assert bool(evaluator_of({"when": "loss > 2"}).observe({"loss": value}, step=0, now=0.0)) is expected


def test_the_clock_never_goes_back() -> None:
    evaluator = evaluator_of({"when": "x > 0", "for": "10s"})
    found = [
        [str(one.state) for one in evaluator.observe({"x": 1.0}, step=step, now=now)]
        for step, now in enumerate([100.0, 50.0, 105.0, float("nan"), 40.0, 110.0])
    ]
    assert found == [[], [], [], [], [], ["fired"]]


CONDITIONS = (
    "x > 0",
    "mean(x, 2) > 0",
    "x > 0 and y > 0",
    "missing(y)",
    "rising(x, 1)",
    "x > 0 or isnan(y)",
    "at(y, x) > 0",
)
PERIODS = ("0 steps", "1 step", "3 steps", "2 checks", "25s", "5s")
RULES = st.fixed_dictionaries(
    {"when": st.sampled_from(CONDITIONS)},
    optional={
        "clear": st.sampled_from(["x < 0", "y > 0", "missing(x)"]),
        "for": st.sampled_from(["1 check", "3 checks", "2 of 3", "3 of 5", "2 of all", "2 steps", "15s"]),
        "warmup": st.sampled_from(PERIODS),
        "cooldown": st.sampled_from(PERIODS),
        "max_fires": st.integers(1, 3),
        "on": st.sampled_from(["step", ["log", "evaluate"]]),
    },
)
NUMBER = st.sampled_from([None, 1.0, 2.0, 0.0, -1.0, float("nan"), float("inf")])
STREAM = st.lists(
    st.tuples(
        st.fixed_dictionaries({}, optional={"x": NUMBER, "y": NUMBER}),
        st.sampled_from([1, 1, 1, 2, 5]),
        st.sampled_from([10.0, 10.0, 1.0, 0.0, -20.0]),
        st.sampled_from(["step", "step", "log", "evaluate"]),
    ),
    max_size=25,
)


@machine_settings(runs=150, steps=1)
@given(rules=st.lists(RULES, min_size=1, max_size=4), stream=STREAM)
def test_any_rule_does_as_the_model(rules: list[dict[str, Any]], stream: list[tuple[Any, int, float, str]]) -> None:
    evaluator = evaluator_of(*rules)
    world = World()
    models = {rule.name: NaiveRule(rule) for rule in evaluator.rules.rules}
    step, now = 0, 0.0
    for metrics, steps, seconds, event in stream:
        step, now = step + steps, now + seconds
        world.take(metrics, step, now)
        expected = []
        for name, model in models.items():
            if due(model.rule, metrics, event):
                clear = None if model.rule.clear is None else world.value(model.rule.clear)
                told_by_model = model.check(world.value(model.rule.when), clear, step, world.now)
                expected += [(name, told_by_model)] if told_by_model else []
        found = evaluator.observe(metrics, step=step, now=now, event=event)
        assert [(verdict.rule, str(verdict.state)) for verdict in found] == expected
        assert all((verdict.step, verdict.at) == (step, world.now) for verdict in found)


def due(rule: Rule, metrics: dict[str, Any], event: str) -> bool:
    if rule.on:
        return event in rule.on
    return rule.is_time_dependent or bool(set(rule.metrics) & set(metrics))


def test_checks_that_come_to_nothing_are_counted_whatever_they_come_with() -> None:
    evaluator = evaluator_of({"when": "loss > 1"}, {"when": "x > 1", "for": "2 checks"}, {"when": "y > 1"})
    seen = []
    for step in range(60):
        metrics = {"loss": 0.0, "x": float(step in {19, 20, 41}) * 2} if step % 3 else {"loss": 0.0}
        seen += [(one.rule, str(one.state), step) for one in evaluator.observe(metrics, step=step, now=0.0)]
        if step % 7 and step != 59:
            continue
        saved = evaluator.state_dict()["rules"]
        assert [saved[f"rule-{number}"]["checks"] for number in range(3)] == [step + 1, step - step // 3, 0]
    assert seen == [("rule-1", "fired", 20), ("rule-1", "cleared", 22)]
    assert evaluator.unknown() == {"rule-2"}
