"""Test the relay of rules and commands: none is lost or doubled, and no message stops a heartbeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.worker.calls import HeartbeatRequest
from baton.contract.worker.control import MAX_DECISIONS, MAX_RESULTS, MAX_STATUSES, Control, ControlReport
from gpu_client.agent.control import control_relay
from gpu_client.agent.control.channel_messages import TrainingProgress
from gpu_client.agent.control.control_relay import UNSTEERED, UNSTEERED_AFTER_S, ControlRelay, encode_rule_exit
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import make_answer


class Channel:
    """The agent's end of the channel, without a trainer."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.sent: list[dict[str, Any]] = []
        self.reports: list[Any] = []
        self.at_step: int | None = None
        self.steering = False

    def take_steering(self) -> list[dict[str, Any]]:
        said, self.said = self.said, []
        return said

    def send_steering(self, message: dict[str, Any]) -> int:
        self.sent.append(message)
        return 1

    def progress(self) -> TrainingProgress | None:
        return None if self.at_step is None else TrainingProgress(self.at_step, None, {})

    def take_reports(self) -> list[Any]:
        reports, self.reports = self.reports, []
        return reports

    def has_steered_peer(self) -> bool:
        return self.steering


def relay_of(control: Control | None = None, clock: Clock | None = None) -> tuple[ControlRelay, Channel]:
    relay, channel = ControlRelay(control, now=lambda: 1_790_000_000, clock=clock or Clock()), Channel()
    relay.attach(channel)  # type: ignore[arg-type]
    return relay, channel


def decision(step: int, **more: Any) -> dict[str, Any]:
    return {"type": "decision", "decision": "rule.fired", "rule": "r", "revision": 1, "step": step, **more}


def result(seq: int, status: str = "applied") -> dict[str, Any]:
    return {"type": "command_result", "seq": seq, "status": status, "step": 5, "message": "done"}


def command(seq: int, **more: Any) -> dict[str, Any]:
    base = {"seq": seq, "kind": "save", "issued_at": 1_790_000_000, "expires_at": 1_790_000_600}
    return {**base, **more}


def rules(revision: int) -> dict[str, Any]:
    return {"revision": revision, "text": f"# {revision}"}


def in_force(revision: int, step: int, **more: Any) -> dict[str, Any]:
    return {"type": "rules_in_force", "revision": revision, "step": step, **more}


def say(relay: ControlRelay, channel: Channel, *messages: Any) -> None:
    channel.said += messages
    relay.poll()


class Plane:
    """Records each decision once, by its number, as the control plane does."""

    def __init__(self) -> None:
        self.decided = 0
        self.steps: list[int] = []
        self.results: dict[int, str] = {}

    def take(self, report: ControlReport) -> None:
        for one in report.decisions:
            if one.number > self.decided:
                self.decided = one.number
                self.steps.append(one.step)
        self.results |= {one.seq: one.status for one in report.results}


@given(st.lists(st.sampled_from(["say", "beat", "request lost", "answer lost", "late"]), max_size=40))
def test_whatever_becomes_of_heartbeats_nothing_is_lost_or_doubled(happenings: list[str]) -> None:
    relay, channel = relay_of()
    plane, said = Plane(), 0
    late: list[ControlReport] = []
    for happening in [*happenings, *["beat"] * 20]:
        if happening == "say":
            for _ in range(7):
                said += 1
                say(relay, channel, decision(said), result(said))
        else:
            report = relay.report()
            assert len(report.decisions) <= MAX_DECISIONS and len(report.results) <= MAX_RESULTS
            if happening != "request lost":
                plane.take(report)
            if happening == "beat":
                relay.acknowledge(report, make_answer())
            if happening == "late":  # another thread's heartbeat is accepted before it is noted that this one was
                late.append(report)
                other = relay.report()
                plane.take(other)
                relay.acknowledge(other, make_answer())
                relay.acknowledge(late.pop(), make_answer())
    while relay.has_backlog:
        report = relay.report()
        plane.take(report)
        relay.acknowledge(report, make_answer())
    assert plane.steps == list(range(1, said + 1))
    assert plane.results == dict.fromkeys(range(1, said + 1), "applied")


def test_statuses_are_said_when_they_are_new() -> None:
    relay, channel = relay_of()
    one = [{"rule": "r", "state": "armed", "said": "armed", "fires": 0}]
    say(relay, channel, {"type": "rule_statuses", "statuses": one * (MAX_STATUSES + 5)})
    report = relay.report()
    assert report.statuses is not None and len(report.statuses) == MAX_STATUSES
    say(relay, channel, {"type": "rule_statuses", "statuses": one})
    relay.acknowledge(report, make_answer())
    newer = relay.report()
    assert newer.statuses is not None and len(newer.statuses) == 1, "what came in the meantime was not said yet"
    relay.acknowledge(newer, make_answer())
    assert relay.report().statuses is None


def test_rules_and_commands_reach_the_training_once_and_those_of_the_beginning_lie_in_its_file(tmp_path: Path) -> None:
    clock = Clock()
    applied = command(1, kind="set", arguments={"knob": "lr", "factor": 0.5}, status="applied", step=3)
    control = Control.model_validate(
        {"rules": rules(2), "commands": [applied, command(4)], "commands_seq": 4, "ran_s": 77}
    )
    relay, channel = relay_of(control, clock)
    assert (relay.report().rules_revision, relay.report().commands_seq) == (2, 4)
    answer = make_answer(rules=rules(3), commands=[command(5, expires_at=1_790_000_030)], commands_seq=5)
    for _ in range(3):
        relay.acknowledge(relay.report(), answer)
    relay.acknowledge(relay.report(), make_answer(rules=rules(2), commands=[command(4)]))
    assert [one["type"] for one in channel.sent] == ["rules", "command"]
    assert channel.sent[1]["seq"] == 5 and channel.sent[1]["expires_in_s"] == 30
    assert (relay.report().rules_revision, relay.report().commands_seq) == (3, 5)
    clock.now += 20
    relay.write_start(tmp_path / "control.json")
    start = json.loads((tmp_path / "control.json").read_text())
    assert start["rules"]["revision"] == 3 and start["ran_s"] == 77
    assert [(one["seq"], one.get("expires_in_s")) for one in start["commands"]] == [(1, None), (4, 580), (5, 10)]
    assert start["commands"][0]["step"] == 3


def test_a_process_that_is_started_again_does_not_hear_of_what_was_done_but_of_sets(tmp_path: Path) -> None:
    relay, channel = relay_of()
    half = {"kind": "set", "arguments": {"knob": "lr", "factor": 0.5}}
    commands = [command(1), command(2, **half), command(3, **half), command(4)]
    relay.acknowledge(relay.report(), make_answer(commands=commands, commands_seq=4))
    say(relay, channel, result(1), result(2), result(3, "rejected"))
    relay.write_start(tmp_path / "control.json")
    start = json.loads((tmp_path / "control.json").read_text())
    assert [(one["seq"], one["status"], one["step"]) for one in start["commands"]] == [
        (2, "applied", 5), (4, "waiting", None),
    ]  # fmt: skip


def test_a_revision_is_in_force_when_the_training_says_so_and_not_before() -> None:
    """The step of the one before was reported as that of the new one."""
    relay, channel = relay_of(Control.model_validate({"rules": rules(1)}))
    assert relay.report().step is None
    say(relay, channel, in_force(1, 7))
    assert relay.report().step == 7
    relay.acknowledge(relay.report(), make_answer(rules=rules(2)))
    assert (relay.report().rules_revision, relay.report().step) == (2, None)
    say(relay, channel, in_force(1, 9, rejected=2, reason="line 3: no"))
    report = relay.report()
    assert (report.step, report.rejected, report.reason) == (None, 2, "line 3: no")
    relay.acknowledge(report, make_answer(rules=rules(3)))
    say(relay, channel, in_force(3, 12))
    assert (relay.report().step, relay.report().rejected, relay.report().reason) == (12, None, "")


def test_a_training_without_a_session_is_told_to_be_deaf_until_it_speaks() -> None:
    clock = Clock()
    relay, channel = relay_of(Control.model_validate({"rules": rules(1)}), clock)
    clock.now += UNSTEERED_AFTER_S - 1
    assert relay.report().rejected is None
    clock.now += 2
    assert (relay.report().rejected, relay.report().reason) == (1, UNSTEERED)
    say(relay, channel, in_force(1, 0))
    assert (relay.report().rejected, relay.report().step) == (None, 0)
    connected, other = relay_of(Control.model_validate({"rules": rules(1)}), clock)
    other.steering = True
    clock.now += UNSTEERED_AFTER_S + 1
    assert connected.report().rejected is None


def test_decisions_that_nobody_takes_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_relay, "MAX_WAITING", 20)
    relay, channel = relay_of()
    say(relay, channel, *(decision(step) for step in range(1, 1000)))
    assert len(relay._decisions) == 20 and caplog.text.count("later ones are dropped") == 1


LEAVING = {"type": "leaving", "kind": "stop", "ended_by": {"rule": "r", "step": 3}, "arguments": {"outcome": "failed"}}


def test_the_first_end_of_a_process_counts_and_the_next_step_of_the_job_may_end_otherwise() -> None:
    relay, channel = relay_of()
    complete = {**LEAVING, "arguments": {"outcome": "complete"}}
    say(relay, channel, complete, LEAVING)
    assert relay.rule_exit is not None and not relay.rule_exit.failed
    relay.attach(channel)  # type: ignore[arg-type]
    say(relay, channel, LEAVING)
    assert relay.rule_exit.failed and relay.rule_exit.reason == "rule r at step 3"


def attached_at(base: int, control: Control | None = None) -> tuple[ControlRelay, Channel]:
    """Attach at a later step of a recipe, whose training counts from 0 again."""
    relay, channel = relay_of(control)
    relay.attach(channel, base=base)  # type: ignore[arg-type]
    return relay, channel


def test_a_later_step_of_a_recipe_is_told_of_in_the_steps_of_the_job() -> None:
    """A rollback before step 120 of the second step went to a checkpoint of the first one."""
    relay, channel = attached_at(1002, Control.model_validate({"rules": rules(1)}))
    say(relay, channel, in_force(1, 0), decision(120), result(1))
    arguments = {"to": "last", "before_step": 120}
    leaving = {"type": "leaving", "kind": "rollback", "ended_by": {"rule": "r", "step": 121}, "arguments": arguments}
    say(relay, channel, leaving)
    report = relay.report()
    assert (report.step, report.decisions[0].step, report.results[0].step) == (1002, 1122, 1007)
    assert relay.rule_exit is not None and relay.rule_exit.ended_by.step == 1123
    told = encode_rule_exit(relay.rule_exit)
    assert told.rollback is not None and told.rollback.before_step == 1122


def test_a_later_step_of_a_recipe_does_not_do_again_what_was_done_in_an_earlier_one(tmp_path: Path) -> None:
    """A rate that was lowered in the first step was lowered in the second one too, once by each way."""
    lower = {"kind": "set", "arguments": {"knob": "lr", "factor": 0.5}, "status": "applied"}
    commands = [command(1, **lower, step=400), command(2, **lower, step=1010), command(3)]
    backs = [
        {"number": number, "rule": "r", "step": to_step + 20, "to_step": to_step, "lr_factor": 0.5}
        for number, to_step in enumerate((100, 1001, 1040), 1)  # 1001: the checkpoint with which the second one begins
    ]
    control = Control.model_validate({"rules": rules(1), "commands": commands, "rollbacks": backs})
    relay, channel = attached_at(1002, control)
    say(relay, channel, {**result(3), "step": 30})
    relay.write_start(tmp_path / "control.json")
    start = json.loads((tmp_path / "control.json").read_text())
    assert [(one["seq"], one["step"]) for one in start["commands"]] == [(2, 8)]
    assert [one["number"] for one in start["rollbacks"]] == [2, 3]
    relay.attach(channel)  # type: ignore[arg-type]
    relay.write_start(tmp_path / "control.json")
    start = json.loads((tmp_path / "control.json").read_text())
    assert [(one["seq"], one["step"]) for one in start["commands"]] == [(1, 400), (2, 1010)]
    assert [one["number"] for one in start["rollbacks"]] == [1, 2, 3]


def test_a_rollback_is_handed_on_with_what_it_needs() -> None:
    relay, channel = relay_of()
    arguments = {"to": "best", "skip": 4, "lr_factor": 0.5, "budget": 2, "before_step": 2, "more": "of a later version"}
    say(relay, channel, {**LEAVING, "kind": "rollback", "arguments": arguments})
    assert relay.rule_exit is not None
    wish = encode_rule_exit(relay.rule_exit)
    assert wish.rollback is not None and wish.rollback.before_step == 2 and wish.rollback.to == "best"


hostile = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from([10**400, "\ud800", [], {}, [{}]])
)
KINDS = ("rules_in_force", "rule_statuses", "decision", "command_result", "leaving", "quarantined", "other")
NAMES = (
    "revision", "step", "rejected", "reason", "statuses", "decision", "rule", "operands", "actions", "message",
    "seq", "status", "kind", "ended_by", "arguments", "severity", "dry_run", "command",
    "ring", "object", "objects", "rank",
)  # fmt: skip


@given(
    st.lists(
        st.builds(
            lambda kind, good, fields: {**good, **fields, "type": kind},
            st.sampled_from(KINDS),
            st.sampled_from([{}, decision(1), result(1), in_force(1, 1), LEAVING]),
            st.dictionaries(st.sampled_from(NAMES), hostile, max_size=4),
        ),
        max_size=4,
    )
)
def test_no_message_of_the_training_breaks_a_heartbeat(messages: list[dict[str, Any]]) -> None:
    relay, channel = relay_of(Control.model_validate({"rules": rules(1)}))
    say(relay, channel, *messages)
    request = HeartbeatRequest(control=relay.report())
    HeartbeatRequest.model_validate_json(request.model_dump_json(exclude_unset=True))
    if relay.rule_exit is not None and relay.rule_exit.kind != "stop":
        encode_rule_exit(relay.rule_exit)


@pytest.mark.parametrize(
    "message",
    [
        in_force(10**400, 1),
        in_force(1, 10**400),
        {**in_force(1, 1), "revision": float("inf")},
        in_force(1, 1, rejected=10**9),
        in_force(1, 1, reason="\ud800"),
        decision(1, operands={"loss": float("nan")}),
        decision(1, message="\ud800"),
        decision(-1),
        {**LEAVING, "kind": "explode"},
        {**LEAVING, "kind": "rollback", "arguments": {"before_step": -1}},
        {**LEAVING, "ended_by": None},
    ],
)
def test_what_cannot_be_passed_on_is_not_taken(message: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A number that no report can hold was kept, and every heartbeat from then on went out without a report."""
    relay, channel = relay_of()
    say(relay, channel, message, decision(2))
    assert [one.step for one in relay.report().decisions] == [2] and relay.rule_exit is None
    assert "ignored a message of the training" in caplog.text
