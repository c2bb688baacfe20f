"""IBM's files: both shapes are read; what is unsafe or undefined there is refused, what differs is noted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.rules.document.loader import load
from baton.contract.rules.language.faults import Code
from baton.contract.rules.limits import LIMITS
from gpu_client.importers.ibm.trainer_controller import Imported, import_ibm
from tests.kits.ibm.cases import Cases
from tests.properties.profiles import machine_settings
from tests.unit.importers.test_ibm_decisions import LINE, config_of

LISTED = """
controller_metrics:
  - name: trained
    class: Loss
controllers:
  - name: low
    triggers:
      - on_log
    rule: {rule}
    operations:
      - hfcontrols.should_training_stop
"""
MAPPED = """
controller-metrics:
  trained:
    Loss:
  w: {{HistoryBasedMetric: {{window_size: 2}}}}
  e: EvalMetrics
operations:
  say:
    LogControl: {{log_format: "it is {{trained}}", log_level: error}}
controllers:
  - name: low
    triggers: [on_log]
    rule: {rule}
    operations: [hfcontrols.should_training_stop, say.should_log]
"""


def when_of(rule: str, *triggers: str, **more: Any) -> str:
    imported = import_ibm(json.dumps(config_of(rule, *(triggers or ("on_log",)), **more)))
    assert imported.rules is not None, imported.faults
    return imported.rules.rules[0].when.text


def refused(rule: str, *triggers: str, **more: Any) -> Imported:
    imported = import_ibm(json.dumps(config_of(rule, *(triggers or ("on_log",)), **more)))
    assert (imported.rules, imported.text) == (None, "")
    assert all(
        fault.reason and fault.remedy and fault.line and fault.column and fault.code for fault in imported.faults
    )
    return imported


def test_both_shapes_are_read() -> None:
    listed = import_ibm(LISTED.format(rule='trained["loss"] < 1.0'))
    mapped = import_ibm(MAPPED.format(rule="trained < 1.0"))
    assert (listed.faults, mapped.faults) == ([], [])
    assert listed.rules is not None
    assert mapped.rules is not None
    assert [rule.when.text for rule in (*listed.rules.rules, *mapped.rules.rules)] == ["loss < 1", "loss < 1"]
    assert load(listed.text).rules == listed.rules
    assert [type(action).__name__ for action in mapped.rules.rules[0].actions] == ["Stop", "Log"]
    as_list = LISTED.replace("controller_metrics", "controller-metrics").format(rule="trained < 1.0")
    assert import_ibm(as_list).faults == []


def test_a_mapping_is_no_number_in_the_shape_that_the_code_reads() -> None:
    (fault,) = import_ibm(LISTED.format(rule="trained < 1.0")).faults
    assert (fault.line, fault.column, fault.code) == (9, 11, Code.WRONG_TYPE)
    assert fault.remedy == 'Write trained["loss"].'


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ('window["training_loss"]["loss"][0] > 1', "coalesce(lag(loss, 2), lag(loss, 1), loss) > 1"),
        ('window["training_loss"]["loss"][-3] > 1', "lag(loss, 2) > 1"),
        ('window["training_loss"]["steps"][-1] > 1', "at(step, loss) > 1"),
        ('endless["metrics"]["eval_f1"][-9] > 1', "lag(eval.f1, 8) > 1"),
        ('newest["learning_rate"] < 1e-5', "at(lr, loss) < 1e-05"),
        ("now.global_step % 10 == 0", "step % 10 == 0"),
        ('1 < newest["loss"] <= 2', "1 < loss and loss <= 2"),
        ('(newest["loss"] < 1) == False', "not loss < 1"),
        ('newest["loss"] < 1 or now["epoch"] > 3', "(loss < 1 or epoch > 3) and (loss < 1 or not loss < 1)"),
        ('now["epoch"] > 3 or newest["loss"] < 1', "epoch > 3 or loss < 1"),
        ("now != None", "true"),
        ('now["is_final"]', "false"),
        ('-newest["loss"] * 2 + 1 < 0', "-loss * 2 + 1 < 0"),
    ],
)
def test_expressions(rule: str, expected: str) -> None:
    assert when_of(rule) == expected


HOSTILE = [
    "10**3999999 > 0", "3999999**399999 > 0", "window.pop('loss') > 0", "newest['loss'].tofile('/tmp/x') == None",
    "now.model.zero_() == None", "newest.__class__.__init__.__globals__ == 1", "''.__class__ == 1",
    "__import__('os').system('true') == 0", "input('password') == ''", "open('/etc/passwd') == 1", "exec('1') == 1",
    "rand() > 0.5", "randint(10) > 5", "str(newest) == 'x'", "f'{newest}' == ''", "(lambda: True)()",
    "[x for x in window] == []", "(x := True)", "newest['loss'] > 1; now['epoch'] > 1", "newest = True",
    "'x' * 10**9 == ''", "['x'] * 9999999999 == []", "1 << 99999999 > 0", "newest and True", "not newest",
    "newest or True", "len(newest)", "len(window) and window[0] > 1", "1 if newest else 2", "2+2", "newest",
    "newest['loss']", "newest is None", "newest is not None", "newest < 1", "int(newest['loss']) > 1",
    "round(newest['loss']) > 1", "math_floor(newest['loss']) > 1", "math_sqrt(newest['loss']) > 1",
    "sum(window['training_loss']['loss']) > 1", "window['training_loss']['loss'][1:] == 1", "3 in window",
    "newest['loss'] // 2 > 1", "~newest['loss'] > 1", "newest['loss'] & 1 == 1", "1j > 0", "newest[newest] > 1",
    "window['training_loss']['global_step'][-1] > 1", "window['training_loss']['loss'][3] > 1",
    "window['training_loss']['loss'][1] > 1", "endless['training_loss']['loss'][0] > 1", "now['log_history'] == 1",
    "endless['window_size'] > 1", "missing > 1", "evaluation['loss'] > 1", "window != None",
    "len(window['metrics']) == 0",
    "not window['window_size'] == now['global_step']", "len(window['metrics']) > 0 or True",
    "not len(window['metrics']) > 0", "-" * 1900 + "1 > 0", "(" * 900 + "1" + ")" * 900 + " > 0", "9" * 1000 + " > 0",
    "(" * 30 + "newest['loss'] < 1" + " if evaluation['eval_loss'] < 1 else now['epoch'] > 1)" * 30,
    "((" * 18 + "newest['loss'] < 1" + " or True) and evaluation['eval_loss'] < 1 or now['epoch'] > 1)" * 18,
    "not " * 400 + "True", "1 +" * 600 + "1 > 0", "x" * 3000, "", " ", "\x00", "'", "newest['loss'] >", "𝕏 > 1 \ud7ff",
    "window['training_loss']['loss'][-1] > 1 and '\\d' == 1", "1if 1else 2", "await newest", "(yield)",
    "newest[...] > 1",
    "newest[-newest] > 1", "newest[True] > 1", "max(1, 2) > 1", "abs(1, 2) > 1", "float('nan') > 1", "abs(*newest) > 1",
]  # fmt: skip


@pytest.mark.parametrize("rule", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_unsafe_or_undefined_is_refused(rule: str) -> None:
    faults = refused(rule).faults
    assert len(faults) == 1
    assert faults[0].field == "controllers.0.rule"
    assert all(len(one.reason) < 300 for one in faults)


def test_places_are_those_of_the_file() -> None:
    text = LISTED.format(rule='trained["loss"] < 1 and rand() > 0.5')
    (fault,) = import_ibm(text).faults
    line = text.splitlines()[fault.line - 1]  # type: ignore[operator]
    assert line[fault.column - 1 :] == "rand() > 0.5"  # type: ignore[operator]
    block = LISTED.format(rule='|\n      (trained["loss"] < 1 and\n      rand() > 0.5)')
    (fault,) = import_ibm(block).faults
    assert block.splitlines()[fault.line - 1][fault.column - 1 :] == "rand() > 0.5)"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"patiense": {}}, Code.UNKNOWN_KEY, "Did you mean patience?"),
        ({"patience": {"patience_treshold": 2}}, Code.UNKNOWN_KEY, "Did you mean patience_threshold?"),
        ({"patience": {"mode": "reset_on_failur"}}, Code.INVALID_VALUE, "Did you mean reset_on_failure?"),
        ({"patience": {"patience_threshold": -1}}, Code.INVALID_VALUE, "0 to"),
        ({"patience": {"patience_threshold": True}}, Code.INVALID_VALUE, "0 to"),
        ({"patience": None}, Code.WRONG_SHAPE, "patience_threshold: 2"),
        ({"rule": True}, Code.WRONG_SHAPE, "quotes"),
        ({"rule": None}, Code.WRONG_SHAPE, "quotes"),
        ({"triggers": "on_log"}, Code.WRONG_SHAPE, "'- '"),
        ({"triggers": []}, Code.WRONG_SHAPE, "'- '"),
        ({"triggers": ["on_logg"]}, Code.UNKNOWN_EVENT, "Did you mean on_log?"),
        ({"triggers": ["on_init_end"]}, Code.UNSUPPORTED, "on_train_begin"),
        ({"triggers": ["on_step_begin"]}, Code.UNSUPPORTED, "on_step_end"),
        ({"triggers": ["on_predict"]}, Code.UNSUPPORTED, "on_train_end"),
        ({"operations": ["missing.should_training_stop"]}, Code.UNKNOWN_ACTION, "hfcontrols"),
        ({"operations": ["hfcontrols.missing"]}, Code.UNKNOWN_ACTION, "should_training_stop"),
        ({"operations": ["hfcontrols.should_"]}, Code.UNKNOWN_ACTION, "should_"),
        ({"operations": ["hfcontrols.should_epoch_stop"]}, Code.UNSUPPORTED, "should_training_stop"),
        ({"operations": []}, Code.WRONG_SHAPE, "'- '"),
        ({"config": {"trigger_loglevel": "info"}}, Code.UNKNOWN_KEY, "trigger_log_level"),
        ({"name": 3}, Code.WRONG_SHAPE, "quotes"),
        ({"rule": 'now["is_final"]', "triggers": ["on_log", "on_save"]}, Code.UNSUPPORTED, "on_save alone"),
    ],
)
def test_controllers_that_are_refused(change: dict[str, Any], code: Code, says: str) -> None:
    config = config_of("True", "on_log")
    config["controllers"][0].update(change)
    (fault,) = import_ibm(json.dumps(config)).faults
    assert fault.code is code
    assert says in fault.remedy
    assert fault.field.startswith("controllers.0")


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"controller_metrics": [{"name": "m", "class": "Custom"}]}, Code.UNSUPPORTED, "controller_metrics.0"),
        ({"controller_metrics": [{"name": "m"}]}, Code.MISSING_KEY, "controller_metrics.0"),
        ({"controller_metrics": [{"name": "a b", "class": "Loss"}]}, Code.INVALID_VALUE, "controller_metrics.0"),
        ({"controller_metrics": [LINE, LINE]}, Code.DUPLICATE_NAME, "controller_metrics.1"),
        ({"controller_metrics": 3}, Code.WRONG_SHAPE, "controller_metrics"),
        ({"controller_metrics": ["Loss"]}, Code.WRONG_SHAPE, "controller_metrics.0"),
        ({"controller-metrics": {"m": 3}}, Code.WRONG_SHAPE, "controller-metrics.m"),
        ({"controller-metrics": {}, "controller_metrics": []}, Code.CONFLICT, "controller-metrics"),
        ({"operations": [{"name": "o", "class": "Custom"}]}, Code.UNSUPPORTED, "operations.0"),
        ({"operations": [{"name": "o", "class": "LogControl"}]}, Code.MISSING_KEY, "operations.0.arguments"),
        ({"operation": []}, Code.UNKNOWN_KEY, "operation"),
        ({"controllers": []}, Code.MISSING_KEY, "controllers"),
    ],
)
def test_files_that_are_refused(change: dict[str, Any], code: Code, field: str) -> None:
    config = {**config_of("True", "on_log"), **change}
    if "controller-metrics" in change and len(change) == 1:
        del config["controller_metrics"]
    faults = import_ibm(json.dumps(config)).faults
    assert (code, field) in [(fault.code, fault.field) for fault in faults]


@pytest.mark.parametrize("size", [0, 1.5, "5", True, 10**6])
def test_windows_that_are_refused(size: object) -> None:
    config = config_of("True", "on_log")
    config["controller_metrics"][3]["arguments"]["window_size"] = size
    (fault,) = import_ibm(json.dumps(config)).faults
    assert fault.code is Code.INVALID_WINDOW


def test_metrics_come_from_evaluations_alone() -> None:
    config = config_of("True", "on_log")
    for event, expected in (("on_evaluate", []), ("on_predict", [Code.UNSUPPORTED]), ("on_no", [Code.UNSUPPORTED])):
        config["controller_metrics"][2]["arguments"] = {"source_event": event}
        assert [fault.code for fault in import_ibm(json.dumps(config)).faults] == expected


def said(form: str, level: str = "warning", **more: Any) -> Imported:
    line = {"name": "line", "class": "LogControl", "arguments": {"log_format": form, "log_level": level}}
    config = config_of("True", "on_log", operations=["line.should_log"], **more)
    return import_ibm(json.dumps({**config, "operations": [line]}))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("{event_name} of {control_name}", "on_log of rule"),
        ("{now[epoch]:.0f} {now[global_step]}", "{epoch:.0f} {step:d}"),
        ("{now[num_input_tokens_seen]} {now[global_step]:,}", "{tokens:d} {step:,d}"),
        ("{newest[loss]:.3f} {newest}", "{loss:.3f} {loss}"),
        ("{window[training_loss][loss][0]}", None),
        ("{single[training_loss][loss][0]:.1e}", "{loss:.1e}"),
        ("{single[metrics][eval_loss][0]} {window[window_size]}", "{eval.loss} 3"),
        ("{newest[epoch]:.1f}", "{epoch:.1f}"),
        ("{ranks[rank]} {{x}} {evaluation[eval_f1]:.1%}", "0 {{x}} {eval.f1:.1%}"),
        ("{state}", "step {step:d}, epoch {epoch:.2f}"),
        ("in {path}", "in checkpoint of step {step:d}"),
        ("{args.hub_token}", None),
        ("{args}", None),
        ("{newest.__class__.__init__.__globals__}", None),
        ("{now.__class__}", None),
        ("{newest[loss]!r}", None),
        ("{newest[loss]:{window}}", None),
        ("{newest[loss]:>100000000}", None),
        ("{}", None),
        ("{0}", None),
        ("{model}", None),
        ("{unknown}", None),
        ("{", None),
        ("{newest[", None),
        ("", None),
    ],
)
def test_log_formats(form: str, expected: str | None) -> None:
    imported = said(form)
    if expected is None:
        assert imported.rules is None
        assert all(fault.reason and fault.remedy and fault.line for fault in imported.faults)
    else:
        assert imported.rules is not None, imported.faults
        assert imported.rules.rules[0].actions[0].text.text == expected  # type: ignore[union-attr]


def test_levels_of_logs_are_severities() -> None:
    for level, severity in (("DEBUG", "info"), ("info", "info"), ("Warning", "warning"), ("critical", "error")):
        imported = said("x", level)
        assert imported.rules is not None
        assert imported.rules.rules[0].severity == severity
    assert [fault.code for fault in said("x", "loud").faults] == [Code.INVALID_VALUE]


def test_what_differs_is_noted() -> None:
    config = config_of(
        "len(window['training_loss']['loss']) < 2", "on_log", "on_evaluate", patience={}, name="Über all"
    )
    config["controllers"][0]["operations"] = ["hfcontrols.should_log"]
    config["controllers"].append({**config["controllers"][0], "config": {"trigger_log_level": "info"}})
    imported = import_ibm(json.dumps(config))
    assert imported.rules is not None
    assert [rule.name for rule in imported.rules.rules] == ["ber-all", "ber-all-2"]
    assert imported.rules.rules[0].when.text == "(isnan(loss) or not isnan(loss)) and count(loss) < 2"
    reasons = [note.reason for note in imported.notes]
    for words in ("is called ber-all here", "one for all its 2 triggers", "empty window", "not asked to log"):
        assert any(words in reason for reason in reasons), words
    assert [note.code for note in imported.notes].count(Code.DROPPED) == 1
    assert all(note.line and note.column and note.remedy for note in imported.notes)


def test_all_faults_are_told_once() -> None:
    """A metric whose definition is wrong is not missing besides."""
    config = config_of("newest['loss'] < 1", "on_log", operations=["line.should_log", "hfcontrols.no"])
    config["controller_metrics"][1]["class"] = "Los"
    config["operations"] = [{**LINE, "arguments": {"log_format": "x", "log_level": "loud"}}]
    faults = import_ibm(json.dumps(config)).faults
    assert [fault.field for fault in faults] == [
        "controller_metrics.1", "controllers.0.operations.1", "operations.0.arguments.log_level",
    ]  # fmt: skip


def test_what_the_translation_is_too_large_for_is_told_of_the_file() -> None:
    rule = " or ".join(["(newest['loss'] < 1 if evaluation['eval_loss'] < 1 else now['epoch'] > 1)"] * 20)
    (fault,) = refused(rule).faults
    assert (fault.code, fault.field) == (Code.TOO_LARGE, "controllers.0.rule")
    assert len(rule) < LIMITS.text_chars


@pytest.mark.parametrize("text", ["", "3", "[]", "a: [", "a: &x 1\nb: *x", "!!python/object:os.system {}", "\ud800"])
def test_what_is_no_such_file(text: str) -> None:
    imported = import_ibm(text)
    assert imported.faults
    assert all(fault.reason and fault.code for fault in imported.faults)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CONTROLLER = st.integers(0, 10**6).map(lambda seed: Cases(seed).controller())
KEY = st.sampled_from(["controller_metrics", "controller-metrics", "operations", "controllers"])
WORDS = (
    "newest", "window", "now", '["loss"]', '["training_loss"]', "[-1]", "(", ")", "len", "and", "or", "not", "<",
    "==", "None", "True", "1", "0.5", ".", ",", "if", "else", "*", "**", "'", ":=", "lambda", "\n", "é",
)  # fmt: skip


@machine_settings(runs=150, steps=1)
@given(
    value=ANYTHING | st.dictionaries(KEY, ANYTHING | st.lists(CONTROLLER | ANYTHING, max_size=2), max_size=4),
    rule=st.text(max_size=40) | st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join),
    form=st.text(alphabet="{}[]:.!newst0d ", max_size=20),
)
def test_no_file_raises(value: Any, rule: str, form: str) -> None:
    for imported in (import_ibm(json.dumps(value)), import_ibm(json.dumps(config_of(rule, "on_log"))), said(form)):
        assert (imported.rules is None) == bool(imported.faults)
        assert all(fault.reason and fault.code in set(Code) for fault in (*imported.faults, *imported.notes))
        assert imported.rules is None or load(imported.text).rules == imported.rules
