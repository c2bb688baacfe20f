"""IBM's files decide here as they did: compared with the original itself, in a process of its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from baton.contract.rules.document.actions import NAMES, Log
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import State
from baton.contract.rules.language.faults import Code
from gpu_client.importers.ibm.trainer_controller import _LINE, import_ibm
from tests.kits.ibm.cases import METRICS, Cases, line_of
from tests.kits.ibm.streams import RECORDED, Moment, observation_of, stream
from tests.kits.ibm.trainer_controller import Decided, Original
from tests.properties.profiles import DEEP

pytestmark = pytest.mark.processes
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
    """Decisions and log lines of rules on one training."""

    decisions: list[Decision]
    lines: list[tuple[int, str]]
    """Number of the event, and the line that is logged."""

    def before(self, until: int) -> Told:
        """Return the part before event `until`, at which the original died."""
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


def config_of(rule: str, *triggers: str, **more: Any) -> dict[str, Any]:
    return {
        "controller_metrics": copy.deepcopy(METRICS),
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
"""Example configurations of the original, with names of our own."""
LINE = line_of("epoch {now[epoch]:.3f}")


@pytest.mark.parametrize("log", RECORDED)
@pytest.mark.parametrize("shown", EXAMPLES)
def test_what_the_original_shows_decides_as_there(shown: str, log: str, original: Original) -> None:
    decided = original.decides(yaml.safe_load(EXAMPLES[shown]), RECORDED[log])
    found = by_the_import(EXAMPLES[shown], RECORDED[log])
    assert found.before(decided.until).decisions == told_by(decided).decisions


def test_every_shown_configuration_decides_something(original: Original) -> None:
    """Each example configuration takes decisions: two empty lists would prove no agreement."""
    assert len(EXAMPLES) == 11
    for name, text in EXAMPLES.items():
        found = [original.decides(yaml.safe_load(text), moments) for moments in RECORDED.values()]
        assert any(decided.taken for decided in found), name
        lived = [decided.until == len(moments) for decided, moments in zip(found, RECORDED.values(), strict=True)]
        assert sum(lived) >= 3, name


def test_a_real_training_is_decided_as_there(original: Original) -> None:
    """A real training with IBM's controller takes the decisions of the replay and of the imported rules."""
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


def test_a_real_training_that_is_stopped(original: Original) -> None:
    moments, taken = original.trains(yaml.safe_load(EXAMPLES["loss-low"]))
    found = by_the_import(EXAMPLES["loss-low"], moments).decisions
    assert found == [(number, name, ACTION_OF[action]) for number, name, action in taken]
    assert moments[found[0][0]].step == moments[-1].step < 30


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


@pytest.mark.parametrize("seed", range(4 * (20 if DEEP else 1)))
def test_any_file_that_is_imported_decides_as_there(seed: int, original: Original) -> None:
    cases = Cases(seed)
    decisions = lines = lived = 0
    for _ in range(40):
        config = cases.file([_imported_one(cases) for _ in range(2)])
        moments = cases.training()
        decided = original.decides(config, moments)
        assert by_the_import(config, moments).before(decided.until) == told_by(decided), json.dumps(config)
        decisions, lines, lived = decisions + len(decided.taken), lines + len(decided.lines), lived + (not decided.died)
    assert decisions > 50
    assert lines > 0
    assert lived > 15


def _imported_one(cases: Cases) -> dict[str, Any]:
    """A controller that is not refused, and decides as the original."""
    while True:
        config = cases.file([controller := cases.controller()])
        imported = import_ibm(json.dumps(config))
        assert {fault.code for fault in imported.faults} <= {Code.UNSUPPORTED, Code.INVALID_WINDOW, Code.TOO_LARGE}
        # an empty window decides there and not here, which is noted
        if imported.rules is not None and not any("empty window" in note.reason for note in imported.notes):
            return controller


def test_metrics_that_come_late_decide_nothing_before(original: Original) -> None:
    """A late metric decides nothing before it comes; our rules let known operands decide, the original's do not."""
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
