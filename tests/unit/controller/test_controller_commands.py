"""Live commands: each once, in order, none after its expiry."""

from __future__ import annotations

from typing import Any

import pytest
from controller_kit import Clock, command

from gpu_client.controller.orders import CommandQueue


def commands_of() -> tuple[CommandQueue, Clock, list[tuple[int, str]]]:
    clock, undone = Clock(), []
    return CommandQueue(clock, lambda seq, status, why: undone.append((seq, status))), clock, undone


def order_of(commands: CommandQueue, message: dict[str, Any], step: int = 1) -> str | None:
    order = commands.order_of(commands.with_deadline(message), step)
    return None if order is None else order.action


def test_each_is_carried_out_once() -> None:
    commands, _, undone = commands_of()
    assert order_of(commands, command(1, "save")) == "save"
    assert order_of(commands, command(1, "save")) is None
    assert order_of(commands, command(3, "stop")) == "stop"
    assert order_of(commands, command(2, "save")) is None, "the order is that of their numbers"
    assert undone == []


def test_too_late_is_told_and_not_done() -> None:
    commands, clock, undone = commands_of()
    message = commands.with_deadline(command(1, "save", expires_in_s=10))
    clock.now += 11
    assert commands.order_of(message, 1) is None
    assert undone == [(1, "expired")]
    assert order_of(commands, command(1, "save")) is None, "nor when it comes again"
    for life in (None, 10**400, True, "soon"):
        commands, clock, undone = commands_of()
        message = commands.with_deadline({**command(1, "save"), "expires_in_s": life})
        clock.now += 1e6
        assert commands.order_of(message, 1) is not None and undone == []


def test_one_that_had_expired_before_it_came_is_not_done() -> None:
    commands, _, undone = commands_of()
    message = commands.with_deadline(command(1, "save", expires_in_s=-5))
    assert commands.order_of(message, 1) is None and undone == [(1, "expired")]


def test_what_a_resumed_state_lacks_is_done_again_after_the_same_step() -> None:
    commands, _, _ = commands_of()
    commands.sets_seq = 2
    for seq, step in ((1, 3), (2, 5), (4, 9), (6, 12)):
        again = {**command(seq, "set", knob="lr", factor=0.5), "status": "applied", "step": step}
        assert order_of(commands, again) is None
    assert commands.has_replays
    found = []
    for step in range(6, 15):
        assert commands.has_replays == (step <= 12)
        found += [(order.command, step) for order in commands.due_replays(step)]
    assert found == [(4, 9), (6, 12)] and not commands.has_replays


def test_a_set_that_a_checkpoint_has_in_it_is_not_done_again_when_its_answer_was_lost() -> None:
    """The training was killed between its checkpoint and the heartbeat: the rate was halved twice."""
    commands, _, undone = commands_of()
    commands.sets_seq = 3
    assert order_of(commands, command(3, "set", knob="lr", factor=0.5)) is None
    assert undone == [(3, "applied")]
    assert order_of(commands, command(4, "set", knob="lr", factor=0.5)) == "set"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "command"},
        {"type": "command", "seq": "1", "kind": "save"},
        {"type": "command", "seq": 1, "kind": None},
        {"type": "command", "seq": True, "kind": "save"},
        {"type": "command", "seq": 1, "kind": "set", "arguments": []},
        {"type": "command", "seq": 1, "kind": "set", "status": "applied"},
        {"type": "command", "seq": 1, "kind": "set", "status": "applied", "step": float("inf")},
    ],
)
def test_what_is_no_command_is_ignored(message: dict[str, Any]) -> None:
    commands, _, _ = commands_of()
    assert order_of(commands, message) is None
    assert order_of(commands, command(1, "save")) == "save"
