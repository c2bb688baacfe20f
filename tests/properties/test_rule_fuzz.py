"""Rules made by chance, on streams made by chance: nothing is raised, and what is refused is refused as a fault."""

from __future__ import annotations

import json
import math
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.errors import Fault
from baton.contract.rules.document.loader import load, load_values
from baton.contract.rules.document.rule import EVENTS
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import State, Verdict
from baton.contract.rules.language.faults import Code
from baton.contract.rules.language.function_signatures import GROUPS, SUMMARIES
from baton.contract.rules.metrics import BUILT_IN
from tests.properties.profiles import machine_settings

NAMES = ("loss", "eval.loss", "x", "grad_norm", "wall", "gpu.mem", "step", "ckpt.age")
WINDOW = st.sampled_from(["1", "2", "3", "7", "5s", "1m", "0", "1.5", "x", "100001"])


def called(nodes: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(nodes, st.sampled_from([*"+-*/%<>", "<=", "==", "and", "or"]), nodes).map(" ".join),
        st.builds("({})".format, nodes),
        st.builds("not {}".format, nodes),
        st.builds("-{}".format, nodes),
        st.builds("{}({})".format, st.sampled_from(["abs", "log", "isnan", "isfinite", "missing"]), nodes),
        st.builds("{}({}, {})".format, st.sampled_from(["coalesce", "min", "max"]), nodes, nodes),
        st.builds("clamp({}, {}, {})".format, nodes, nodes, nodes),
        st.builds("{}({}, {})".format, st.sampled_from([*SUMMARIES, *GROUPS]), st.sampled_from(NAMES), WINDOW),
    )


LEAF = st.sampled_from(
    [*NAMES, "0", "1", "2.5", "1e300", "30s", "2GiB", "inf", "true", "x > 1", "loss > x", "isnan(loss)"]
)
EXPRESSION = st.recursive(LEAF, called, max_leaves=8)
SUMMARIZED = st.builds(
    "{}({}, {}) > {}".format,
    st.sampled_from(["mean", "std", "slope", "ema", "median", "min", "zscore", "delta"]),
    st.sampled_from(["loss", "x", "grad_norm"]),
    st.sampled_from(["2", "3", "9", "5s", "1m"]),
    st.sampled_from(["0", "x"]),
)
SOUND = SUMMARIZED | st.sampled_from(
    [
        *("x > 0", "missing(x)", "rising(x, 2)", "since_best(x, max) > 3", "not changed(loss, 2)", "loss / x > log(x)"),
        *("wall > 30s or ckpt.age > 5s", "count(x, 10s) < 3", "age(loss) > 20s", "best(loss) % x < 1"),
        *("group_rank(loss, 2) >= 0.5", "x > group_mean(x)", "group_count(loss, 7) > 2 or group_rank(x, max) == 0"),
    ]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PERIOD = st.sampled_from(["3 checks", "1 step", "2 steps", "5s", "1m", "2 of 3", "0 steps"])
ACTION = st.sampled_from(
    [
        "stop",
        "save",
        {"log": "x is {x:.2f} {loss}"},
        {"set": {"knob": "lr", "factor": 0.5}},
        {"rollback": {}},
        {"stop": 3},
    ]
)


def rule(when: st.SearchStrategy[Any], wild: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw rules whose values are mostly valid; `wild` replaces some of them."""
    return st.fixed_dictionaries(
        {"when": when, "do": ACTION | wild},
        optional={
            "for": PERIOD | wild,
            "warmup": PERIOD | wild,
            "cooldown": PERIOD | wild,
            "clear": when,
            "max_fires": st.integers(1, 3) | wild,
            "on": st.sampled_from([*EVENTS, ["log", "step"]]) | wild,
            "mode": st.sampled_from(["enforce", "dry_run"]) | wild,
            "on_error": st.sampled_from(["ignore", "stop"]) | wild,
        },
    )


def document(rules: list[Any]) -> dict[str, Any]:
    return {"rules": [{"name": f"r{n}", **one} if isinstance(one, dict) else one for n, one in enumerate(rules)]}


VALUE = st.one_of(
    st.floats(-5, 5),
    st.floats(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.sampled_from([10**400, "1.0", b"", [], object(), 1e308, -1e308, 5e-324, 2j, math.nan]),
)
STREAM = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from([*NAMES, "y", "not a metric", ""]), VALUE, max_size=4),
        st.integers(-3, 5),
        st.one_of(st.floats(-10, 100), st.sampled_from([math.nan, math.inf, 1e18])),
        st.sampled_from([*EVENTS, "something else"]),
    ),
    max_size=15,
)


def sound(fault: Fault) -> bool:
    return bool(fault.reason) and fault.code in set(Code) and isinstance(fault.remedy, str)


@machine_settings(runs=250, steps=1)
@given(said=ANYTHING, text=st.text(max_size=80))
def test_no_document_raises(said: Any, text: str) -> None:
    for loaded in (
        load(text),
        load_values(said),
        load_values({"rules": said}),
        load_values({"rules": [said], "metrics": said}),
    ):
        assert all(map(sound, (*loaded.faults, *loaded.warnings)))
        assert (loaded.rules is None) == bool(loaded.faults)


@machine_settings(runs=250, steps=1)
@given(
    rules=st.lists(rule(EXPRESSION | st.text(max_size=20), ANYTHING) | ANYTHING, max_size=3),
    reported=st.none() | st.just(["x"]),
)
def test_almost_right_documents_give_rules_or_faults_with_their_place(rules: list[Any], reported: Any) -> None:
    said = document(rules)
    loaded = load_values(said, reported=reported, max_steps=100)
    assert (loaded.rules is None) == bool(loaded.faults)
    assert all(map(sound, (*loaded.faults, *loaded.warnings)))
    text = yaml.safe_dump(said, allow_unicode=True)
    lines = text.splitlines()
    for fault in (*load(text).faults, *load(text).warnings):
        assert sound(fault)
        assert fault.line is not None
        assert fault.column is not None
        assert 1 <= fault.line <= len(lines) + 1


@machine_settings(runs=250, steps=1)
@given(rules=st.lists(rule(SOUND | EXPRESSION, st.nothing()), min_size=1, max_size=5), stream=STREAM)
def test_no_stream_raises(rules: list[Any], stream: list[tuple[Any, int, float, str]]) -> None:
    sound_rules = [one for one in rules if load_values(document([one])).rules is not None]
    loaded = load_values(document(sound_rules))
    assert loaded.rules is not None
    evaluator = Evaluator(loaded.rules)
    step, now = 0, 0.0
    for metrics, steps, seconds, event in stream:
        step, now = step + steps, now + seconds if math.isfinite(now) else 0.0
        for verdict in (*evaluator.observe(metrics, step=step, now=now, event=event), *evaluator.statuses()):
            check(verdict)
    again = Evaluator(loaded.rules)
    assert all(
        carried.kept
        for carried in again.load_state_dict(json.loads(json.dumps(evaluator.state_dict(), allow_nan=False)))
    )
    assert again.state_dict() == evaluator.state_dict()


def check(verdict: Verdict) -> None:
    assert verdict.state in set(State)
    assert verdict.describe()
    # whatever fails is a value that is no number, never the language
    assert not verdict.reason or " is no number (" in verdict.reason
    assert not any(f"({kind}:" in verdict.reason for kind in ("float", "int", "bool", "NoneType"))
    assert verdict.actions == () or verdict.state in (State.FIRED, State.ERROR)
    assert all(one.value is None or type(one.value) in (float, bool) for one in verdict.operands)


def test_the_names_used_here_are_metrics() -> None:
    assert set(NAMES) - {"x"} <= set(BUILT_IN)
