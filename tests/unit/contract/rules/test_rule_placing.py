"""Test the placement of rules in the training or the control plane, the actions possible there, and signals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from baton.contract.errors import Fault
from baton.contract.rules.document.loader import MAX_SIGNAL_CHARS, MAX_SIGNALS, load, load_values
from baton.contract.rules.document.rule import CONTROL_PLANE_EVENTS, EVENTS, Signal
from baton.contract.rules.document.rule_placement import collect_group_values, split
from baton.contract.rules.language.faults import Code
from baton.contract.rules.metrics import BUILT_IN, name_in_rules
from gpu_client.training.session.environment import read_control

SIGNALS = {"ecc": "uncorrectable ECC error"}


def rule(when: str, name: str = "r", do: Any = "stop", **more: Any) -> dict[str, Any]:
    return {"name": name, "when": when, "do": do, **more}


def placed(*rules: dict[str, Any]) -> tuple[list[str], list[str]]:
    loaded = load_values({"signals": SIGNALS, "rules": list(rules)})
    assert loaded.rules is not None, loaded.faults
    training, control_plane = split(loaded.rules)
    assert training._replace(rules=()) == control_plane._replace(rules=()) == loaded.rules._replace(rules=())
    return [one.name for one in training.rules], [one.name for one in control_plane.rules]


@pytest.mark.parametrize(
    ("when", "theirs"),
    [
        ("loss > 5", False),
        ("wall > 12h", False),
        ("mean(eval.loss, 5) > step", False),
        ("log.ecc > 0", True),
        ("log.other > 0", False),
        ("cost > 40 or loss > 5", True),
        ("loss > 5 and mean(heartbeat.age, 3) > 2m", True),
        ("at(loss, failures) > 5", True),
        ("at(interruptions, loss) > 5", True),
        ("not (missing(queue.age) or true)", False),
        ("missing(queue.age)", True),
        ("group_count(loss) > 3", True),
        ("loss > 2 * group_median(loss, 500)", True),
    ],
)
@pytest.mark.parametrize("key", ["when", "clear"])
def test_by_what_it_reads(when: str, theirs: bool, key: str) -> None:
    said = rule(when) if key == "when" else rule("loss > 1", clear=when)
    assert placed(said) == (([], ["r"]) if theirs else (["r"], []))


@pytest.mark.parametrize("event", EVENTS)
def test_by_its_events(event: str) -> None:
    theirs = event in CONTROL_PLANE_EVENTS
    for on in (event, ["step", event]):
        assert placed(rule("loss > 5", on=on)) == (([], ["r"]) if theirs else (["r"], []))


def test_the_order_stays_and_texts_do_not_place_a_rule() -> None:
    told = {"alert": "cost {cost}"}
    rules = [rule("loss > 1", "a", told), rule("cost > 1", "b"), rule("loss > 2", "c"), rule("failures > 1", "d")]
    assert placed(*rules) == (["a", "c"], ["b", "d"])


def test_only_the_control_plane_knows_what_is_marked_so() -> None:
    theirs = {name for name, metric in BUILT_IN.items() if metric.control_plane}
    assert theirs == {"cost", "heartbeat.age", "queue.age", "failures", "interruptions"}


def test_rules_without_groups_need_nothing_of_others() -> None:
    loaded = load_values({"rules": [rule("cost > 5")]})
    assert loaded.rules is not None and collect_group_values(loaded.rules) == frozenset()


def faults_of(said: Any) -> list[Fault]:
    return load_values(said).faults


def warnings_of(*rules: dict[str, Any]) -> list[Fault]:
    loaded = load_values({"signals": SIGNALS, "rules": list(rules)})
    assert loaded.faults == []
    return loaded.warnings


@pytest.mark.parametrize("action", [{"rollback": {}}, "skip_batch", {"hook": "mine"}, {"profile": 5}])
def test_what_only_a_training_can_do_is_refused_in_a_rule_of_the_control_plane(action: Any) -> None:
    name = action if isinstance(action, str) else next(iter(action))
    (fault,) = faults_of({"rules": [rule("cost > 5 and loss > 2", do=["stop", action])]})
    assert (fault.code, fault.field, fault.reason.split()[0]) == (Code.MISPLACED, "rules.0.do.1", name)
    assert "the training's metrics alone" in fault.remedy
    (alone,) = faults_of({"rules": [rule("loss > 2", do=action, on="timer")]})
    assert (alone.code, alone.field) == (Code.MISPLACED, "rules.0.do")
    assert faults_of({"rules": [rule("loss > 2", do=action)]}) == []


def test_the_place_of_what_is_refused_is_that_of_the_action() -> None:
    text = "rules:\n  - name: a\n    when: cost > 5\n    do:\n      - stop\n      - rollback: {to: best}\n"
    (fault,) = load(text).faults
    assert (fault.line, fault.column) == (6, 9)


@pytest.mark.parametrize(
    "action", ["stop", "pause", "requeue", "save", "evaluate", {"set": {"knob": "lr", "factor": 0.5}}, {"log": "x"},
               {"alert": "x"}, {"scale": {"group": "g", "delta": 1}}],
)  # fmt: skip
def test_what_the_control_plane_can_order_is_taken(action: Any) -> None:
    assert faults_of({"rules": [rule("cost > 5", do=action)]}) == []


def test_a_rule_that_scales_is_the_control_plane_s_whatever_it_reads() -> None:
    scale = {"scale": {"group": "g", "delta": 1}}
    loaded = load_values({"rules": [rule("loss > 2", "a", do=["save", scale]), rule("loss > 2", "b", do="save")]})
    assert loaded.rules is not None
    placed = split(loaded.rules)
    assert [one.name for one in placed.control_plane.rules] == ["a"]
    assert [one.name for one in placed.training.rules] == ["b"]
    (fault,) = faults_of({"rules": [rule("loss > 2", do=[scale, "rollback"])]})
    assert (fault.code, fault.field) == (Code.MISPLACED, "rules.0.do.1")


def test_windows_over_what_comes_with_heartbeats_are_warned_of_once() -> None:
    rules = [rule("mean(loss, 50) > 5", f"r{number}", on="heartbeat") for number in range(3)]
    (warning,) = warnings_of(*rules)
    assert (warning.code, warning.field) == (Code.HEARTBEAT_PACE, "rules.0.when")
    assert "mean(loss, 50)" in warning.reason
    assert warnings_of(rule("loss > 5", on="heartbeat")) == []
    assert warnings_of(rule("delta(log.ecc) > 5 or mean(cost, 10) > 5")) == []
    assert warnings_of(rule("mean(loss, 50) > 5")) == []


def test_events_that_the_control_plane_does_not_see_are_warned_of() -> None:
    (warning,) = warnings_of(rule("cost > 5", on=["step", "log"]))
    assert (warning.code, warning.field) == (Code.NEVER_FIRES, "rules.0.on")
    assert "heartbeat" in warning.remedy
    assert warnings_of(rule("cost > 5", on=["step", "heartbeat"])) == []


def test_a_text_that_names_what_the_training_does_not_know_is_warned_of() -> None:
    (warning,) = warnings_of(rule("loss > 5", do={"alert": "{loss} {cost}"}))
    assert (warning.code, warning.field) == (Code.MISPLACED, "rules.0.do") and "{cost}" in warning.reason
    assert warnings_of(rule("loss > 5 and cost > 1", do={"alert": "{loss} {cost}"})) == []


def test_signals_are_read() -> None:
    loaded = load('signals: {ecc: "uncorrectable ECC error", n_1: "x"}\nrules: []')
    assert loaded.rules is not None
    assert loaded.rules.signals == (Signal("ecc", SIGNALS["ecc"]), Signal("n_1", "x"))
    assert "log.ecc" in loaded.rules.metrics()
    assert faults_of({"signals": None, "rules": []}) == []


@pytest.mark.parametrize(
    ("signals", "code", "field"),
    [
        ([], Code.WRONG_SHAPE, "signals"),
        ("ecc", Code.WRONG_SHAPE, "signals"),
        ({f"s{number}": "x" for number in range(MAX_SIGNALS + 1)}, Code.TOO_LARGE, "signals"),
        ({"ECC": "x"}, Code.INVALID_VALUE, "signals.ECC"),
        ({"a.b": "x"}, Code.INVALID_VALUE, "signals.a.b"),
        ({"a" * 32: "x"}, Code.INVALID_VALUE, f"signals.{'a' * 32}"),
        ({"ecc": ""}, Code.INVALID_VALUE, "signals.ecc"),
        ({"ecc": "x" * (MAX_SIGNAL_CHARS + 1)}, Code.INVALID_VALUE, "signals.ecc"),
        ({"ecc": "two\nlines"}, Code.INVALID_VALUE, "signals.ecc"),
        ({"ecc": "\x1b[31m"}, Code.INVALID_VALUE, "signals.ecc"),
        ({"ecc": 5}, Code.INVALID_VALUE, "signals.ecc"),
        ({"ecc": None}, Code.INVALID_VALUE, "signals.ecc"),
        ({"ecc": ["x"]}, Code.INVALID_VALUE, "signals.ecc"),
        ({"mine": "x"}, Code.DUPLICATE_NAME, "signals.mine"),
    ],
)
def test_signals_that_cannot_be_are_refused(signals: Any, code: Code, field: str) -> None:
    (fault,) = faults_of({"signals": signals, "metrics": {"log.mine": {}}, "rules": []})
    assert (fault.code, fault.field) == (code, field) and fault.remedy


def test_as_many_and_as_long_as_allowed_are_taken() -> None:
    assert faults_of({"signals": {f"s{n}": "ü" * MAX_SIGNAL_CHARS for n in range(MAX_SIGNALS)}, "rules": []}) == []


def test_a_signal_that_is_not_there_is_told_with_the_nearest() -> None:
    (warning,) = warnings_of(rule("log.eccs > 0"))
    assert (warning.code, warning.remedy) == (Code.DOUBTFUL_NAME, "Did you mean log.ecc?")
    (warning,) = warnings_of(rule("log.quite_another > 0"))
    assert warning.code == Code.DOUBTFUL_NAME and "signals" in warning.remedy
    (fault,) = load_values({"signals": SIGNALS, "rules": [rule("log.eccs > 0")]}, reported=["loss"]).faults
    assert (fault.code, fault.remedy) == (Code.UNKNOWN_METRIC, "Did you mean log.ecc?")
    assert load_values({"signals": SIGNALS, "rules": [rule("log.ecc > 0")]}, reported=["loss"]).faults == []


def test_names_of_loops_are_those_of_rules() -> None:
    names = ("learning_rate", "eval_loss", "train/f1-macro", "loss")
    assert [*map(name_in_rules, names)] == ["lr", "eval.loss", "train.f1_macro", "loss"]


def test_a_training_without_a_control_plane_says_which_rules_are_not_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rules.yaml"
    text = "rules:\n- {name: dear, when: cost > 5, do: stop}\n- {name: worst, when: group_rank(loss) > 0.5, do: stop}\n"
    path.write_text(text + "- {name: mine, when: loss > 5, do: stop}\n")
    with caplog.at_level(logging.WARNING, "baton.rules"):
        assert read_control({}, path)["rules"]["revision"] == 1
    (record,) = caplog.records
    assert "dear, worst;" in record.getMessage() and "mine" not in record.getMessage()
    caplog.clear()
    path.write_text("rules:\n- {name: mine, when: loss > 5, do: stop}\n")
    read_control({}, path)
    assert caplog.records == []
