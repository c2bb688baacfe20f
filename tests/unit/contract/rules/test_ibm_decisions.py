"""IBM's files decide here as they did: compared with the original itself, in a process of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import assume, event, given
from hypothesis import strategies as st

from contract.rules.actions import NAMES, Log
from contract.rules.evaluating import Evaluator
from contract.rules.faults import Code
from contract.rules.ibm import _LINE, import_ibm
from contract.rules.verdicts import State
from tests.ibm_original import Decided, Original
from tests.ibm_streams import RECORDED, Moment, observation_of, stream
from tests.properties.profiles import machine_settings

ACTION_OF = {
    "should_training_stop": "stop",
    "should_save": "save",
    "should_evaluate": "evaluate",
    "should_log": "log",
}
EVENT_OF = {
    "on_train_begin": "start",
    "on_step_end": "step",
    "on_log": "log",
    "on_evaluate": "evaluate",
    "on_save": "save",
    "on_epoch_end": "epoch",
    "on_train_end": "end",
}
Decision = tuple[int, str, str]
"""Number of the event, controller, action."""


class Told(NamedTuple):
    """What rules decide."""

    decisions: list[Decision]
    lines: list[tuple[int, str]]
    """Number of the event, and what is written."""

    def before(self, until: int) -> Told:
        """Without what the original did not live to see."""
        return Told(*([one for one in part if one[0] < until] for part in self))  # type: ignore[arg-type]


def told_by(decided: Decided) -> Told:
    """The original's, in this language's words."""
    decisions = [(number, name, ACTION_OF[action]) for number, name, action in decided.taken]
    return Told(decisions, [(number, line.replace("nan", "NaN")) for number, line in decided.lines])


def by_the_import(config: dict[str, Any] | str, moments: list[Moment], *, resumed_at: int = -1) -> Told:
    imported = import_ibm(config if isinstance(config, str) else json.dumps(config))
    assert imported.rules is not None, imported.faults
    evaluator = Evaluator(imported.rules)
    found = Told([], [])
    for number, moment in enumerate(moments):
        if number == resumed_at:
            state = json.loads(json.dumps(evaluator.state_dict()))
            evaluator = Evaluator(imported.rules)
            assert all(carried.kept for carried in evaluator.load_state_dict(state))
        observed = observation_of(moment)
        verdicts = evaluator.observe(observed, step=moment.step, now=float(number), event=EVENT_OF[moment.event])
        assert not [verdict for verdict in verdicts if verdict.state is State.ERROR]
        for verdict in verdicts:
            for action in verdict.actions:
                found.decisions.append((number, verdict.rule, NAMES[type(action)]))
                if isinstance(action, Log) and action.text.text != _LINE:
                    found.lines.append((number, action.text.render(evaluator.values())))
    return found


def line_of(form: str) -> dict[str, Any]:
    """An operation that writes a line."""
    return {"name": "line", "class": "LogControl", "arguments": {"log_format": form, "log_level": "info"}}


def config_of(rule: str, *triggers: str, **more: Any) -> dict[str, Any]:
    return {
        "controller_metrics": [
            {"name": "now", "class": "TrainingState"},
            {"name": "newest", "class": "Loss"},
            {"name": "evaluation", "class": "EvalMetrics"},
            {"name": "window", "class": "HistoryBasedMetric", "arguments": {"window_size": 3}},
            {"name": "single", "class": "HistoryBasedMetric"},
            {"name": "endless", "class": "HistoryBasedMetric", "arguments": {"window_size": -1}},
            {"name": "ranks", "class": "PerProcessState"},
        ],
        "controllers": [
            {
                "name": "rule",
                "triggers": list(triggers),
                "rule": rule,
                "operations": ["hfcontrols.should_training_stop"],
                **more,
            }
        ],
    }


LOSS = 'single["training_loss"]["loss"]'
EXAMPLES = {path.stem: path.read_text() for path in Path(__file__).with_name("ibm_examples").glob("*.yaml")}
"""Those that the original shows, with names of our own."""
LINE = line_of("epoch {now[epoch]:.3f}")


@pytest.mark.parametrize("log", RECORDED)
@pytest.mark.parametrize("shown", EXAMPLES)
def test_what_the_original_shows_decides_as_there(shown: str, log: str, original: Original) -> None:
    decided = original.decides(yaml.safe_load(EXAMPLES[shown]), RECORDED[log])
    found = by_the_import(EXAMPLES[shown], RECORDED[log])
    assert found.before(decided.until).decisions == told_by(decided).decisions


def test_every_shown_configuration_decides_something(original: Original) -> None:
    """So that equality of empty lists does not pass for agreement."""
    assert len(EXAMPLES) == 11
    for name, text in EXAMPLES.items():
        found = [original.decides(yaml.safe_load(text), moments) for moments in RECORDED.values()]
        assert any(decided.taken for decided in found), name
        lived = [decided.until == len(moments) for decided, moments in zip(found, RECORDED.values(), strict=True)]
        assert sum(lived) >= 3, name


def test_a_real_training_is_decided_as_there(original: Original) -> None:
    """With the controller in it: what the trainer does is what it is played with elsewhere."""
    rules = {
        "all": "now['epoch'] < 9",
        "low": 'newest["loss"] < 1.5',
        "rising": f'window["training_loss"]["loss"][-1] > {LOSS}[0] or endless["training_loss"]["loss"][-1] > 1',
        "late": 'evaluation["eval_loss"] < 0.2 and now["num_input_tokens_seen"] >= 30',
        "first": 'len(window["metrics"]) > 0 and window["metrics"]["eval_loss"][0] > 0.1',
        "last": 'now["is_final"] == True',
    }
    controllers = [
        {"name": f"{name}_{event}", "triggers": [event], "rule": rule, "operations": ["line.should_log"]}
        for event in EVENT_OF
        for name, rule in rules.items()
    ]
    operations = [line_of("{control_name} {now[epoch]:.4f} {now[global_step]} {now[num_input_tokens_seen]}")]
    config = {**config_of("True", "on_log"), "operations": operations, "controllers": controllers}
    moments, taken = original.trains(config)
    assert {moment.event for moment in moments} == set(EVENT_OF)
    decided = original.decides(config, moments)
    assert (decided.taken, decided.until) == (taken, len(moments))
    assert by_the_import(config, moments) == told_by(decided)
    assert {name for _, name, _ in taken} >= {"all_on_train_end", "low_on_log", "first_on_save", "last_on_save"}
    for name, text in EXAMPLES.items():
        of_this = original.decides(yaml.safe_load(text), moments)
        assert (name, by_the_import(text, moments).decisions) == (name, told_by(of_this).decisions)


@pytest.mark.parametrize(
    ("mode", "threshold", "losses", "fires"),
    [
        ("reset_on_failure", 2, [2, 2, 0, 2, 2, 2, 2, 2, 2], [6, 9]),
        ("no_reset_on_failure", 2, [2, 2, 0, 2, 2, 2, 0, 2, 2], [4, 8]),
        ("reset_on_failure", 0, [2, 0, 2, 2], [1, 3, 4]),
        ("no_reset_on_failure", 0, [2, 0, 2, 2], [1, 3, 4]),
        ("reset_on_failure", 1, [2, 2, 2, 2, 2], [2, 4]),
    ],
)
def test_patience(mode: str, threshold: int, losses: list[int], fires: list[int], original: Original) -> None:
    patience = {"patience_threshold": threshold, "mode": mode}
    config = config_of('newest["loss"] > 1', "on_log", patience=patience)
    moments = stream([float(loss) for loss in losses], steps_per_epoch=100, save_every=100)[:-3]
    found = by_the_import(config, moments)
    assert found == told_by(original.decides(config, moments))
    assert [moments[number].step for number, *_ in found.decisions] == fires


def test_a_resumed_training_decides_as_if_it_had_never_stopped() -> None:
    """The original forgets counters and windows: it stopped at step 13 instead of 8."""
    config = config_of('newest["loss"] > 1', "on_log", patience={"patience_threshold": 7})
    moments = stream([2.0] * 20, steps_per_epoch=100, save_every=100)
    whole = by_the_import(config, moments)
    assert [moments[number].step for number, *_ in whole.decisions] == [8, 16]
    assert all(by_the_import(config, moments, resumed_at=number) == whole for number in range(len(moments)))


# Rules made by chance
FORMATS = st.sampled_from(
    [
        *("{event_name} of {control_name}", "{now[epoch]:.3f} {now[global_step]} {now[num_input_tokens_seen]}"),
        *("{newest[loss]:.4f} {{}}", "{single[training_loss][loss][0]:.2e}", "{evaluation[eval_f1]:.3g}"),
        *("{window[window_size]} {now[global_step]:,}", "{single[metrics][eval_loss][0]:.1f}"),
    ]
)
NUMBERS = st.sampled_from(
    [
        *('now["epoch"]', 'now["global_step"]', "now.epoch", 'newest["loss"]', "newest.loss", 'newest["epoch"]'),
        *('newest["learning_rate"]', 'evaluation["eval_loss"]', 'evaluation["eval_f1"]', 'evaluation["epoch"]'),
        *('window["training_loss"]["loss"][-1]', 'window["training_loss"]["loss"][0]', 'window["window_size"]'),
        *('window["training_loss"]["loss"][-2]', 'window["training_loss"]["steps"][-1]', f"{LOSS}[0]"),
        *('window["metrics"]["eval_loss"][-1]', 'window["metrics"]["eval_loss"][0]', 'single["metrics"]["epoch"][-1]'),
        *('endless["training_loss"]["loss"][-3]', 'abs(newest["loss"])', 'newest["loss"] * 2', "1", "2", "0.5", "-1"),
        *('newest["loss"] - evaluation["eval_loss"]', 'now["global_step"] % 3', 'float(newest["loss"]) / 2'),
    ]
)
WHOLE = st.sampled_from(
    [
        *('len(window["training_loss"]["loss"]) == window["window_size"]', 'len(window["metrics"]) > 0'),
        *('len(window["training_loss"]["loss"]) >= 2', 'len(window["metrics"]["eval_loss"]) == 3', "newest != None"),
        *('3 == len(window["training_loss"]["loss"])', 'not len(endless["training_loss"]["loss"]) == 0'),
        *("evaluation == None", "newest == None", "evaluation != None", "True", "False", 'now["is_final"]'),
        *('now["is_final"] == False', '1 < newest["loss"] < 3', '(newest["loss"] > 1) == False'),
    ]
)
COMPARED = st.tuples(NUMBERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), NUMBERS).map(" ".join)
CONDITION = st.recursive(
    COMPARED | COMPARED | WHOLE,
    lambda inner: st.one_of(
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("(not {})".format, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
    ),
    max_leaves=5,
)
CONTROLLER = st.fixed_dictionaries(
    {
        "rule": CONDITION,
        "triggers": st.sampled_from([[name] for name in EVENT_OF]),
        "operations": st.lists(
            st.sampled_from([*(f"hfcontrols.{action}" for action in ACTION_OF), "line.should_log"]),
            min_size=1,
            max_size=2,
            unique=True,
        ),
    },
    optional={
        "patience": st.fixed_dictionaries(
            {"patience_threshold": st.integers(0, 3)},
            optional={"mode": st.sampled_from(["reset_on_failure", "no_reset_on_failure"])},
        )
    },
)
VALUE = st.one_of(st.sampled_from([0.5, 1.0, 2.0, 3.0]), st.floats(0, 4), st.just(math.inf))
EVALS = st.dictionaries(
    st.integers(1, 14), st.fixed_dictionaries({"eval_loss": VALUE | st.just(math.nan), "eval_f1": VALUE}), max_size=6
)
EVERY = {"steps_per_epoch": st.integers(1, 5), "log_every": st.integers(1, 3), "save_every": st.integers(1, 4)}
STREAM = st.one_of(
    st.builds(stream, st.lists(VALUE, max_size=14), evals=EVALS, **EVERY),
    # a loss that is NaN, without logs between that have none: see test_ibm_differences.py
    st.builds(stream, st.lists(VALUE | st.just(math.nan), max_size=14), **EVERY, summary=st.just(False)),
)


@machine_settings(runs=250, steps=1)
@given(controllers=st.lists(CONTROLLER, min_size=1, max_size=2), form=FORMATS, moments=STREAM)
def test_any_rule_that_is_imported_decides_as_there(
    controllers: list[dict[str, Any]], form: str, moments: list[Moment], original: Original
) -> None:
    named = [{"name": f"r{number}", **one} for number, one in enumerate(controllers)]
    config = {**config_of("True", "on_log"), "operations": [line_of(form)], "controllers": named}
    imported = import_ibm(json.dumps(config))
    assert {fault.code for fault in imported.faults} <= {Code.UNSUPPORTED, Code.INVALID_WINDOW, Code.TOO_LARGE}
    assume(imported.rules is not None)
    # an empty window decides there and not here, which is noted
    assume(not any("empty window" in note.reason for note in imported.notes))
    decided = original.decides(config, moments)
    event("died" if decided.died else "decided" if decided.taken else "silent")
    assert by_the_import(config, moments).before(decided.until) == told_by(decided)


def test_metrics_that_come_late_decide_nothing_before(original: Original) -> None:
    """Here an unknown operand leaves the decision to the others, if they can make it; there it does not."""
    rules = [
        'newest["loss"] < 1 or now["epoch"] > 1',
        'not (evaluation["eval_loss"] < 1 and now["epoch"] > 1)',
        'newest["loss"] < 1 if now["epoch"] > 1 else evaluation["eval_loss"] > 1',
        'len(window["training_loss"]["loss"]) == 3 or now["epoch"] > 0.5',
        'now["epoch"] > 0.5 or len(window["training_loss"]["loss"]) == 3',
        'len(window["training_loss"]["loss"]) == 3 and newest["loss"] > 9 or now["epoch"] > 0.5',
        # what is not known is not false, though what stands beside it is
        '(now["epoch"] < newest["loss"] and now["epoch"] < 0) or not now["epoch"] < 0',
    ]
    for rule in rules:
        config = config_of(rule, "on_step_end")
        noted = any("empty window" in note.reason for note in import_ibm(json.dumps(config)).notes)
        for name, moments in RECORDED.items():
            # there an evaluation is logged before the first loss, so that the window is there and empty
            if noted and name == "is logged seldom":
                continue
            decided = original.decides(config, moments)
            assert decided.until == len(moments)
            assert by_the_import(config, moments) == told_by(decided)
        assert any(original.decides(config, moments).taken for moments in RECORDED.values())


@pytest.mark.parametrize(
    "rule",
    [
        'evaluation["epoch"] > 0.5 and evaluation["eval_f1"] > 0',
        "evaluation.epoch > 0.5 and evaluation.eval_f1 > 0",
        'window["metrics"]["epoch"][-1] > 0.5 and window["metrics"]["eval_f1"][0] > 0',
        'window["metrics"]["steps"][-1] > 2 and evaluation["eval_f1"] > 0',
        'len(window["metrics"]["epoch"]) == 2 and evaluation["eval_f1"] > 0',
    ],
)
def test_evaluations_without_a_loss_decide_as_there(rule: str, original: Original) -> None:
    """Epochs and steps of evaluations are those of the metric that the rule names."""
    config = config_of(rule, "on_evaluate")
    moments = stream([1.0] * 6, evals={step: {"eval_f1": float(step)} for step in (2, 4, 5)})
    decided = original.decides(config, moments)
    assert 0 < len(decided.taken) < 3
    assert by_the_import(config, moments) == told_by(decided)
