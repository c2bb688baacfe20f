"""Test the judgment of the hours after a firing, and the rules that a back-test cannot try."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.contract.rules.backtest.history import Builder, History
from baton.contract.rules.backtest.judging import Aim, Run, RunVerdict, Use, aim_of, judged
from baton.contract.rules.document.loader import load_values
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.metrics import Metric, MetricCatalog

HOUR = 3600.0
HEARTBEATS = "the control plane evaluates it, at heartbeats"


def rules_of(*rules: dict[str, Any], **more: Any) -> RuleSet:
    said = [{"name": f"rule-{number}", "do": "stop", **rule} for number, rule in enumerate(rules)]
    loaded = load_values({"rules": said, **more})
    assert loaded.rules is not None, loaded.faults
    return loaded.rules


def history(*losses: float, timed: bool = True, **more: list[float | None]) -> History:
    """A row each hour."""
    builder = Builder("run")
    for row, loss in enumerate(losses):
        metrics = {name.replace("__", "."): values[row] for name, values in more.items() if values[row] is not None}
        builder.add(100 * row, row * HOUR if timed else None, {"loss": loss, **metrics})
    return builder.history()


def verdict(run: History, *rules: dict[str, Any], **about: Any) -> RunVerdict:
    about.setdefault("aim", Aim("loss", "min"))
    return judged(rules_of(*rules), Run(run, **about))


def use(run: History, when: str, **about: Any) -> tuple[Use, float | None, str]:
    after = verdict(run, {"when": when}, **about).findings[0].after
    assert after is not None
    return after.use, after.gpu_hours, after.why


def test_hours_are_saved_if_nothing_got_better() -> None:
    assert use(history(3, 1, 2, 2, 1), "loss > 1 and step > 100") == (Use.SAVED, 2.0, "loss never got better again")
    assert use(history(3, 1, 2, 2, 1), "step >= 400") == (Use.SAVED, 0.0, "loss never got better again")


def test_hours_are_wrongly_cut_off_if_it_did() -> None:
    found = verdict(history(3, 1, 2, 0.5, 0.75), {"when": "loss > 1 and step > 100"}, gpus=4).findings[0]
    assert found.after is not None and found.after.better is not None
    assert (found.after.use, found.after.gpu_hours, found.after.why) == (Use.WRONGLY, 8.0, "the best loss came later")
    assert (found.after.better.value, found.after.better.row) == (0.5, 3)


def test_a_run_that_ended_badly_was_worth_nothing() -> None:
    assert use(history(3, 4, 1), "loss > 3", failed=True) == (Use.SAVED, 1.0, "the run failed")
    assert use(history(3, 4, 1, math.nan), "loss > 3") == (Use.SAVED, 2.0, "loss was not finite at the end")
    spoiled = history(3, 4, 1, eval__loss=[1, None, math.inf])
    told = use(spoiled, "loss > 3", aim=Aim("eval.loss", "min"))
    assert told == (Use.SAVED, 1.0, "eval.loss was not finite at the end")


def test_a_goal_may_be_more() -> None:
    run = history(1, 1, 1, acc=[0.5, 0.5, 0.6])
    assert use(run, "step >= 100", aim=Aim("acc", "max"))[0] is Use.WRONGLY
    assert use(run, "step >= 100", aim=Aim("acc", "min"))[0] is Use.SAVED
    assert use(run, "step >= 100", aim=None)[:2] == (Use.UNKNOWN, 1.0)


def test_only_time_on_a_machine_counts_and_none_without_times() -> None:
    run = history(3, 4, 4, 4, 4, 4)
    assert use(run, "loss > 3", held=[(0, 1.5 * HOUR), (4 * HOUR, 99 * HOUR)])[1] == 1.5
    assert use(history(3, 4, 4, timed=False), "loss > 3")[1] is None


def test_the_first_rule_in_force_decides_for_the_run() -> None:
    run = history(1, 2, 3, 4, 5)
    found = verdict(
        run,
        {"when": "loss > 1", "do": "save"},
        {"when": "loss > 1", "mode": "dry_run"},
        {"when": "loss > 3"},
        {"when": "loss > 2", "do": [{"log": "high"}, "pause"]},
        {"when": "loss > 2", "do": "stop"},
    )
    assert [(one.first, one.action, one.after is not None) for one in found.findings] == [
        (1, "", False), (1, "stop", True), (3, "stop", True), (2, "pause", True), (2, "stop", True),
    ]  # fmt: skip
    assert found.end is not None and found.end.rule.name == "rule-3"


def test_after_a_rollback_nobody_knows() -> None:
    found = verdict(history(1, 2, 3), {"when": "loss > 2"}, {"when": "loss > 1", "do": {"rollback": {}}})
    assert found.end is not None and (found.end.rule.name, found.end.after) == ("rule-1", None)
    assert verdict(history(1, 2), {"when": "loss > 9"}).end is None


def test_what_a_history_cannot_tell() -> None:
    run = history(1, 2, 3, eval__f1_macro=[None, 0.5, None])
    found = verdict(
        run,
        {"when": "cost > 40"},
        {"when": "cost > 40 or wall > 1h"},
        {"when": "eval.f1 > 0.4"},
        {"when": "eval.f1 > 0.4 or loss > 2"},
        {"when": "loss > 1", "on": ["save", "epoch"]},
        {"when": "heartbeat.age > 90s", "on": "heartbeat"},
        {"when": "group_rank(loss, 100) >= 0.5"},
        {"when": "group_rank(loss, 100) >= 0.5 or loss > 2"},
    )
    assert [(one.first, one.reason) for one in found.findings] == [
        (None, "not in this history: cost"),
        (2, f"never reported: cost; {HEARTBEATS}"),
        (None, "not in this history: eval.f1 (Did you mean eval.f1_macro?)"),
        (2, "never reported: eval.f1 (Did you mean eval.f1_macro?)"),
        (None, "not in this history: the events epoch, save"),
        (None, "not in this history: the events heartbeat"),
        (None, "not in this history: the other jobs of its group"),
        (None, "not in this history: the other jobs of its group"),
    ]
    assert [one.trial is None for one in found.findings] == [True, False, True, False, True, True, True, True]


def test_the_control_plane_sees_other_events_and_not_every_row() -> None:
    run = history(1, 2, 3, cost=[10, 20, 30], log__ecc=[0, 0, 1])
    rules = rules_of(
        {"when": "cost > 15"},
        {"when": "cost > 15", "every": "1h", "do": "save"},
        {"when": "cost > 15", "on": "step"},
        {"when": "cost > 15", "on": ["timer", "step"]},
        {"when": "loss > 1", "on": ["heartbeat", "log"]},
        {"when": "log.ecc > 0"},
        {"when": "loss > 1"},
        signals={"ecc": "uncorrectable ECC error"},
    )
    assert [(one.first, one.reason) for one in judged(rules, Run(run)).findings] == [
        (1, HEARTBEATS),
        (1, HEARTBEATS),
        (None, "the control plane evaluates it, and sees none of its events"),
        (None, "not in this history: the events timer"),
        (None, "not in this history: the events heartbeat"),
        (2, HEARTBEATS),
        (1, ""),
    ]


@pytest.mark.parametrize(
    "rule",
    [
        {"when": "mean(loss, 10s) > 1"},
        {"when": "age(loss) > 1s"},
        *({"when": "loss > 1", key: "5s"} for key in ("for", "warmup", "cooldown", "every")),
        {"when": "loss > 1", "clear": "count(loss, 5s) < 2"},
    ],
)
def test_durations_need_times(rule: dict[str, Any]) -> None:
    finding = verdict(history(2, 3, timed=False), rule).findings[0]
    assert (finding.trial, finding.reason) == (None, "this history has no times")
    assert verdict(history(2, 3), rule).findings[0].trial is not None


def test_rows_are_steps_and_logs_and_evaluations_if_they_tell_of_one() -> None:
    run = history(2, 2, 2, eval__loss=[None, 1, None])
    events = ["step", "log", "evaluate", ["evaluate", "save"], ["save", "log"]]
    found = verdict(run, *({"when": "loss > 1", "on": event, "cooldown": "0 steps"} for event in events))
    fired = [one.trial.fired.tolist() if one.trial else None for one in found.findings]
    assert fired == [[0, 1, 2], [0, 1, 2], [1], [1], [0, 1, 2]]


def test_an_evaluation_with_the_step_of_the_row_before_is_nothing_else() -> None:
    """An evaluation that a Trainer logs with the step of the row before is no second step and no second log."""
    builder = Builder("run")
    for step, metrics in ((1, {"loss": 2.0}), (2, {"loss": 2.0}), (2, {"eval.loss": 1.0}), (3, {"eval.loss": 1.0})):
        builder.add(step, None, metrics)
    run = builder.history()
    events = ["step", "log", "evaluate", ["evaluate", "step"]]
    found = verdict(run, *({"when": "loss > 1", "on": event, "cooldown": "0 steps"} for event in events))
    fired = [one.trial.fired.tolist() if one.trial else None for one in found.findings]
    assert fired == [[0, 1, 3], [0, 1, 3], [2, 3], [0, 1, 2, 3]]
    assert run.happens({"evaluate"}, 0, 4) == [False, False, True, True]
    counted = verdict(run, {"when": "step > 0", "on": "step", "for": "3 checks"}).findings[0]
    assert counted.first == 3


def test_the_goal_of_a_run() -> None:
    run = history(1, 1, eval__loss=[1, 1], eval__f1=[1, 1])
    metrics = MetricCatalog([Metric("eval.f1", goal="max")])
    assert aim_of(run, metrics, None) == Aim("eval.loss", "min")
    assert aim_of(history(1), metrics, None) == Aim("loss", "min")
    assert aim_of(run, metrics, None, Aim("eval.f1", "max")) == Aim("eval.f1", "max")
    assert aim_of(run, metrics, None, Aim("gone", "max")) == Aim("eval.loss", "min")
    assert aim_of(run, metrics, "eval.f1") == Aim("eval.f1", "max")
    assert aim_of(run, metrics, "eval.f1:min") == Aim("eval.f1", "min")
    for said, reason in {
        "eval.f2": "Did you mean eval.f1",
        "step": "Write step:min or step:max",
        "eval.f1:best": "Write eval.f1:min",
    }.items():
        with pytest.raises(ValueError, match=reason):
            aim_of(run, metrics, said)


def test_a_metric_of_evaluations_that_is_not_there_makes_no_evaluation() -> None:
    """A null in a row of JSON lines is no evaluation: such tables have every column in every row."""
    builder = Builder("run")
    for step, value in ((1, None), (2, 1.0), (2, None)):
        builder.add(step, None, {"loss": 2.0, "eval.loss": value})
    found = verdict(
        builder.history(), *({"when": "loss > 1", "on": on, "cooldown": "0 steps"} for on in ("step", "evaluate"))
    )
    assert [one.trial.fired.tolist() for one in found.findings if one.trial] == [[0, 1, 2], [1]]
