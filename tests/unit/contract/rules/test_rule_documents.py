"""Rule documents: what is read, and every fault with its place and the nearest name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from baton.contract.rules.document.actions import (
    ACTIONS,
    NAMES,
    Alert,
    Evaluate,
    HookAction,
    Log,
    Pause,
    ProfileAction,
    Requeue,
    RollbackAction,
    Save,
    Scale,
    Set,
    SkipBatch,
    Stop,
)  # fmt: skip
from baton.contract.rules.document.durations import PendingPeriod, Period, parse_pending_period, parse_period
from baton.contract.rules.document.loader import Loaded, load, load_values
from baton.contract.rules.language.faults import Code, find_typo
from baton.contract.rules.language.messages import MessageError, parse_message
from baton.contract.rules.language.typed_ast import Chain
from baton.contract.rules.limits import Limits
from baton.contract.rules.metrics import Kind, Metric

FULL = """\
version: 1
metrics:
  eval.f1_macro: {goal: max}
  my.wait: {kind: duration, unit: s}
rules:
  - name: diverged   # a comment
    description: The loss runs away.
    when: >-
      zscore(loss, 100) > 6
      or not isfinite(loss)
    for: 3 of 5
    warmup: 200 steps
    cooldown: 10m
    max_fires: 2
    clear: zscore(loss, 100) < 2
    do:
      - rollback: {to: best, skip: 10, lr_factor: 0.5, budget: 2}
      - alert: "loss {loss:.3f} at step {step:d}, {eval.f1_macro:.1%}"
    severity: error
    mode: dry_run
    on_error: stop
  - name: save-often
    when: true
    every: 100 steps
    cooldown: 1 step
    do: save
  - name: good
    when: eval.f1_macro > 0.9 and my.wait < 1s
    on: [evaluate, save]
    once: true
    do: stop
"""


def faults_of(loaded: Loaded) -> list[tuple[str, int | None, int | None, str]]:
    assert loaded.rules is None
    return [(fault.code, fault.line, fault.column, fault.field) for fault in loaded.faults]


def test_everything_a_document_can_say() -> None:
    loaded = load(FULL)
    assert (loaded.faults, loaded.warnings) == ([], [])
    assert loaded.rules is not None
    first, second, third = loaded.rules.rules
    assert loaded.rules.declared == (Metric("eval.f1_macro", goal="max"), Metric("my.wait", Kind.DURATION, "s"))
    assert (first.name, first.description) == ("diverged", "The loss runs away.")
    assert first.when.text == "zscore(loss, 100) > 6 or not isfinite(loss)"
    assert isinstance(first.clear, Chain)
    assert (first.pending, first.warmup) == (PendingPeriod(Period("checks", 3), 5), Period("steps", 200))
    assert (first.cooldown, first.max_fires, first.on_error) == (Period("seconds", 600.0), 2, "stop")
    assert (first.severity, first.mode) == ("error", "dry_run")
    rollback, alert = first.actions
    assert rollback == RollbackAction("best", 10, 0.5, 2)
    assert isinstance(alert, Alert)
    assert alert.text.render({"loss": 2.0, "step": 7.0, "eval.f1_macro": None}) == "loss 2.000 at step 7, unknown"
    assert (second.every, second.on, second.actions) == (Period("steps", 100), frozenset(), (Save(),))
    assert (third.on, third.max_fires, third.actions) == (frozenset({"evaluate", "save"}), 1, (Stop(),))
    assert (third.severity, third.mode, third.on_error) == ("warning", "enforce", "ignore")


def test_json_reads_as_yaml_does() -> None:
    value = {"rules": [{"name": "a", "when": "loss > 1", "do": [{"log": "é \U0001f600 {loss}"}]}]}
    plain = load_values(value)
    assert plain.rules is not None
    for text in (
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, indent="\t", ensure_ascii=False),
        json.dumps(value, indent=2, ensure_ascii=False),
    ):
        read = load(text).rules
        assert read is not None
        assert read._replace(digest=plain.rules.digest) == plain.rules


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("stop", Stop()),
        ("stop: failed", Stop("failed")),
        ("stop: {outcome: failed, save: false}", Stop("failed", False)),
        ("save", Save()),
        ("save: best-so-far", Save("best-so-far")),
        ("evaluate", Evaluate()),
        ("log: at {step}", Log(parse_message("at {step}"))),
        ("set: {knob: lr, factor: 0.5, min: 1.0e-6}", Set("lr", factor=0.5, min=1e-6)),
        ("set: {knob: data.generators, value: 4}", Set("data.generators", value=4.0)),
        ("rollback", RollbackAction()),
        ("skip_batch", SkipBatch()),
        ("pause", Pause()),
        ("profile: 10", ProfileAction(10)),
        ("requeue: {exclude_host: false}", Requeue(False)),
        ("scale: {group: generators, delta: -1}", Scale("generators", -1, least=0, most=16)),
        ("scale: {group: generators, delta: -5, least: 20}", Scale("generators", -5, least=20, most=16)),
        ("scale: {group: Digits_1.a, delta: 3, least: 2, most: 100}", Scale("Digits_1.a", 3, least=2, most=100)),
        ("hook: my_hook", HookAction("my_hook")),
    ],
)
def test_actions(said: str, expected: object) -> None:
    loaded = load(f"rules:\n  - name: a\n    when: loss > 1\n    do:\n      - {said}\n")
    assert loaded.faults == []
    assert loaded.rules is not None
    assert loaded.rules.rules[0].actions == (expected,)
    assert set(NAMES.values()) == set(ACTIONS)


@pytest.mark.parametrize(
    ("said", "code", "says"),
    [
        ("stopp", Code.UNKNOWN_ACTION, "Did you mean stop?"),
        ("stop: {outcom: failed}", Code.UNKNOWN_KEY, "Did you mean outcome?"),
        ("stop: done", Code.INVALID_VALUE, "complete or failed"),
        ("save: Best Model", Code.INVALID_VALUE, "tag"),
        ("save: ../x", Code.INVALID_VALUE, "tag"),
        ("evaluate: 3", Code.WRONG_SHAPE, "by name"),
        ("log", Code.MISSING_KEY, "text"),
        ("log: ''", Code.INVALID_TEXT, "empty"),
        ("set: lr", Code.WRONG_SHAPE, "knob"),
        ("set: {knob: lr}", Code.CONFLICT, "exactly one"),
        ("set: {knob: lr, value: 1, factor: 2}", Code.CONFLICT, "exactly one"),
        ("set: {knob: lr, value: 1, max: 0.5}", Code.CONFLICT, "bounds"),
        ("set: {knob: lr, factor: 1, min: 2, max: 1}", Code.CONFLICT, "more than max"),
        ("set: {knob: lr, factor: 0}", Code.INVALID_VALUE, "factor"),
        ("set: {knob: __class__.x, factor: '2'}", Code.INVALID_VALUE, "factor"),
        ("rollback: {to: yesterday}", Code.INVALID_VALUE, "last or best"),
        ("rollback: {budget: 0}", Code.INVALID_VALUE, "budget"),
        ("rollback: {skip: 1.5}", Code.INVALID_VALUE, "skip"),
        ("profile: true", Code.INVALID_VALUE, "whole number"),
        ("scale: {group: g, delta: 0}", Code.INVALID_VALUE, "changes nothing"),
        ("scale: {group: g, delta: 101}", Code.INVALID_VALUE, "from -100 to 100"),
        ("scale: {group: g, delta: 1, most: 101}", Code.INVALID_VALUE, "from 1 to 100"),
        ("scale: {group: g, delta: 1, most: 0}", Code.INVALID_VALUE, "from 1 to 100"),
        ("scale: {group: g, delta: -1, least: -1}", Code.INVALID_VALUE, "from 0 to 100"),
        ("scale: {group: g, delta: 1, least: 17, most: 16}", Code.CONFLICT, "least is more than most"),
        ("scale: {group: g, delta: 1, min: 1}", Code.UNKNOWN_KEY, "least"),
        ("scale: {group: 'a b', delta: 1}", Code.INVALID_VALUE, "group"),
        ("scale: {delta: 1}", Code.MISSING_KEY, "group"),
        ("hook: a b", Code.INVALID_VALUE, "name"),
        ("{stop: {}, save: {}}", Code.WRONG_SHAPE, "no action"),
        ("[stop]", Code.WRONG_SHAPE, "no action"),
        ("7", Code.WRONG_SHAPE, "no action"),
    ],
)
def test_actions_that_are_none(said: str, code: Code, says: str) -> None:
    loaded = load(f"rules:\n  - name: a\n    when: loss > 1\n    do:\n      - {said}\n")
    assert loaded.rules is None
    fault = loaded.faults[0]
    assert (fault.code, fault.line) == (code, 5)
    assert says in f"{fault.reason} {fault.remedy}"


RULE = "rules:\n  - name: a\n    when: loss > 1\n    do: stop\n"


@pytest.mark.parametrize(
    ("text", "code", "line", "column", "says"),
    [
        ("", Code.WRONG_SHAPE, 1, 1, "rules:"),
        ("[]", Code.WRONG_SHAPE, 1, 1, "rules:"),
        ("rules: [", Code.UNREADABLE, 1, 9, "not YAML"),
        ("a: &x 1\nb: *x", Code.UNREADABLE, 1, 4, "anchors"),
        ("rules: !!python/object:os.system {}", Code.UNREADABLE, 1, 1, "tag"),
        ("{}", Code.MISSING_KEY, 1, 1, "'rules' is missing"),
        ("version: 2\nrules: []", Code.INVALID_VALUE, 1, 1, "version: 1"),
        ("rule: []\nrules: []", Code.UNKNOWN_KEY, 1, 1, "Did you mean rules?"),
        ("rules: {}", Code.WRONG_SHAPE, 1, 1, "list"),
        ("rules: [loss]", Code.WRONG_SHAPE, 1, 9, "no rule"),
        ("rules:\n  - when: loss > 1\n    do: stop\n", Code.MISSING_KEY, 2, 5, "no name"),
        (RULE.replace("name: a", "name: Bad Name"), Code.INVALID_VALUE, 2, 5, "rule's name"),
        (RULE.replace("    when: loss > 1\n", ""), Code.MISSING_KEY, 2, 5, "no condition"),
        (RULE.replace("    do: stop\n", ""), Code.MISSING_KEY, 2, 5, "has no action"),
        (RULE + "    patiense: 3\n", Code.UNKNOWN_KEY, 5, 5, "There are"),
        (RULE + "    colldown: 3s\n", Code.UNKNOWN_KEY, 5, 5, "Did you mean cooldown?"),
        (RULE + "    do: save\n", Code.UNREADABLE, 5, 5, "occurs twice"),
        (RULE + "  - name: a\n    when: loss > 2\n    do: save\n", Code.DUPLICATE_NAME, 5, 5, "already (rule 1)"),
        (RULE + "    on: evalute\n", Code.UNKNOWN_EVENT, 5, 5, "Did you mean evaluate?"),
        (RULE + "    on: [log, 3]\n", Code.UNKNOWN_EVENT, 5, 15, "'3'"),
        (RULE + "    on: []\n", Code.WRONG_SHAPE, 5, 5, "no event"),
        (RULE + "    on: log\n    every: 5 steps\n", Code.CONFLICT, 6, 5, "exclude"),
        (RULE + "    every: 3 checks\n", Code.INVALID_VALUE, 5, 5, "'200 steps' or '10m'"),
        (RULE + "    every: 0 steps\n", Code.INVALID_VALUE, 5, 5, "1 step"),
        (RULE + "    for: 3\n", Code.INVALID_VALUE, 5, 5, "3 of 5"),
        (RULE + "    for: 5 of 3\n", Code.INVALID_VALUE, 5, 5, "3 of 5"),
        (RULE + "    for: 10 parsecs\n", Code.INVALID_VALUE, 5, 5, "10m"),
        (RULE + "    warmup: soon\n", Code.INVALID_VALUE, 5, 5, "200 steps"),
        (RULE + "    cooldown: -3 steps\n", Code.INVALID_VALUE, 5, 5, "200 steps"),
        (RULE + "    once: 1\n", Code.INVALID_VALUE, 5, 5, "once: true"),
        (RULE + "    max_fires: 0\n", Code.INVALID_VALUE, 5, 5, "1 or more"),
        (RULE + "    once: true\n    max_fires: 2\n", Code.CONFLICT, 6, 5, "Leave out one"),
        (RULE + "    severity: fatal\n", Code.INVALID_VALUE, 5, 5, "info or warning or error"),
        (RULE + "    mode: dry-run\n", Code.INVALID_VALUE, 5, 5, "enforce or dry_run"),
        (RULE + "    on_error: raise\n", Code.INVALID_VALUE, 5, 5, "ignore or stop"),
        (RULE + "    description: 3\n", Code.INVALID_VALUE, 5, 5, "quotes"),
        (RULE.replace("do: stop", "do: []"), Code.INVALID_VALUE, 4, 5, "1 to 16"),
        # inside expressions and texts, to the character
        (RULE.replace("loss > 1", "los0 > 1 and mena(loss, 5) > 1"), Code.UNKNOWN_FUNCTION, 3, 24, "mean"),
        (RULE.replace("loss > 1", "'mena(loss, 5) > 1'"), Code.UNKNOWN_FUNCTION, 3, 12, "mean"),
        (RULE.replace("loss > 1", "|\n      loss > 1\n      and wall > 3"), Code.WRONG_TYPE, 5, 16, "duration"),
        (RULE.replace("loss > 1", ">\n      loss > 1\n      and wall > 3"), Code.WRONG_TYPE, 3, 11, "duration"),
        (RULE.replace("loss > 1", "1"), Code.WRONG_SHAPE, 3, 5, "expression"),
        (RULE.replace("do: stop", "do: {log: 'loss {loss.__class__}'}"), Code.INVALID_TEXT, 4, 21, "no metric"),
        ("metrics: []\nrules: []", Code.WRONG_SHAPE, 1, 1, "mapping"),
        ("metrics: {loss: {}}\nrules: []", Code.DUPLICATE_NAME, 1, 11, "built in"),
        ("metrics: {a-b: {}}\nrules: []", Code.INVALID_VALUE, 1, 11, "letters"),
        ("metrics: {a: {kind: text}}\nrules: []", Code.INVALID_VALUE, 1, 11, "kind"),
        ("metrics: {a: {gaol: max}}\nrules: []", Code.UNKNOWN_KEY, 1, 15, "Did you mean goal?"),
        ("metrics: {a: {reduce: median}}\nrules: []", Code.INVALID_VALUE, 1, 15, "mean, max, min or sum"),
        ("metrics: {a: {reduce: [max]}}\nrules: []", Code.INVALID_VALUE, 1, 15, "mean, max, min or sum"),
    ],
)
def test_faults(text: str, code: Code, line: int, column: int, says: str) -> None:
    loaded = load(text)
    assert loaded.rules is None
    fault = loaded.faults[0]
    assert (fault.code, fault.line, fault.column) == (code, line, column), fault
    assert says in f"{fault.reason} {fault.remedy}"
    assert fault.remedy or code is Code.UNREADABLE


def test_all_faults_are_told_in_the_order_of_their_lines() -> None:
    text = "rules:\n  - name: a\n    when: mena(loss, 2) > 1 and loss\n    do: halt\n    foo: 1\n  - name: a\n"
    assert faults_of(load(text)) == [
        ("unknown_function", 3, 11, "rules.0.when"),
        ("wrong_type", 3, 33, "rules.0.when"),
        ("unknown_action", 4, 5, "rules.0.do"),
        ("unknown_key", 5, 5, "rules.0.foo"),
        ("missing_key", 6, 5, "rules.1"),
        ("missing_key", 6, 5, "rules.1"),
        ("duplicate_name", 6, 5, "rules.1.name"),
    ]


def test_metrics_that_a_training_is_known_to_report() -> None:
    text = RULE.replace("loss > 1", "eval.f1 > 1").replace("do: stop", "do: {log: 'f1 is {eval.f1_maco}'}")
    loaded = load(text, reported=["eval/f1_macro", "loss"])
    assert [(fault.code, fault.line, fault.column, fault.remedy) for fault in loaded.faults] == [
        (Code.UNKNOWN_METRIC, 3, 11, "Did you mean eval.f1_macro?"),
        (Code.UNKNOWN_METRIC, 4, 22, "Did you mean eval.f1_macro?"),
    ]


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"when": "loss < 1 and loss > 2"}, Code.NEVER_FIRES, "contradicts"),
        ({"when": "loss < 1 and (x > 0 and 1 < loss)"}, Code.NEVER_FIRES, "contradicts"),
        ({"when": "loss == 1 and loss == 2"}, Code.NEVER_FIRES, "contradicts"),
        ({"when": "mean(loss, 5) > 2 and mean(loss,5) <= 2"}, Code.NEVER_FIRES, "contradicts"),
        ({"when": "gpu.util > 100"}, Code.NEVER_FIRES, "contradicts"),
        ({"when": "mean(gpu.util, 5) < 0"}, Code.NEVER_FIRES, "contradicts"),
        ({"when": "2 < loss < 1"}, Code.NEVER_FIRES, "contradicts"),
        ({"when": "loss < 1 and loss > 2 or std(loss, 5) < 0"}, Code.NEVER_FIRES, "contradicts"),
        ({"when": "1 > 2"}, Code.NEVER_FIRES, "never true"),
        ({"when": "loss > 1 and false"}, Code.NEVER_FIRES, "never true"),
        ({"when": "loss > 1 or true"}, Code.ALWAYS_TRUE, "fires once"),
        ({"clear": "loss < 1 and loss > 2"}, Code.NEVER_CLEARS, "never cleared"),
        ({"warmup": "1001 steps"}, Code.NEVER_FIRES, "1,001 steps"),
        ({"for": "1001 steps"}, Code.NEVER_FIRES, "1,001 steps"),
        ({"every": "1001 steps"}, Code.NEVER_FIRES, "1,001 steps"),
        ({"for": "600 steps", "warmup": "600 steps"}, Code.NEVER_FIRES, "1,200 steps"),
        ({"when": "eval.los > 1"}, Code.DOUBTFUL_NAME, "Did you mean eval.loss?"),
        ({"when": "loss > 5", "clear": "loss > 3"}, Code.ALWAYS_CLEARS, "whenever the condition is"),
        ({"when": "loss > 5 and x > 1", "clear": "2 < loss and loss >= 5"}, Code.ALWAYS_CLEARS, "fires again"),
        ({"when": "mean(x, 5) < 1", "clear": "mean(x, 5) < 1"}, Code.ALWAYS_CLEARS, "fires again"),
        ({"when": "isnan(loss)", "clear": "isnan(loss)"}, Code.ALWAYS_CLEARS, "fires again"),
        ({"when": "loss > 5", "clear": "true"}, Code.ALWAYS_CLEARS, "fires again"),
        ({"when": "eval.loss > 3", "on": ["start"]}, Code.NEVER_FIRES, "knows its step alone"),
        ({"when": "missing(x) and mean(loss, 5) > 3", "on": "start"}, Code.NEVER_FIRES, "its step alone"),
        ({"when": "not (missing(x) or step > 3)", "on": "start"}, Code.NEVER_FIRES, "its step alone"),
        ({"do": ["stop", {"alert": "ends"}, "rollback"]}, Code.NEVER_FIRES, "this rollback is never executed"),
        ({"do": ["stop", {"stop": "failed"}]}, Code.NEVER_FIRES, "this stop is never executed"),
        ({"when": "cots > 5"}, Code.DOUBTFUL_NAME, "Did you mean cost?"),
        ({"when": "los > 5"}, Code.DOUBTFUL_NAME, "Did you mean loss?"),
        ({"when": "faluires > 5"}, Code.DOUBTFUL_NAME, "Did you mean failures?"),
        ({"when": "mean(gpu.utlis, 5) < 5"}, Code.DOUBTFUL_NAME, "Did you mean gpu.util?"),
        ({"when": "learning_rate > 5"}, Code.DOUBTFUL_NAME, "Write lr."),
        ({"do": {"alert": "{cots} USD at {step:d}, {eval.f1}"}}, Code.DOUBTFUL_NAME, "Did you mean cost?"),
    ],
)
def test_warnings(change: dict[str, Any], code: Code, says: str) -> None:
    loaded = load_values({"rules": [{"name": "a", "when": "loss > 1", "do": "stop", **change}]}, max_steps=1000)
    assert loaded.rules is not None
    assert [warning.code for warning in loaded.warnings] == [code]
    assert says in f"{loaded.warnings[0].reason} {loaded.warnings[0].remedy}"


@pytest.mark.parametrize(
    "when",
    ["loss > 1 and loss < 2", "loss >= 1 and loss <= 1", "loss < 1 or loss > 2", "x < 1 and y > 2",
     "loss != 1 and loss < 2", "min(x, 5) < 1 and max(x, 5) > 2",
     "kl > 1", "acc > 1", "lr0 > 1", "g.loss > 1", "loss_g > 1", "train.loss > 1", "ppl > 1", "eval.f1 > 1", "bleu > 1",
     "eval.acc > 1", "train_loss > 1", "mse > 1",
     "step % 100 == 0", "not (loss < 1 and loss > 2)", "isnan(loss) and loss < 1"],
)  # fmt: skip
def test_no_warning_without_a_reason(when: str) -> None:
    loaded = load_values({"rules": [{"name": "a", "when": when, "do": "stop", "for": "1000 steps"}]}, max_steps=1000)
    assert loaded.warnings == []


def test_all_windows_together_are_bounded() -> None:
    rules = [
        {"name": f"r{n}", "when": f"mean(x{n}, 100000) > 1 or mean(x{n}, 100000) < 0", "do": "stop"} for n in range(11)
    ]
    assert faults_of(load_values({"rules": rules})) == [(Code.TOO_LARGE, None, None, "rules")]
    assert load_values({"rules": rules[:10]}).rules is not None
    assert load_values({"rules": rules[:2]}, limits=Limits(total_points=199_999)).rules is None
    assert load_values({"rules": rules[:3]}, limits=Limits(rules=2)).faults[0].code is Code.TOO_LARGE
    assert load("a: " + "x" * 70_000).faults[0].code is Code.UNREADABLE


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), {"rules": [object()]}, float("nan"), None, [], "x"],
    ids=["set", "object", "object within", "nan", "none", "list", "text"],
)
def test_values_that_are_no_document(value: object) -> None:
    assert load_values(value).rules is None


def test_values_nested_without_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert load_values(endless).faults[0].code is Code.UNREADABLE
    assert load_values(deep).faults[0].code is Code.UNREADABLE
    assert load("[" * 50_000).faults[0].code is Code.UNREADABLE
    assert load('{"a":' * 10_000).faults[0].code is Code.UNREADABLE


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("{loss}", {"loss": 2.3456789}, "2.34568"),
        ("{loss:.3f}|{loss:.2e}|{loss:d}|{loss:.1%}|{loss:,.1f}|{loss:g}", {"loss": 1234.5678},
         "1234.568|1.23e+03|1235|123456.8%|1,234.6|1234.57"),
        ("{{{loss}}}", {"loss": 1.0}, "{1}"),
        ("{x:d} {x:.3f} {y}", {"x": float("nan"), "y": float("-inf")}, "NaN NaN -inf"),
        ("{x}", {}, "unknown"),
        ("{x:.99f}", {"x": 1e308}, format(1e308, ".99f")),
    ],
)  # fmt: skip
def test_texts(text: str, values: dict[str, float | None], expected: str) -> None:
    assert parse_message(text).render(values) == expected


@pytest.mark.parametrize(
    "text",
    ["{args.hub_token!r}", "{loss.__class__.__init__.__globals__[os].environ}", "{0}", "{}", "{loss!s}",
     "{loss:>1000000}", "{loss:{x}}", "{", "}", "{loss", "{loss:99999999f}", "{loss:.999f}", "{a b}", "{loss[0]}", "",
     " ", "x" * 1001, "{loss:c}", "{loss.__class__}"],
)  # fmt: skip
def test_texts_that_reach_for_more(text: str) -> None:
    with pytest.raises(MessageError):
        parse_message(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 checks", Period("checks", 3)),
        ("1 step", Period("steps", 1)),
        ("10m", Period("seconds", 600)),
        (" 1.5 h ", Period("seconds", 5400)),
        ("0s", Period("seconds", 0)),
        *[(text, None) for text in ("3", "3 of 5", "-1 steps", "1e3 steps", 3, "10 GB", "9" * 13 + "s", "400d", None)],
    ],
)
def test_periods(text: object, expected: Period | None) -> None:
    found = parse_period(text, "checks", "steps", "seconds")
    assert found == expected
    if found is not None:
        assert parse_period(str(found), "checks", "steps", "seconds") == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3 of 5", PendingPeriod(Period("checks", 3), 5)), ("0 of 5", None), ("3 of 2000", None), ("0 steps", None)],
)
def test_holds(text: str, expected: PendingPeriod | None) -> None:
    found = parse_pending_period(text)
    assert found == expected
    assert found is None or parse_pending_period(str(found)) == found


@pytest.mark.parametrize(
    "change",
    [
        {"when": "loss > 5", "clear": "loss < 3"},
        {"when": "loss > 5", "clear": "loss > 7"},
        {"when": "loss > 5", "clear": "loss != 5"},
        {"when": "loss > 5 or x > 1", "clear": "loss > 3"},
        {"when": "loss > 5", "clear": "loss > 3 and x < 1"},
        {"when": "loss > 5", "clear": "mean(loss, 5) > 3"},
        {"when": "isnan(loss)", "clear": "isfinite(loss)"},
        {"when": "eval.loss > 3", "on": ["start", "evaluate"]},
        {"when": "missing(eval.loss)", "on": "start"},
        {"when": "coalesce(eval.loss, 9) > 3 and step < 10", "on": "start"},
        {"when": "count(loss) < 3", "on": "start"},
        {"when": "eval.loss > 3", "on": "end"},
        # where nobody can take the job back, the rollback is rejected and the stop is done
        {"do": ["rollback", "stop"]},
        {"do": ["requeue", "stop"]},
        {"do": ["stop", "save"]},
        {"do": ["save", {"alert": "ends"}, "stop"]},
        # the control plane rejects the first of them while there is nothing to complete
        {"when": "wall > 1h and cost >= 0", "do": ["stop", {"stop": "failed"}]},
    ],
    ids=str,
)
def test_nothing_is_warned_of_that_may_come(change: dict[str, Any]) -> None:
    loaded = load_values({"rules": [{"name": "a", "when": "loss > 1", "do": "stop", **change}]})
    assert (loaded.faults, loaded.warnings) == ([], [])


def test_a_slip_of_a_declared_name_is_warned_of_and_what_is_reported_is_not() -> None:
    document = """
metrics: {reader.stalls: {goal: min}}
signals: {ecc: uncorrectable}
rules: [{name: a, when: reader.stall > 1 or log.eccc > 0 or cots > 1, do: stop}]
"""
    assert [one.remedy for one in load(document).warnings] == [
        "Did you mean reader.stalls?", "Did you mean log.ecc?", "Did you mean cost?",
    ]  # fmt: skip
    assert load(document, reported=["reader.stall", "log.eccc", "cots"]).warnings == []


def test_a_slip_is_looked_for_quickly_among_many_names() -> None:
    known = [f"{'a' * 35}.{number:03d}" for number in range(4000)]
    began = time.process_time()
    assert [find_typo(f"{'a' * 33}bb.x{number:02d}", known) for number in range(20)] == [None] * 20
    assert find_typo("a" * 4000, known) is None
    # Measured: 0.9 s, and twenty times as much without the limit of names that are compared.
    assert time.process_time() - began < 8
