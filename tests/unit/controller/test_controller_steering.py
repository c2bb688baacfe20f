"""The controller of a loop: incoming messages, reports, saved state."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from controller_kit import Agent, Alone, Clock, Rate, Setup, TrainingLoop, command, rule

from gpu_client.controller import steering as module
from gpu_client.controller.event_reporter import STATUS_EVERY_S, STATUS_SOON_S
from gpu_client.controller.learning_rate import Setting
from gpu_client.controller.steering import Steering


class Batches:
    def __init__(self) -> None:
        self.skipped = 0

    def skip(self, batches: int) -> None:
        self.skipped += batches


def test_without_rules_and_commands_a_step_asks_nothing() -> None:
    setup = Setup()
    assert not setup.steering.live and not setup.steering.has_state
    setup.report(1, loss=1.0)
    setup.steering.close()
    assert setup.agent.heard == []


def test_a_rule_acts_at_its_step_and_tells_the_agent() -> None:
    setup = Setup(rule("nan", "not isfinite(loss)", '{"stop": "failed"}'))
    for step, loss in enumerate([1.0, 2.0, float("nan"), 1.0], 1):
        setup.report(step, loss=loss)
    assert setup.agent.of("rules_in_force") == [{"type": "rules_in_force", "revision": 1, "step": 0}]
    assert setup.agent.fired() == [("nan", 3)]
    assert setup.loop.stops == [("rule", True)]
    (leaving,) = setup.agent.of("leaving")
    assert leaving["kind"] == "stop" and leaving["arguments"]["outcome"] == "failed"
    assert leaving["ended_by"] == {"revision": 1, "step": 3, "rule": "nan", "message": "loss = nan"}
    assert not setup.steering.finishing


def test_a_rollback_names_the_first_step_of_the_trouble() -> None:
    setup = Setup(rule("high", "loss > 1", '{"rollback": {"skip": 3}}', **{"for": "3 checks"}))
    for step in range(1, 6):
        setup.report(step, loss=step)
    (leaving,) = setup.agent.of("leaving")
    assert leaving["arguments"]["before_step"] == 2 and leaving["ended_by"]["step"] == 4
    assert setup.loop.stops == [("rule", False)]


def test_of_two_rules_that_end_the_training_the_first_counts() -> None:
    rules = [json.loads(rule(name, "loss > 1", do))["rules"][0] for name, do in (
        ("a", '{"stop": "failed"}'), ("b", '{"stop": "complete"}'), ("c", '{"rollback": {}}')
    )]  # fmt: skip
    setup = Setup(json.dumps({"rules": rules}))
    setup.report(1, loss=2.0)
    assert [one["ended_by"]["rule"] for one in setup.agent.of("leaving")] == ["a"]
    assert not setup.steering.finishing and len(setup.loop.stops) == 1
    kinds = [kind for kind, _, _ in setup.agent.decisions() if kind.startswith("action.")]
    assert kinds == ["action.applied", "action.rejected", "action.rejected"]


def test_commands_are_carried_out_between_steps_and_answered() -> None:
    setup, rate = Setup(), Rate()
    setup.steering.offer(knobs={"lr": rate})
    setup.steering.receive(command(1, "set", knob="lr", factor=0.5))
    setup.steering.receive(command(2, "save"))
    setup.steering.receive(command(3, "evaluate"))
    setup.steering.receive(command(4, "dance"))
    assert rate.value == 1.0 and setup.steering.live
    setup.report(7)
    assert rate.value == 0.5 and setup.loop.saves == 1
    assert setup.agent.results() == [(1, "applied"), (2, "applied"), (3, "rejected"), (4, "rejected")]
    assert {one["step"] for one in setup.agent.of("command_result")} == {7}
    assert not setup.steering.live and setup.steering.has_state


def test_what_arrives_before_begin_is_not_lost_and_comes_after_what_is_older() -> None:
    """A command that came while the session was being made hid those of the beginning: their numbers are lower."""
    clock, agent, rate = Clock(), Agent(), Rate(8.0)
    steering = Steering(TrainingLoop(), Alone(), clock=clock)
    steering.receive({"type": "rules", "revision": 2, "text": rule("new", "loss > 1")})
    steering.receive(command(3, "set", knob="lr", factor=0.5))
    start = [{**command(seq, "set", knob="lr", factor=0.5), "status": "waiting"} for seq in (1, 2)]
    steering.begin({"rules": {"revision": 1, "text": rule("old", "loss > 1")}, "commands": start}, agent)
    steering.offer(knobs={"lr": rate})
    steering.report_step(1, {"loss": 2.0})
    assert agent.results() == [(1, "applied"), (2, "applied"), (3, "applied")] and rate.value == 1.0
    assert [one["revision"] for one in agent.of("rules_in_force")] == [1, 2]
    assert agent.fired() == [("new", 1)]


def test_a_command_that_comes_while_a_step_ends_is_seen_at_the_next() -> None:
    """The message came between the check of the empty inbox and the reset of the flag."""
    setup = Setup()

    class Inbox(list[Any]):
        looks = 0

        def popleft(self) -> Any:
            return self.pop(0)

        def __bool__(self) -> bool:
            Inbox.looks += 1
            found = len(self) > 0
            if Inbox.looks == 2:  # the look that decides whether anything is live
                setup.steering.receive(command(1, "save"))
                return False
            return found

    setup.steering._inbox = Inbox()  # type: ignore[assignment]
    setup.steering.live = True
    for step in range(1, 4):
        setup.report(step)
    assert setup.agent.results() == [(1, "applied")]


@pytest.mark.parametrize(
    "message",
    [
        {"type": "rules"},
        {"type": "rules", "revision": "x", "text": ""},
        {"type": "rules", "revision": float("inf"), "text": ""},
        {"type": "rules", "revision": None, "text": None},
        {"type": "command"},
        {"type": "nonsense"},
        {},
    ],
)
def test_a_message_that_makes_no_sense_does_not_end_the_training(message: dict[str, Any]) -> None:
    setup = Setup(rule("high", "loss > 1"))
    setup.steering.receive(message)
    setup.report(1, loss=2.0)
    assert setup.agent.fired() == [("high", 1)]


def test_rules_of_a_running_training_change_at_a_step() -> None:
    setup = Setup(rule("a", "loss > 1"))
    setup.report(1, loss=2.0)
    setup.steering.receive({"type": "rules", "revision": 2, "text": rule("b", "loss > 1")})
    setup.steering.receive({"type": "rules", "revision": 3, "text": "rules: [{name: b, when: loss >, do: stop}]"})
    setup.steering.receive({"type": "rules", "revision": 2, "text": rule("c", "loss > 1")})
    setup.report(2, loss=2.0)
    assert setup.agent.fired() == [("a", 1), ("b", 2)]
    first, second, rejected = setup.agent.of("rules_in_force")
    assert (first["revision"], second["revision"], second["step"]) == (1, 2, 2)
    assert (rejected["revision"], rejected["rejected"]) == (2, 3) and rejected["reason"]
    assert setup.agent.of("rule_statuses")[-1]["statuses"][0]["rule"] == "b", "at once"
    setup.steering.receive({"type": "rules", "revision": 4, "text": ""})
    setup.report(3, loss=2.0)
    assert not setup.steering.live and len(setup.agent.fired()) == 2


def test_how_rules_stand_is_said_now_and_then() -> None:
    setup = Setup(rule("r", "loss > 1", '{"log": "x"}', cooldown="1 steps"))
    setup.report(1, 0.001, loss=0.0)
    assert len(setup.agent.of("rule_statuses")) <= 1
    said = len(setup.agent.of("rule_statuses"))
    for step in range(2, 102):  # 0.1 s, and nothing happens
        setup.report(step, 0.001, loss=0.0)
    assert len(setup.agent.of("rule_statuses")) == said
    setup.clock.now += STATUS_EVERY_S
    setup.report(102, 0.001, loss=0.0)
    assert len(setup.agent.of("rule_statuses")) == said + 1


def test_a_rule_that_fires_at_every_step_does_not_have_all_statuses_said_each_time() -> None:
    setup = Setup(rule("r", "loss > 1", '{"log": "x"}', cooldown="1 steps"))
    for step in range(1, 1001):
        setup.report(step, 0.01, loss=2.0)
    assert len(setup.agent.fired()) == 1000
    assert len(setup.agent.of("rule_statuses")) <= 10 / STATUS_SOON_S + 1


def test_two_hundred_rules_fit_into_a_message() -> None:
    """The statuses of 200 rules fit into one message; a longer line was dropped, with all statuses."""
    names = [f"rule-{number:03}-{'x' * 54}" for number in range(200)]
    when = " + ".join(f"coalesce(metric_{'y' * 30}_{part}, 0)" for part in range(3)) + " > 1"
    rules = [{"name": name, "when": when, "do": "save", "on": ["step"]} for name in names]
    setup = Setup(json.dumps({"rules": rules}))
    setup.report(1, loss=1.0)
    setup.steering.close()
    statuses = setup.agent.of("rule_statuses")[-1]["statuses"]
    assert [one["rule"] for one in statuses] == names and all(one["said"].startswith("armed") for one in statuses)


def test_the_end_is_an_event_and_comes_once() -> None:
    setup = Setup(rule("bad", "best(eval.acc, max) < 0.5", '{"stop": "failed"}', on=["end"]))
    setup.report(1, loss=1.0)
    setup.steering.evaluated(1, acc=0.3)
    setup.steering.close()
    setup.steering.close()
    assert setup.agent.fired() == [("bad", 1)] and len(setup.agent.of("leaving")) == 1


def test_events_reach_rules() -> None:
    rules = [
        json.loads(rule(name, "loss > 0 or missing(loss)", on=[name]))["rules"][0]
        for name in ("start", "epoch", "save", "evaluate", "end")
    ]
    for one in rules:
        one["cooldown"] = "1 checks"
    setup = Setup(json.dumps({"rules": rules}))
    for step in range(1, 7):
        setup.report(step, loss=1.0, epoch=step / 3)
    setup.steering.report_event("save", 6, {})
    setup.steering.evaluated(6, loss=2.0)
    setup.steering.close()
    assert setup.agent.fired() == [("start", 0), ("epoch", 3), ("epoch", 6), ("save", 6), ("evaluate", 6), ("end", 6)]


def test_after_a_rollback_the_training_goes_on_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    rollbacks = [
        {"number": 1, "rule": "spike", "step": 9, "to_step": 5, "skip": 4, "lr_factor": 0.5},
        {"number": 2, "rule": "spike", "step": 12, "to_step": 5, "skip": 0, "lr_factor": 0.5},
    ]
    setup, rate, batches = Setup(rollbacks=rollbacks), Rate(), Batches()
    setup.steering.offer(knobs={"lr": rate})
    setup.steering.resume(5, [object(), batches])
    assert (rate.value, batches.skipped) == (0.25, 4)
    assert [kind for kind, _, _ in setup.agent.decisions()] == ["action.applied"] * 2
    state = setup.steering.state_dict()
    again = Setup(rollbacks=[*rollbacks, {**rollbacks[0], "number": 3}])
    again.steering.offer(knobs={"lr": rate})
    again.steering.load_state_dict(state)
    again.steering.resume(5, [batches])
    assert (rate.value, batches.skipped) == (0.125, 8), "only the third is not in the checkpoint"


class Part:
    """A module with a submodule called skip."""

    def __init__(self) -> None:
        self.skip = "a convolution"


class Broken(Batches):
    def skip(self, batches: int) -> None:
        raise KeyError("no")


@pytest.mark.parametrize(
    ("states", "knobs"),
    [([Part()], {}), ([Broken()], {"lr": Rate()}), ([], {"lr": Setting(lambda: 1.0, lambda value: None)})],
)
def test_what_cannot_be_adjusted_after_a_rollback_is_told_and_ends_nothing(states: list[Any], knobs: Any) -> None:
    setup = Setup(rollbacks=[{"number": 1, "rule": "spike", "step": 9, "to_step": 5, "skip": 4, "lr_factor": 0.5}])
    setup.steering.offer(knobs=knobs)
    setup.steering.resume(5, states)
    ((kind, name, step),) = setup.agent.decisions()
    assert (kind, name, step) == ("action.failed", "spike", 5)


def test_a_command_is_done_again_where_a_resumed_state_lacks_it_and_only_there() -> None:
    commands = [{**command(1, "set", knob="lr", factor=0.5), "status": "applied", "step": 4}]
    for resumed_at, has_it, expected in ((2, False, {4: 0.5}), (6, True, {})):
        setup, rate = Setup(commands=commands), Rate()
        setup.steering.offer(knobs={"lr": rate})
        if has_it:
            setup.steering.load_state_dict({"sets_seq": 1})
        setup.steering.resume(resumed_at, [])
        found = {}
        for step in range(resumed_at + 1, 9):
            before = rate.value
            setup.report(step, loss=1.0)
            if rate.value != before:
                found[step] = rate.value
        assert found == expected


def test_without_an_agent_rules_work_and_what_needs_one_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    rules = [json.loads(rule(f"r{number}", "loss > 1", do))["rules"][0] for number, do in enumerate(("pause", "stop"))]
    setup = Setup(json.dumps({"rules": rules}), agent=False)
    with caplog.at_level(logging.INFO, "baton.rules"):
        setup.report(1, loss=2.0)
    assert setup.steering.finishing and setup.loop.stops == [("rule", True)]
    assert "needs an agent" in caplog.text and "[rules] step 1: rule.fired r0: loss = 2.0 -> pause" in caplog.text


def test_a_forked_child_says_and_does_nothing_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    setup = Setup(rule("r", "loss > 0", '{"hook": "h"}', on=["end"]))
    setup.steering.offer(hooks={"h": lambda order: called.append(order.step)})
    setup.report(1, loss=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "getpid", lambda: -1)
        setup.steering.close()
    assert called == []
    setup.steering.close()
    assert called == [1]


def test_a_user_metric_or_knob_that_raises_is_missing_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Reading the knob for a rule on `lr` ended the training."""

    def fail() -> float:
        raise KeyError("gone")

    setup = Setup(rule("r", "lr > 1 or mine > 1 or loss > 1"))
    setup.steering.offer(knobs={"lr": Setting(fail, lambda value: None)}, metrics={"mine": fail})
    with caplog.at_level(logging.WARNING, "baton.rules"):
        for step in range(1, 4):
            setup.report(step, loss=2.0)
    assert setup.agent.fired() == [("r", 1)] and caplog.text.count("cannot be read") == 2


@pytest.mark.parametrize("epoch", [float("nan"), float("inf"), 10**400, "two", None, True])
def test_no_epoch_ends_the_training(epoch: Any) -> None:
    setup = Setup(rule("r", "loss > 0", on=["epoch"]))
    for step in range(1, 3):
        setup.report(step, loss=1.0, epoch=epoch)
    assert setup.agent.fired() == []


def test_wall_goes_on_where_earlier_attempts_ended() -> None:
    text = rule("r", "wall > 100s")
    setup = Setup(text, ran_s=97)
    for step in range(1, 6):
        setup.report(step, loss=1.0)
    assert setup.agent.fired() == [("r", 4)]
    alone = Setup(text, agent=False)
    alone.report(1, 98.0, loss=1.0)
    resumed = Setup(text, agent=False)
    fired: list[str] = []
    resumed.steering.offer(hooks={})
    resumed.steering.load_state_dict(alone.steering.state_dict())
    resumed.steering.resume(1, [])
    resumed.report(2, 3.0, loss=1.0)
    assert resumed.loop.saves == 1 and fired == []
