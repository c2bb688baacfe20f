"""The end of an epoch as rules see it, and the epoch of a decision."""

from __future__ import annotations

import json
from typing import Any

import pytest
from controller_kit import Setup, agree, ranks, rule

EPOCH = rule("r", "epoch >= 0", "save", on=["epoch"], cooldown="1 checks")


def heard(epochs: list[Any], text: str = EPOCH, *, killed_after: int = 0) -> list[tuple[int, Any]]:
    """Return step and pass of each event of a loop that reports these epochs and announces its last step."""
    setup, found = Setup(text), []
    for step, epoch in enumerate(epochs, 1):
        setup.clock.now += 1
        metrics = {"loss": 1.0} if epoch is None else {"loss": 1.0, "epoch": epoch}
        setup.steering.report_step(step, metrics, last=step == len(epochs))
        if step == killed_after:
            found += told(setup)
            state = json.loads(json.dumps(setup.steering.state_dict()))
            setup = Setup(text)
            setup.steering.load_state_dict(state)
            setup.steering.resume(step, [])
    setup.steering.close()
    return found + told(setup)


def told(setup: Setup) -> list[tuple[int, Any]]:
    fired = [one for one in setup.agent.of("decision") if one["decision"] == "rule.fired"]
    return [(one["step"], one["operands"].get("epoch")) for one in fired]


@pytest.mark.parametrize(
    ("epochs", "ended"),
    [
        # Fractions: the number of epochs done.
        ([0.5, 1.0, 1.5, 2.0], [(2, 1.0), (4, 2.0)]),
        ([1.0, 2.0, 3.0], [(1, 1.0), (2, 2.0), (3, 3.0)]),
        ([0.4, 0.8, 1.2, 1.6], [(3, 1.2)]),
        ([5.3, 5.6, 6.0], [(3, 6.0)]),
        ([0.0, 0.5, 1.0], [(3, 1.0)]),
        # Whole numbers: the number of the current epoch.
        ([0, 0, 1, 1, 2, 2], [(2, 0.0), (4, 1.0), (6, 2.0)]),
        ([1, 1, 2, 2], [(2, 1.0), (4, 2.0)]),
        ([0, 1, 2], [(1, 0.0), (2, 1.0), (3, 2.0)]),
        ([0, None, 1, None, 1], [(1, 0.0), (5, 1.0)]),
        ([None, None], []),
    ],
)
def test_the_end_of_each_pass_is_heard_at_its_last_step(epochs: list[Any], ended: list[tuple[int, Any]]) -> None:
    """The end of each epoch is reported at its last step, for fractional and whole epochs, also after a resume."""
    assert heard(epochs) == ended
    for killed_after in range(1, len(epochs)):
        assert heard(epochs, killed_after=killed_after) == ended


def test_one_that_is_left_early_has_not_ended_and_none_ends_twice() -> None:
    setup = Setup(EPOCH)
    for step, epoch in enumerate([0, 0, 1], 1):
        setup.report(step, loss=1.0, epoch=epoch)
    setup.steering.close()
    assert told(setup) == [(2, 0.0)]
    setup = Setup(EPOCH)
    for _ in range(3):
        setup.steering.report_step(1, {"loss": 1.0, "epoch": 0}, last=True)
    setup.steering.close()
    assert told(setup) == [(1, 0.0)]


@pytest.mark.parametrize("epochs", [[0.5, 1.0, 1.5], [0, 0, 1]], ids=["fractions", "whole"])
def test_a_decision_says_its_pass_over_the_data(epochs: list[float]) -> None:
    """Each event of a rule names the `training_epoch`."""
    setup = Setup(rule("high", "loss > 2", "save"))
    setup.report(1, loss=1.0)
    for step, epoch in enumerate(epochs, 2):
        setup.report(step, loss=3.0 if step == 3 else 1.0, epoch=epoch)
    said = [
        (one["decision"], one["step"], one.get("training_epoch"))
        for one in setup.agent.of("decision")
        if one["decision"] != "rule.updated"
    ]
    assert said[:2] == [("rule.fired", 3, epochs[1]), ("action.applied", 3, epochs[1])]
    assert said[2:] == [("rule.cleared", 4, epochs[2])]


def test_several_processes_say_that_of_the_step_though_they_decide_later() -> None:
    both = ranks(2, rule("high", "loss > 2", "save"))
    for step in range(1, 5):
        for setup in both:
            setup.report(step, loss=3.0 if step == 2 else 1.0, epoch=step / 4)
        agree(both)
    fired = [one for one in both[0].agent.of("decision") if one["decision"] == "rule.fired"]
    assert [(one["step"], one["training_epoch"]) for one in fired] == [(2, 0.5)]


def test_several_processes_hear_of_the_end_of_whole_ones_too() -> None:
    both = ranks(2, rule("ended", "loss > 0", '{"log": "x"}', on=["epoch"], cooldown="1 checks"))
    for step in range(1, 7):
        for setup in both:
            setup.clock.now += 1
            setup.steering.report_step(step, {"loss": 1.0, "epoch": (step - 1) // 2}, last=step == 6)
        agree(both)
    for setup in both:
        setup.close()
    assert both[0].agent.fired() == [("ended", 2), ("ended", 4), ("ended", 6)]
