"""An exit ordered by a rule or command takes effect although the machine is lost at that moment."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from controller_kit import Setup, command, ranks, rule

SPIKE = "loss > 5"
ENDS = {"stop": '{"stop": "failed"}', "finish": "stop", "pause": "pause", "rollback": '{"rollback": {}}'}


def ending(do: str, *, agent: bool = True, text: str = "", **start: Any) -> Setup:
    setup = Setup(text or rule("spike", SPIKE, do), agent=agent, **start)
    for step, loss in enumerate([1.0, 9.0], 1):
        setup.report(step, loss=loss)
    return setup


def again(state: dict[str, Any], do: str, *, text: str = "", agent: bool = True, **start: Any) -> Setup:
    """Another machine, that begins with the checkpoint of step 2."""
    setup = Setup(text or rule("spike", SPIKE, do), agent=agent, **start)
    setup.steering.load_state_dict(json.loads(json.dumps(state)))
    setup.steering.resume(2, [])
    return setup


@pytest.mark.parametrize("do", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("before", [None, 0, 3])
def test_an_end_that_nobody_carried_out_is_announced_again(do: str, before: int | None) -> None:
    """The checkpoint counts the rule as fired: it would never have fired again."""
    first = ending(do, **({} if before is None else {"ends": before}))
    second = again(first.steering.state_dict(), do, ends=before or 0)
    assert second.agent.of("leaving") == first.agent.of("leaving")
    assert second.loop.stops == first.loop.stops and second.steering.finishing == first.steering.finishing
    assert second.agent.fired() == [], "it has not fired twice"
    assert [one[2] for one in second.agent.decisions() if one[0] == "action.applied"] == [2]
    third = again(second.steering.state_dict(), do, ends=before or 0)
    assert third.agent.of("leaving") == first.agent.of("leaving"), "and so on until it is"


@pytest.mark.parametrize("do", ENDS.values(), ids=ENDS)
def test_one_that_was_carried_out_is_over(do: str) -> None:
    """A job that was paused by a rule and is resumed goes on."""
    state = ending(do, ends=1).steering.state_dict()
    second = again(state, do, ends=2)
    second.report(3, loss=9.0)
    assert second.agent.of("leaving") == [] and second.loop.stops == []
    assert second.steering.state_dict()["ending"] is None
    second.report(4, loss=1.0)
    second.report(5, loss=9.0)
    assert second.agent.fired() == [("spike", 5)]


@pytest.mark.parametrize(
    "text",
    [
        rule("other", SPIKE, "pause"),
        rule("spike", "loss > 6", "pause"),
        rule("spike", SPIKE, "save"),
        rule("spike", SPIKE, "pause", mode="dry_run"),
        "rules: []",
    ],
    ids=["gone", "another condition", "another action", "dry run", "no rules"],
)
def test_one_that_the_rules_do_not_want_any_more_is_dropped(text: str) -> None:
    second = again(ending("pause").steering.state_dict(), "", text=text, ends=0)
    assert second.agent.of("leaving") == [] and second.loop.stops == []


def test_one_by_a_rule_that_cannot_be_checked_is_announced_again() -> None:
    text = rule("spike", SPIKE, "save", on_error="stop")
    setup = Setup(text)
    for step in range(1, 4):
        setup.report(step, loss=object())
    assert setup.loop.stops == [("rule", True)]
    assert again(setup.steering.state_dict(), "", text=text, ends=0).loop.stops == [("rule", True)]


@pytest.mark.parametrize("ends", [{}, {"ends": None}])
def test_where_nobody_counts_ends_or_nobody_listens_none_is_repeated(ends: dict[str, Any]) -> None:
    """A training without Baton that is started once more is meant to go on."""
    state = ending("stop").steering.state_dict()
    assert again(state, "stop", **ends).loop.stops == []
    assert again(ending("stop", agent=False).steering.state_dict(), "stop", agent=False, ends=0).loop.stops == []


def test_to_be_on_another_machine_needs_no_more_than_that() -> None:
    state = ending("requeue").steering.state_dict()
    assert again(state, "requeue", ends=0).loop.stops == []


@pytest.mark.parametrize("kind", ["stop", "pause"])
def test_a_command_that_ends_it_does_so_once_however_often_it_is_handed_out(kind: str) -> None:
    first = Setup()
    first.steering.receive(command(4, kind))
    first.report(2)
    assert first.steering.has_state
    handed = [{**command(seq, one), "status": "waiting"} for seq, one in ((3, "save"), (4, kind), (5, "save"))]
    second = Setup(commands=handed, ends=0)
    second.steering.load_state_dict(first.steering.state_dict())
    second.steering.resume(2, [])
    second.report(3)
    assert second.loop.stops == first.loop.stops == [("rule", True)]
    assert second.agent.results() == [(4, "applied"), (3, "applied"), (5, "applied")]


def test_ranks_end_together_after_the_step_at_which_they_next_agree() -> None:
    state = ending("pause").steering.state_dict()
    both = ranks(2, rule("spike", SPIKE, "pause"), ends=0)
    for setup in both:
        setup.steering.load_state_dict(json.loads(json.dumps(state)))
        setup.steering.resume(2, [])
        assert setup.loop.stops == []
    assert [setup.steering.has_news for setup in both] == [True, False]
    threads = [threading.Thread(target=setup.steering.share) for setup in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [setup.loop.stops for setup in both] == [[("rule", True)]] * 2
    assert len(both[0].agent.of("leaving")) == 1


def test_the_step_of_a_resumed_training_is_said() -> None:
    """The revision came into force "at step 0", and so did the counters that began anew."""
    first = ending("save")
    second = Setup()
    text = json.dumps({"rules": json.loads(rule("new", "loss > 1"))["rules"]})
    second.steering.begin({"rules": {"revision": 3, "text": text}}, second.agent, step=2)
    second.steering.load_state_dict(first.steering.state_dict())
    assert second.agent.of("rules_in_force")[-1]["step"] == 2
    updated = [one for one in second.agent.of("decision") if one["decision"] == "rule.updated"]
    assert [one["step"] for one in updated] == [2, 2] and "begin anew" in updated[1]["message"]
