"""Test rules and commands over the real channel: receivers, and broken or hostile trainers."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.worker.control import MAX_RULES_BYTES
from gpu_client.agent.control.channel_server import MAX_WAITING_STEERING, ChannelServer
from gpu_client.training.channel import AgentChannel
from tests.kits.clock import Clock
from tests.kits.waiting import soon


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(tmp_path: Path, clock: Clock) -> Iterator[ChannelServer]:
    with ChannelServer(tmp_path, clock) as server:
        yield server


@contextlib.contextmanager
def trainer(server: ChannelServer) -> Iterator[tuple[AgentChannel, list[dict[str, Any]]]]:
    heard: list[dict[str, Any]] = []
    channel = AgentChannel(
        str(server.path), lambda directive: None, on_steering=lambda message: heard.append(dict(message))
    )
    yield channel, heard
    channel.close()


RULES: dict[str, Any] = {"type": "rules", "revision": 1, "text": "rules: []"}
COMMAND: dict[str, Any] = {"type": "command", "seq": 1, "kind": "save", "arguments": {}, "expires_in_s": 60}


def test_who_is_connected_and_who_connects_later_get_the_newest_rules_and_all_commands(
    server: ChannelServer, clock: Clock
) -> None:
    with trainer(server) as (_, early):
        soon(server.has_steered_peer)
        assert server.send_steering(RULES) == 1
        assert server.send_steering(COMMAND) == 1
        clock.now += 45
        assert server.send_steering({**RULES, "revision": 2}) == 1
        soon(lambda: len(early) == 3)
        assert early[1]["expires_in_s"] == 60
        with trainer(server) as (_, late):
            soon(lambda: len(late) == 2)
            assert [one.get("revision") for one in late] == [None, 2]
            assert late[0]["expires_in_s"] == 15, "its time runs while nobody is there to hear it"


def test_a_trainer_that_knows_nothing_of_rules_is_not_sent_any(server: ChannelServer) -> None:
    """An old one breaks its channel at a line that is longer than it knows."""
    with socket.socket(socket.AF_UNIX) as old:
        old.connect(str(server.path))
        old.sendall(b'{"type": "hello", "pid": 1, "protocol": 1}\n')
        soon(server.hellos)
        assert server.send_steering(RULES) == 0 and not server.has_steered_peer()
        server.request_checkpoint()
        old.settimeout(60)
        assert json.loads(old.recv(65536)) == {"type": "directive", "directive": "checkpoint"}


@pytest.mark.parametrize("character", ["\n", '"', "\u00e9", "\u20ac", "\x01", "\U0001f600"])
def test_the_largest_rules_pass_whatever_they_consist_of(server: ChannelServer, character: str) -> None:
    """Escaped texts exceeded the limit of a line: the channel broke, and no agent received the checkpoints."""
    text = character * (MAX_RULES_BYTES // len(character.encode()))
    with trainer(server) as (channel, heard):
        soon(server.has_steered_peer)
        server.send_steering({**RULES, "text": text})
        soon(lambda: heard)
        assert heard[0]["text"] == text and channel.connected


def test_what_a_trainer_says_is_taken_once_in_its_order_and_has_an_end(server: ChannelServer) -> None:
    with trainer(server) as (channel, _):
        for step in range(10):
            channel.send_steering({"type": "decision", "decision": "rule.fired", "step": step})
        soon(lambda: len(server._steering) == 10)
    assert [one["step"] for one in server.take_steering()] == list(range(10))
    assert server.take_steering() == []
    with socket.socket(socket.AF_UNIX) as flood:
        flood.connect(str(server.path))
        for step in range(MAX_WAITING_STEERING + 50):
            flood.sendall(json.dumps({"type": "decision", "step": step}).encode() + b"\n")
        flood.sendall(b'{"type": "leaving"}\n')
    assert server.settle(5)
    taken = server.take_steering()
    assert len(taken) == MAX_WAITING_STEERING and taken[-1] == {"type": "leaving"}


def test_what_an_ended_process_said_last_is_read_before_it_is_judged(server: ChannelServer) -> None:
    """The last line of an ended process is read before its exit counts; a training failed by a rule looked complete."""
    for number in range(50):
        with socket.socket(socket.AF_UNIX) as ending:
            ending.connect(str(server.path))
            ending.sendall(b'{"type": "leaving", "number": %d}\n' % number)
        assert server.settle(5)
        assert server.take_steering() == [{"type": "leaving", "number": number}]


@pytest.mark.parametrize(
    "line", [b'{"type": ["leaving"]}', b'{"type": {}}', b'{"type": "leaving"', b'"leaving"', b"[" * 5000, b"\xff\xfe"]
)
def test_hostile_lines_are_counted_and_change_nothing(server: ChannelServer, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as hostile:
        hostile.connect(str(server.path))
        hostile.sendall(line + b'\n{"type": "decision"}\n')
        assert server.settle(5)
        assert server.take_steering() == [{"type": "decision"}]
        assert server.errors() == {"malformed": 1}


def test_what_cannot_be_said_does_not_end_the_training(server: ChannelServer, caplog: pytest.LogCaptureFixture) -> None:
    with trainer(server) as (channel, _):
        channel.send_steering({"type": "decision", "operands": {"loss": float("nan")}})
        channel.send_steering({"type": "decision", "operands": {"loss": object()}})
        channel.send_steering({"type": "decision", "message": "x" * 70_000})
        channel.send_steering({"type": "decision"})
        soon(lambda: server._steering)
    assert server.take_steering() == [{"type": "decision"}]
    assert caplog.text.count("dropped") == 3
