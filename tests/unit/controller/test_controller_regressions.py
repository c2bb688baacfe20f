"""Inputs that the replaced framework handled wrongly in a training, and the right decisions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import numpy
import pytest
import torch
from controller_kit import Setup, command, rule, run_together

from baton.contract.rules.document.rule import REPORT
from gpu_client.controller.event_reporter import STATUS_EVERY_S
from gpu_client.controller.rank_aggregation import Observation, RankAggregator

SECRET = "hf_QdXVnWoeverysecret"
TAKEN = ("state", "args", "control", "action", "log_level", "event_name", "control_name", "logs", "model")


@pytest.mark.parametrize("name", TAKEN)
def test_a_metric_may_have_the_name_of_anything(name: str) -> None:
    """A metric may have any name; some names raised `multiple values for keyword argument` at the first firing."""
    setup = Setup(rule("r", f"{name} > 1 and {name}.x > 1", json.dumps({"log": f"{{{name}}}"})))
    setup.report(1, **{name: 0.5, f"{name}/x": 2.0})
    setup.report(2, **{name: 1.5, f"{name}/x": 2.0})
    assert setup.agent.fired() == [("r", 2)]


def test_the_loops_own_metrics_are_left_as_they_are() -> None:
    """`steps` and `epoch` were written into them."""
    setup = Setup(rule("r", "mean(loss, 2) > 1 or eval.loss > 9", "save"))
    setup.steering.offer(metrics={"mine": lambda: 3.0})
    step, evaluation = {"loss": 2.0, "epoch": 0.5}, {"loss": 1.0}
    setup.steering.report_step(1, step)
    setup.steering.evaluated(1, evaluation)
    setup.steering.report_step(1, step, event="log")
    assert (step, evaluation) == ({"loss": 2.0, "epoch": 0.5}, {"loss": 1.0})


@pytest.mark.parametrize(
    "kind",
    [numpy.float64, numpy.float32, numpy.int64, numpy.bool_, torch.tensor, lambda value: torch.tensor([float(value)])],
    ids=["float64", "float32", "int64", "bool_", "tensor", "tensor of one"],
)
def test_whatever_holds_one_number_is_one(kind: Callable[[float], object]) -> None:
    """A rule that came to numpy's own truth ended the training."""
    setup = Setup(rule("r", "x == 1 and y != 1"))
    setup.report(1, x=kind(0), y=kind(0))
    setup.report(2, x=kind(1), y=kind(0))
    assert setup.agent.fired() == [("r", 2)]


@pytest.mark.parametrize("how", ["reports", "logs"])
def test_a_rule_that_waits_for_a_log_is_checked_with_what_is_logged(how: str) -> None:
    """A logged metric checks the rules with `on: log`, which once never fired."""
    setup = Setup(rule("r", "loss > 1", '{"log": "x"}', on="log", **{"for": "2 checks"}))
    for step in range(1, 6):
        if how == "reports":
            setup.report(step, **({"loss": 2.0} if step % 2 else {}))
        else:
            setup.report(step)
            if step % 2:
                setup.steering.report_step(step, {"loss": 2.0}, event="log")
    assert setup.agent.fired() == [("r", 3)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_and_its_log_are_two_events_for_one_process_and_for_several(size: int) -> None:
    rules = [
        {"name": name, "when": when, "do": {"log": "x"}, "for": "3 checks", **more}
        for name, when, more in (
            ("on-step", "step > 0", {"on": "step"}),
            ("on-log", "loss > 0", {"on": "log"}),
            ("by-loss", "loss > 0", {}),
            ("by-step", "step > 0", {}),
            ("by-both", "loss > 0 and step > 0", {}),
            ("points", "count(step) >= 4", {"for": "1 check"}),  # that of the start is one, too
        )
    ]
    text, losses = json.dumps({"rules": rules}), [1.0] * 5
    if size == 1:
        setup = Setup(text)
        for step, loss in enumerate(losses, 1):
            setup.steering.report_step(step, {"epoch": 0.0}, event="step")
            setup.steering.report_step(step, {"loss": loss}, event="log")
        fired = setup.agent.fired()
    else:
        fired = run_together(size, text, {0: losses})[0].agent.fired()
    assert sorted(fired) == sorted((one["name"], 3) for one in rules)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_a_step_of_several_processes_is_a_log_if_anything_of_it_was_logged(order: tuple[bool, bool]) -> None:
    gathering = RankAggregator()
    for number, logged in enumerate(order):
        gathering.add_step(1, {f"m{number}": 1.0}, now=1.0, logged=logged)
    assert gathering.take_rest() == [Observation(REPORT, 1, 1.0, {"m0": 1.0, "m1": 1.0})]


def test_a_decision_and_the_values_it_saw_are_in_the_log_by_default(caplog: pytest.LogCaptureFixture) -> None:
    """The line about the end of a training has a visible level and the values of the condition."""
    with caplog.at_level(logging.WARNING):
        Setup(rule("spike", "mean(loss, 2) > 2", "stop")).report(1, loss=5.0)
        setup = Setup(rule("spike", "mean(loss, 2) > 2", "stop"))
        setup.report(1, loss=2.0)
        setup.report(2, loss=3.5)
    assert "[rules] step 2: rule.fired spike: mean(loss, 2) = 2.75 -> stop" in caplog.text


def test_no_secret_is_in_anything_that_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Formats printed `args.hub_token`, and the environment by way of a class's globals."""
    for name in ("HF_TOKEN", "BATON_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)

    class Arguments:
        hub_token = SECRET

        def __repr__(self) -> str:
            return SECRET

        def __float__(self) -> float:
            return 1.0

    reach = (
        "{args.hub_token}",
        "{args}",
        "{os.environ}",
        "{loss.__class__}",
        "{args.__init__.__globals__}",
        "{loss!r}",
    )
    taken = 0
    caplog.set_level(logging.DEBUG)
    for number, text in enumerate(reach):
        setup = Setup(rule(f"r{number}", "loss > 0 and args > 0", json.dumps([{"log": text}, {"alert": text}, "stop"])))
        setup.steering.receive(command(1, "set", knob="lr", value=1.0))
        setup.steering.offer(metrics={"hub": Arguments}, hooks={"mine": lambda _: None})
        for step in (1, 2):
            setup.report(step, STATUS_EVERY_S, loss=1.0, args=Arguments(), **{"args.hub_token": SECRET})
        taken += bool(setup.agent.fired())
        state = json.dumps(setup.steering.state_dict())
        setup.steering.close()
        assert SECRET not in json.dumps(setup.agent.heard) + state
        assert setup.agent.heard
    assert taken == 3, "those that name metrics are rules; the others are refused"
    assert SECRET not in caplog.text
