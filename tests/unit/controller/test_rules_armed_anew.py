"""Rules that change during a training: a rule that was tried in a dry run acts afterwards."""

from __future__ import annotations

import pytest
from controller_kit import Setup, rule


def replaced(first: str, second: str, *, loss: float = 9.0) -> Setup:
    """Five steps with the one, the rest with the other."""
    setup = Setup(first)
    for step in range(1, 6):
        setup.report(step, loss=loss)
    setup.steering.receive({"type": "rules", "revision": 2, "text": second})
    for step in range(6, 12):
        setup.report(step, loss=loss)
    return setup


@pytest.mark.parametrize("more", [{}, {"once": True}, {"cooldown": "1000 steps"}], ids=str)
def test_after_a_dry_run_it_stops_the_training(more: dict[str, object]) -> None:
    setup = replaced(rule("r", "loss > 5", "stop", mode="dry_run", **more), rule("r", "loss > 5", "stop", **more))
    assert setup.agent.fired() == [("r", 1), ("r", 6)]
    assert setup.loop.stops == [("rule", True)]
    told = [one["message"] for one in setup.agent.of("decision") if one["decision"] == "rule.updated"]
    assert "r (its 'do' or 'mode' has changed: it is armed anew)" in told[-1]


def test_after_an_alert_it_stops_the_training() -> None:
    setup = replaced(rule("r", "loss > 5", '{"alert": "high"}'), rule("r", "loss > 5", '{"stop": "failed"}'))
    assert setup.loop.stops == [("rule", True)]


def test_a_rule_that_errors_disabled_is_tried_again() -> None:
    setup = Setup(rule("r", "acc > 5", "stop"))
    for step in range(1, 5):
        setup.report(step, acc=[1, 2])
    setup.steering.receive({"type": "rules", "revision": 2, "text": rule("r", "acc > 5", "stop", severity="error")})
    setup.report(5, acc=9.0)
    assert setup.agent.fired() == [("r", 5)]
    assert setup.loop.stops == [("rule", True)]
