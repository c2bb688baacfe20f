"""Test the decisions in which an imported file differs from IBM's controller: rows of docs/rules-ibm.md."""

from __future__ import annotations

import json
import math

import pytest

from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.metrics import name_in_rules
from gpu_client.importers.ibm.trainer_controller import import_ibm
from tests.kits.ibm.cases import line_of
from tests.kits.ibm.streams import Moment, stream
from tests.kits.ibm.trainer_controller import Original
from tests.unit.importers.test_ibm_decisions import Told, by_the_import, config_of, told_by

pytestmark = pytest.mark.processes
PLAIN = stream([3.0, 2.0, 1.0, 0.5, 0.25, 0.2], evals={4: {"eval_loss": 1.0}}, save_every=100)
ENDLESS = {"save_every": 100, "steps_per_epoch": 100}


def steps(moments: list[Moment], found: Told) -> list[int]:
    return [moments[number].step for number, *_ in found.decisions]


@pytest.mark.parametrize(
    ("rule", "trigger", "died", "fires"),
    [
        # a window is read before the first evaluation
        ('window["metrics"]["eval_loss"][-1] < 2', "on_step_end", "KeyError: 'eval_loss'", [5, 6]),
        # an index out of a window that is filling
        ('window["training_loss"]["loss"][-3] > 2', "on_log", "IndexError: deque index out of range", [3]),
        # a metric that evaluations do not give
        ('evaluation["eval_f1"] > 0', "on_evaluate", "KeyError: 'eval_f1'", []),
        # a division by zero: inf
        (
            'newest["loss"] / (now["global_step"] - now["global_step"]) > 1',
            "on_log",
            "ZeroDivisionError: float division by zero",
            [1, 2, 3, 4, 4, 5, 6, 6],
        ),
    ],
)
def test_an_error_in_a_rule_ends_no_training(
    rule: str, trigger: str, died: str, fires: list[int], original: Original
) -> None:
    config = config_of(rule, trigger)
    decided = original.decides(config, PLAIN)
    assert (decided.died, decided.taken) == (died, [])
    assert decided.until < len(PLAIN)
    assert steps(PLAIN, by_the_import(config, PLAIN)) == fires


def test_a_line_that_cannot_be_written_ends_no_training(original: Original) -> None:
    """A line that cannot be written is logged as "unknown"; in IBM's controller it ends the training."""
    config = config_of("True", "on_step_end", operations=["line.should_log"])
    config["operations"] = [line_of("{newest[loss]:.1f}")]
    decided = original.decides(config, PLAIN)
    assert (decided.died, decided.lines) == ("TypeError: 'NoneType' object is not subscriptable", [])
    lines = [line for _, line in by_the_import(config, PLAIN).lines]
    assert lines == ["unknown", "3.0", "2.0", "1.0", "0.5", "0.2"]


def test_numbers_in_a_line_without_a_form(original: Original) -> None:
    config = config_of("True", "on_log", operations=["line.should_log"])
    config["operations"] = [line_of("{newest[loss]}")]
    moments = stream([1.23456789, 2.0, math.nan], summary=False, **ENDLESS)
    assert [line for _, line in original.decides(config, moments).lines] == ["1.23456789", "2.0", "nan"]
    assert [line for _, line in by_the_import(config, moments).lines] == ["1.23457", "2", "NaN"]


def test_two_evaluation_sets(original: Original) -> None:
    config = config_of('window["metrics"]["eval_a_loss"][-1] < 1', "on_evaluate")
    moments = stream(
        [2.0, 2.0, 2.0, 2.0], evals={1: {"eval_a_loss": 0.5}, 2: {"eval_b_loss": 3.0}, 3: {"eval_a_loss": 2.0}}
    )
    decided = original.decides(config, moments)
    assert (steps(moments, told_by(decided)), moments[decided.until].step) == ([1], 2)
    assert decided.died == "KeyError: 'eval_a_loss'"
    # the second set says nothing of the first
    assert steps(moments, by_the_import(config, moments)) == [1, 2]


def test_patience_is_one_for_all_triggers(original: Original) -> None:
    config = config_of('newest["loss"] > 0', "on_log", "on_step_end", patience={"patience_threshold": 2})
    moments = stream([1.0] * 4, summary=False, **ENDLESS)
    assert steps(moments, told_by(original.decides(config, moments))) == [3, 4]
    assert steps(moments, by_the_import(config, moments)) == [2, 4]
    assert [note.reason for note in import_ibm(json.dumps(config)).notes] == [
        "patience is one for all its 2 triggers; the original counts each by itself"
    ]


def test_a_loss_that_is_nan_is_one_point(original: Original) -> None:
    """A NaN loss is one point; IBM's controller counts it again at the log of an evaluation without a loss."""
    config = config_of('len(window["training_loss"]["loss"]) == window["window_size"]', "on_log")
    moments = stream([math.nan, 2.0, 1.0, 1.0], evals={1: {"eval_loss": 1.0}}, summary=False, **ENDLESS)
    assert steps(moments, told_by(original.decides(config, moments))) == [2, 3, 4]
    assert steps(moments, by_the_import(config, moments)) == [3, 4]


def test_an_equal_loss_at_an_equal_epoch_is_a_point(original: Original) -> None:
    config = config_of('len(window["training_loss"]["loss"]) == window["window_size"]', "on_log")
    moments = stream([2.0, 2.0, 2.0, 2.0], summary=False, **ENDLESS)
    for moment in moments:
        moment.epoch = 0.0
        if moment.entry is not None:
            moment.entry["epoch"] = 0.0
    assert original.decides(config, moments).taken == []
    assert steps(moments, by_the_import(config, moments)) == [3, 4]


def test_an_empty_window_decides_nothing(original: Original) -> None:
    """An empty window decides nothing; IBM's window is also empty after a log without a loss, and decides."""
    config = config_of('len(window["training_loss"]["loss"]) < 1', "on_step_end")
    moments = stream([2.0] * 6, log_every=4, evals={1: {"eval_loss": 1.0}}, **ENDLESS)
    assert steps(moments, told_by(original.decides(config, moments))) == [2, 3, 4]
    assert by_the_import(config, moments) == Told([], [])


def test_a_metric_may_have_any_name(original: Original) -> None:
    """A metric may have any name; in IBM's controller a name of the trainer's arguments ends the training."""
    config = config_of('model["loss"] < 1 and args["epoch"] > 1', "on_log")
    config["controller_metrics"] = [{"name": "model", "class": "Loss"}, {"name": "args", "class": "TrainingState"}]
    assert steps(PLAIN, by_the_import(config, PLAIN)) == [5, 6, 6]
    decided = original.decides(config, PLAIN)
    assert PLAIN[decided.until].step == 5
    assert "got multiple values for keyword argument 'model'" in decided.died


def test_a_level_of_logs_with_two_triggers_ends_no_training(original: Original) -> None:
    more = {"config": {"trigger_log_level": "info"}}
    config = config_of('newest["loss"] < 1', "on_log", "on_step_end", **more)
    decided = original.decides(json.loads(json.dumps(config)), PLAIN)
    assert (decided.died, decided.until) == ("AttributeError: 'int' object has no attribute 'upper'", 0)
    assert steps(PLAIN, by_the_import(config, PLAIN))[:3] == [4, 4, 5]


def test_metrics_in_the_shape_of_the_design(original: Original) -> None:
    """Metrics in the shape of IBM's design are imported; IBM's code ignores them, and its first rule fails."""
    config = config_of("newest < 1", "on_log")
    config["controller-metrics"] = [config.pop("controller_metrics")[1]]
    decided = original.decides(config, PLAIN)
    assert decided.died == "NameError: Rule failed because some of the variables are not defined"
    assert steps(PLAIN, by_the_import(config, PLAIN)) == [4, 4, 5, 6, 6]


def test_a_diverged_training_whose_filter_says_zero(original: Original) -> None:
    """A replayed log decides as it was logged; rules that see the loss itself do not take it for success."""
    config = config_of('newest["loss"] < 1', "on_log")
    filtered = stream([2.0, 0.0, 0.0], summary=False, **ENDLESS)
    found = by_the_import(config, filtered)
    assert found == told_by(original.decides(config, filtered))
    assert steps(filtered, found) == [2, 3]
    seen = stream([2.0, math.nan, math.nan], **ENDLESS)
    assert by_the_import(config, seen) == Told([], [])


def test_a_trigger_that_is_named_twice_is_one(original: Original) -> None:
    config = config_of('newest["loss"] < 1', "on_log", "on_save", "on_log")
    imported = import_ibm(json.dumps(config))
    assert [(note.field, note.reason) for note in imported.notes] == [
        ("controllers.0.triggers.2", "on_log is there already: the rule is checked once; the original checks it twice")
    ]
    found, expected = by_the_import(config, PLAIN), told_by(original.decides(config, PLAIN))
    assert sorted(found.decisions) == sorted(set(expected.decisions))
    assert len(expected.decisions) > len(found.decisions)


def test_an_evaluation_that_gives_no_loss_is_not_noticed_by_itself(original: Original) -> None:
    moments = stream([1.0] * 3, evals={2: {"eval_f1": 1.0}}, **ENDLESS)
    for rule in ("evaluation != None", 'evaluation["epoch"] > 0', 'len(window["metrics"]) > 0'):
        config = config_of(rule, "on_evaluate")
        assert steps(moments, told_by(original.decides(config, moments))) == [2]
        assert by_the_import(config, moments) == Told([], [])


def test_a_line_with_two_triggers_names_both(original: Original) -> None:
    config = config_of("True", "on_log", "on_save", operations=["line.should_log"])
    config["operations"] = [line_of("at {event_name}")]
    (note,) = import_ibm(json.dumps(config)).notes
    assert (note.code, note.reason) == ("differs", "{event_name} is rendered as all triggers of the rule")
    assert {line for _, line in by_the_import(config, PLAIN).lines} == {"at on_log or on_save"}
    assert {line for _, line in original.decides(config, PLAIN).lines} == {"at on_log", "at on_save"}


def test_a_final_save_is_noted_to_be_handed_in_by_nobody() -> None:
    imported = import_ibm(json.dumps(config_of('now["is_final"] == True', "on_save")))
    assert imported.rules is not None
    assert [(note.code, note.reason) for note in imported.notes] == [
        ("differs", "is_final becomes save.final, which no adapter reports: it stays false")
    ]


def test_tokens_that_a_trainer_logs_are_those_of_rules() -> None:
    imported = import_ibm(json.dumps(config_of('now["num_input_tokens_seen"] > 100', "on_log")))
    assert imported.rules is not None
    evaluator = Evaluator(imported.rules)
    found = []
    for step, seen in enumerate([50, 90, 140], 1):
        logged = {name_in_rules(name): float(value) for name, value in {"num_input_tokens_seen": seen}.items()}
        found += [one.step for one in evaluator.observe(logged, step=step, now=float(step), event="log")]
    assert found == [3]
