"""Rules and commands of an elastic training: one node decides, all nodes act after the same round."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_client.controller.world_steering import MAX_SENT_ORDERS
from gpu_client.elastic.rounds.member_status import MemberStatus
from tests.unit.controller.controller_kit import Rate, Setup, agree, command, ranks, rule

HALVE = '{"set": {"knob": "lr", "factor": 0.5}}'


class Node(Setup):
    """Controller of one node, whose main thread reports after each round."""

    def __init__(self, rules: str = "", **start: Any) -> None:
        super().__init__(rules, elastic=True, **start)
        self.knob = Rate(0.8)
        self.steering.offer(knobs={"lr": self.knob})
        assert self.steering.world is not None
        self.world = self.steering.world

    def saved(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.steering.state_dict()))


def exchange(nodes: list[Node], *, enters: bool = False) -> list[Any]:
    """Return the orders of all nodes, as their statuses carry them."""
    orders = [one.world.describe(leads=place == 0, enters=enters) for place, one in enumerate(nodes)]
    return [MemberStatus.decode(MemberStatus("0.1.aaaaaaaa", 1, 1, orders=one).encode()).orders for one in orders]


def run_round(nodes: list[Node], number: int, *, saver: int = 0, inner_steps: int = 1, **metrics: float) -> None:
    """Run one round of all nodes; the first is the first member. inner_steps: steps of the script in a round."""
    for one in nodes:
        one.world.observe(number, metrics)
    found = exchange(nodes)
    for place, one in enumerate(nodes):
        one.world.commit(number, found, saves=place == saver)
    for one in nodes:
        one.report(number * inner_steps)


def test_rules_count_rounds_and_events_name_the_step_of_the_script() -> None:
    (node,) = nodes = [Node(rule("third", "step >= 3", "stop"))]
    for number in (1, 2, 3):
        run_round(nodes, number, inner_steps=100)
    assert node.agent.fired() == [("third", 300)]
    assert node.agent.of("leaving")[0]["ended_by"]["step"] == 300


def test_a_rule_fires_once_and_all_nodes_act_after_the_same_round() -> None:
    nodes = [Node(rule("high", "loss > 2", HALVE)) for _ in range(3)]
    run_round(nodes, 1, loss=1.0)
    run_round(nodes, 2, loss=3.0)
    assert [one.knob.value for one in nodes] == [0.4] * 3
    assert [one.agent.fired() for one in nodes] == [[("high", 2)], [], []]
    assert [kind for kind, _, _ in nodes[0].agent.decisions()] == ["rule.updated", "rule.fired", "action.applied"]
    assert nodes[1].agent.decisions() == []
    run_round(nodes, 3, loss=3.0)
    assert [one.knob.value for one in nodes] == [0.4] * 3


def test_only_the_first_member_reports_statuses_and_its_orders_count() -> None:
    leader, late = Node(rule("high", "loss > 2", "stop", **{"for": "2 checks"})), Node(rule("high", "loss > 2", "stop"))
    run_round([leader, late], 1, loss=3.0)
    assert (leader.loop.stops, late.loop.stops) == ([], [])
    run_round([leader, late], 2, loss=3.0)
    assert leader.loop.stops == late.loop.stops == [("rule", True)]
    assert [len(one.agent.of("leaving")) for one in (leader, late)] == [1, 1]
    assert (bool(leader.agent.of("rule_statuses")), late.agent.of("rule_statuses")) == (True, [])


def test_the_next_member_decides_when_the_first_vanishes_before_the_commit() -> None:
    nodes = [Node(rule("high", "loss > 2", HALVE)) for _ in range(3)]
    run_round(nodes, 1, loss=1.0)
    for one in nodes:
        one.world.observe(2, {"loss": 3.0})
    exchange(nodes)
    run_round(nodes[1:], 2, loss=1.0)
    assert [one.knob.value for one in nodes] == [0.8, 0.4, 0.4]
    assert nodes[1].agent.fired() == [("high", 2)]


def count_high(rules: int) -> str:
    """Write rules that call the hook `count` in the same round."""
    return json.dumps(
        {"rules": [{"name": f"high{place}", "when": "loss > 2", "do": {"hook": "count"}} for place in range(rules)]}
    )


def test_orders_for_which_a_status_has_no_room_follow_in_the_next_rounds() -> None:
    rules = 2 * MAX_SENT_ORDERS + 1
    nodes = [Node(count_high(rules)) for _ in range(2)]
    calls: list[list[str]] = [[], []]
    for one, called in zip(nodes, calls, strict=True):
        one.steering.offer(hooks={"count": lambda order, called=called: called.append(order.rule)})
    for number, loss in enumerate((1.0, 3.0, 3.0, 3.0), start=1):
        run_round(nodes, number, loss=loss)
        assert len(calls[0]) == len(calls[1]) == min(rules, (number - 1) * MAX_SENT_ORDERS)
    assert calls[0] == calls[1] == [f"high{place}" for place in range(rules)]
    assert len(nodes[0].agent.fired()) == rules


def test_a_later_first_member_repeats_no_decision_of_an_earlier_round() -> None:
    nodes = [Node(count_high(MAX_SENT_ORDERS + 1)) for _ in range(2)]
    run_round(nodes, 1, loss=3.0)
    assert nodes[1].world.describe(leads=True, enters=False) == []


def test_an_alert_comes_from_one_node_alone() -> None:
    nodes = [Node(rule("high", "loss > 2", '{"alert": "loss {loss}"}')) for _ in range(2)]
    run_round(nodes, 1, loss=3.0)
    told = [[kind for kind, _, _ in one.agent.decisions()] for one in nodes]
    assert told == [["rule.updated", "rule.fired", "action.applied"], []]


def test_a_command_that_one_node_knows_reaches_all_nodes_once() -> None:
    nodes = [Node() for _ in range(3)]
    run_round(nodes, 1)
    nodes[2].steering.receive(command(4, "set", knob="lr", factor=0.5))
    nodes[2].report(1)
    assert [one.knob.value for one in nodes] == [0.8] * 3
    run_round(nodes, 2)
    assert [one.knob.value for one in nodes] == [0.4] * 3
    nodes[0].steering.receive(command(4, "set", knob="lr", factor=0.5))
    nodes[0].report(2)
    run_round(nodes, 3)
    assert [one.knob.value for one in nodes] == [0.4] * 3
    assert [one.agent.results() for one in nodes] == [[(4, "applied")]] * 3


def test_a_node_that_receives_a_command_after_its_round_reports_what_the_command_did() -> None:
    nodes = [Node() for _ in range(2)]
    nodes[1].steering.receive(command(4, "set", knob="lr", factor=0.5))
    nodes[1].report(0)
    found = exchange(nodes)
    for one in nodes:
        one.world.commit(1, found, saves=False)
    nodes[0].steering.receive({**command(4, "set", knob="lr", factor=0.5), "status": "waiting"})
    for one in nodes:
        one.report(1)
    messages = [[found["message"] for found in one.agent.of("command_result")] for one in nodes]
    assert messages == [["lr: 0.8 -> 0.4"]] * 2


def test_an_expired_command_is_not_carried_out() -> None:
    node = Node()
    node.steering.receive(command(1, "set", expires_in_s=10, knob="lr", factor=0.5))
    node.report(0)
    node.clock.now += 20
    node.steering.receive(command(2, "save"))
    node.report(0)
    run_round([node], 1)
    assert (node.knob.value, node.agent.results()) == (0.8, [(2, "applied")])


def test_the_node_that_saves_the_round_writes_the_tagged_checkpoint() -> None:
    nodes = [Node() for _ in range(2)]
    for one in nodes:
        one.steering.receive(command(1, "save", tag="best"))
        one.report(0)
    run_round(nodes, 1, saver=1)
    assert [one.loop.tags for one in nodes] == [[], ["best"]]
    assert [one.agent.results() for one in nodes] == [[(1, "applied")]] * 2


def test_a_joining_node_repeats_the_settings_that_its_checkpoint_lacks() -> None:
    text = rule("high", "loss > 2", HALVE)
    first = Node(text)
    run_round([first], 1, loss=3.0)
    saved = first.saved()
    first.knob.value = 0.8
    run_round([first], 2, loss=1.0)
    run_round([first], 3, loss=3.0)
    assert first.knob.value == 0.4
    applied = [{**command(7, "set", knob="lr", factor=0.5), "status": "applied", "step": 3}]
    fresh, resumed = Node(text), Node(text)
    resumed.steering.load_state_dict(saved)
    resumed.knob.value = 0.4
    nodes = [first, fresh, resumed]
    found = exchange(nodes, enters=True)
    for one in nodes:
        one.world.enter(found)
        one.report(3)
    assert [one.knob.value for one in nodes] == [0.4, 0.2, 0.2]
    again = Node(text, commands=applied)
    again.report(3)
    run_round([first, again], 4, loss=1.0)
    assert (first.knob.value, again.knob.value) == (0.2, 0.4)
    again.steering.receive({**applied[0], "status": "waiting"})
    again.report(4)
    run_round([first, again], 5, loss=1.0)
    assert again.knob.value == 0.4


@pytest.mark.parametrize("action", ["rollback", "requeue", "skip_batch"])
def test_an_action_that_cannot_be_right_is_rejected(action: str) -> None:
    nodes = [Node(rule("high", "loss > 2", action)) for _ in range(2)]
    run_round(nodes, 1, loss=3.0)
    assert nodes[0].agent.decisions()[-1] == ("action.rejected", "high", 1)
    assert (nodes[0].loop.stops, nodes[1].loop.stops) == ([], [])


def test_an_order_that_cannot_be_read_is_ignored() -> None:
    node = Node()
    node.world.enter([[{"id": "x", "done": True, "order": {"action": "set", "unknown": 1}}, {"done": True}]])
    node.world.commit(1, [[{"id": "y", "order": 7}]], saves=False)
    node.report(1)
    assert (node.knob.value, node.agent.decisions()) == (0.8, [])


def test_all_processes_of_a_node_act_after_the_same_step() -> None:
    first, second = ranks(2, rule("high", "loss > 2", HALVE), elastic=True)
    rates = [Rate(), Rate()]
    for one, rate in zip((first, second), rates, strict=True):
        one.steering.offer(knobs={"lr": rate})
    world = first.steering.world
    assert world is not None
    first.steering.receive(command(1, "stop"))
    seen = []
    for step in range(1, 6):
        if step in (2, 3):
            world.observe(step, {"loss": 3.0 if step == 2 else 1.0})
            world.commit(step, [world.describe(leads=True, enters=False)], saves=True)
        for one in (first, second):
            one.report(step, loss=1.0)
        agree([first, second])
        seen.append(tuple(rate.value for rate in rates))
    assert seen[0] == (1.0, 1.0)
    assert all(one == other for one, other in seen)
    assert seen[-1] == (0.5, 0.5)
    assert first.loop.stops == second.loop.stops == [("rule", True)]
    assert (first.agent.fired(), first.agent.results()) == ([("high", 2)], [(1, "applied")])
    assert len(first.agent.of("leaving")) == 1
