"""Where IBM's files decide otherwise here than there: each row of docs/rules-ibm.md that is about decisions."""

from __future__ import annotations

import json
import math

import pytest

from contract.rules.evaluating import Evaluator
from contract.rules.ibm import import_ibm
from contract.rules.metrics import name_in_rules
from tests.ibm_original import Moment
from tests.unit.contract.rules.test_ibm_decisions import LINE, by_the_import, by_the_original, config_of, stream

PLAIN = stream([3.0, 2.0, 1.0, 0.5, 0.25, 0.2], evals={4: {"eval_loss": 1.0}}, save_every=100)


def steps(moments: list[Moment], decisions: list[tuple[int, str, str]]) -> list[int]:
    return [moments[number].step for number, *_ in decisions]


@pytest.mark.parametrize(
    ("rule", "trigger", "fires"),
    [
        # a window is read before the first evaluation
        ('window["metrics"]["eval_loss"][-1] < 2', "on_step_end", [5, 6]),
        # an index out of a window that is filling
        ('window["training_loss"]["loss"][-3] > 2', "on_log", [3]),
        # a metric that evaluations do not give
        ('evaluation["eval_f1"] > 0', "on_evaluate", []),
        # a division by zero: inf
        ('newest["loss"] / (state["global_step"] - state["global_step"]) > 1', "on_log", [1, 2, 3, 4, 4, 5, 6]),
    ],
)
def test_an_error_in_a_rule_ends_no_training(rule: str, trigger: str, fires: list[int]) -> None:
    config = config_of(rule, trigger)
    decided, until = by_the_original(config, PLAIN)
    assert until < len(PLAIN)
    assert decided == []
    assert steps(PLAIN, by_the_import(config, PLAIN)) == fires


def test_two_evaluation_sets() -> None:
    config = config_of('window["metrics"]["eval_a_loss"][-1] < 1', "on_evaluate")
    moments = stream(
        [2.0, 2.0, 2.0, 2.0], evals={1: {"eval_a_loss": 0.5}, 2: {"eval_b_loss": 3.0}, 3: {"eval_a_loss": 2.0}}
    )
    decided, until = by_the_original(config, moments)
    assert (steps(moments, decided), moments[until].step) == ([1], 2)
    # the second set says nothing of the first
    assert steps(moments, by_the_import(config, moments)) == [1, 2]


def test_patience_is_one_for_all_triggers() -> None:
    config = config_of('newest["loss"] > 0', "on_log", "on_step_end", patience={"patience_threshold": 2})
    moments = stream([1.0] * 4, save_every=100, steps_per_epoch=100)
    assert steps(moments, by_the_original(config, moments)[0]) == [3, 4]
    assert steps(moments, by_the_import(config, moments)) == [2, 4]
    assert [note.reason for note in import_ibm(json.dumps(config)).notes] == [
        "patience is one for all its 2 triggers; the original counts each by itself"
    ]


def test_a_loss_that_is_nan_is_one_point() -> None:
    """There it is counted once more by the log of an evaluation, which has no loss."""
    config = config_of('len(window["training_loss"]["loss"]) == window["window_size"]', "on_log")
    moments = stream([math.nan, 2.0, 1.0, 1.0], evals={1: {"eval_loss": 1.0}}, save_every=100, steps_per_epoch=100)
    assert steps(moments, by_the_original(config, moments)[0]) == [2, 3, 4]
    assert steps(moments, by_the_import(config, moments)) == [3, 4]


def test_an_equal_loss_at_an_equal_epoch_is_a_point() -> None:
    config = config_of('len(window["training_loss"]["loss"]) == window["window_size"]', "on_log")
    moments = stream([2.0, 2.0, 2.0, 2.0], save_every=100, steps_per_epoch=100)
    for moment in moments:
        moment.epoch = 0.0
        if moment.entry is not None:
            moment.entry["epoch"] = 0.0
    assert by_the_original(config, moments)[0] == []
    assert steps(moments, by_the_import(config, moments)) == [3, 4]


def test_an_empty_window_decides_nothing() -> None:
    """There it is empty as soon as something else than a loss was logged."""
    config = config_of('len(window["training_loss"]["loss"]) < 1', "on_step_end")
    moments = stream([2.0] * 6, log_every=4, evals={1: {"eval_loss": 1.0}}, save_every=100, steps_per_epoch=100)
    assert steps(moments, by_the_original(config, moments)[0]) == [2, 3, 4]
    assert by_the_import(config, moments) == []


def test_a_metric_may_have_any_name() -> None:
    """Those of the trainer's own arguments ended the training there, when the rule fired."""
    config = config_of('model["loss"] < 1 and args["epoch"] > 1', "on_log")
    config["controller_metrics"] = [{"name": "model", "class": "Loss"}, {"name": "args", "class": "TrainingState"}]
    assert steps(PLAIN, by_the_import(config, PLAIN)) == [5, 6]


def test_a_diverged_training_whose_filter_says_zero() -> None:
    """A replayed log decides as it was logged; rules that see the loss itself do not take it for success."""
    config = config_of('newest["loss"] < 1', "on_log")
    filtered = stream([2.0, 0.0, 0.0], save_every=100, steps_per_epoch=100)
    assert (
        steps(filtered, by_the_original(config, filtered)[0])
        == steps(filtered, by_the_import(config, filtered))
        == [2, 3]
    )
    seen = stream([2.0, math.nan, math.nan], save_every=100, steps_per_epoch=100)
    assert by_the_import(config, seen) == []


def test_a_line_with_two_triggers_names_both() -> None:
    line = {**LINE, "arguments": {"log_format": "at {event_name}", "log_level": "info"}}
    config = {**config_of("True", "on_log", "on_save", operations=["line.should_log"]), "operations": [line]}
    imported = import_ibm(json.dumps(config))
    assert imported.rules is not None, imported.faults
    assert imported.rules.rules[0].actions[0].text.text == "at on_log or on_save"  # type: ignore[union-attr]


def test_a_final_save_is_noted_to_be_handed_in_by_nobody() -> None:
    imported = import_ibm(json.dumps(config_of('state["is_final"] == True', "on_save")))
    assert imported.rules is not None
    assert [(note.code, note.reason) for note in imported.notes] == [
        ("differs", "is_final becomes save.final, which no adapter hands in: it stays false")
    ]


def test_tokens_that_a_trainer_logs_are_those_of_rules() -> None:
    imported = import_ibm(json.dumps(config_of('state["num_input_tokens_seen"] > 100', "on_log")))
    assert imported.rules is not None
    evaluator = Evaluator(imported.rules)
    found = []
    for step, seen in enumerate([50, 90, 140], 1):
        logged = {name_in_rules(name): float(value) for name, value in {"num_input_tokens_seen": seen}.items()}
        found += [one.step for one in evaluator.observe(logged, step=step, now=float(step), event="log")]
    assert found == [3]
