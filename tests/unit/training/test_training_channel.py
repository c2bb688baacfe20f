"""The trainer's end of the channel: outgoing and incoming messages; no agent can harm the training."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest
from listening_agent import ListeningAgent

from gpu_client.training import channel as channel_module
from gpu_client.training.channel import AgentChannel
from gpu_client.training.protocol import (
    MAX_LINE_BYTES,
    MAX_RULES_LINE_BYTES,
    TrainerDirective,
    parse_directive,
    parse_message,
)
from tests.kits.clock import Clock
from tests.kits.waiting import soon

# Newer Pythons warn about forking a process that has threads; nothing is done in the child that needs them.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


class Received:
    """Collects directives, with a wait."""

    def __init__(self) -> None:
        self.directives: list[TrainerDirective] = []
        self._changed = threading.Condition()

    def __call__(self, directive: TrainerDirective) -> None:
        with self._changed:
            self.directives.append(directive)
            self._changed.notify_all()

    def wait(self, count: int) -> list[TrainerDirective]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.directives) >= count, 60)
        return self.directives


def test_says_hello_with_pid_and_protocol() -> None:
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received())
        assert agent.wait_for("hello") == [{"type": "hello", "pid": os.getpid(), "protocol": 1, "steering": True}]
        channel.close()
        agent.wait_for_end()


def test_progress_is_throttled_newest_wins_and_the_last_step_is_always_sent() -> None:
    clock = Clock()
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received(), clock=clock)
        channel.report(1, 100, {"loss": 3.0})
        agent.wait_for("progress", 1)
        for step in range(2, 50):
            channel.report(step, 100, {"loss": 2.0})
        clock.now += 0.21
        channel.report(50, 100, {"loss": 1.0})
        agent.wait_for("progress", 2)
        channel.report(99, 100, {})
        channel.report(100, 100, {"loss": 0.5})
        agent.wait_for("progress", 3)
        channel.close()
        agent.wait_for_end()
        assert [(m["step"], m["metrics"]) for m in agent.of("progress")] == [
            (1, {"loss": 3.0}),
            (50, {"loss": 1.0}),
            (100, {"loss": 0.5}),
        ]


def test_what_comes_between_steps_is_throttled_too_also_behind_the_last_step() -> None:
    clock = Clock()
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received(), clock=clock)
        for done in range(1, 50):
            channel.report(100, 100, {}, phase=("pictures", done, 50))
        agent.wait_for("progress", 1)
        clock.now += 0.21
        channel.report(100, 100, {}, phase=("pictures", 50, 50))
        agent.wait_for("progress", 2)
        channel.close()
        agent.wait_for_end()
        assert [m["phase"]["done"] for m in agent.of("progress")] == [1, 50]


def test_what_was_held_back_is_sent_before_a_checkpoint_and_at_the_end() -> None:
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received(), clock=Clock())
        channel.report(1, 100, {})
        agent.wait_for("progress")
        channel.report(7, 100, {})
        assert channel.checkpoint_written(7, "/out/checkpoint-7", {"loss": 1.5})
        channel.report(9, 100, {})
        channel.close()
        agent.wait_for_end()
        assert [(m["type"], m.get("step")) for m in agent.messages] == [
            ("hello", None),
            ("progress", 1),
            ("progress", 7),
            ("checkpoint", 7),
            ("progress", 9),
        ]
        assert agent.of("checkpoint")[0] == {
            "type": "checkpoint",
            "step": 7,
            "path": "/out/checkpoint-7",
            "metrics": {"loss": 1.5},
        }


def test_directives_arrive_also_in_pieces_and_nonsense_between_them_is_survived(
    caplog: pytest.LogCaptureFixture,
) -> None:
    received = Received()
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, received)
        agent.send(b'{"type":"directive","dire')
        agent.wait_for("hello")
        agent.send(b'ctive":"checkpoint"}\nnot json\n[1]\n\xff\n{"type":"directive","directive":"stop"}\n')
        agent.send({"type": "weather", "rain": True})
        agent.send({"type": "directive", "directive": "dance"})
        agent.send({"type": "directive", "directive": "stop", "reason": "cancel", "checkpoint": False})
        assert received.wait(2) == [TrainerDirective("checkpoint"), TrainerDirective("stop", "cancel", False)]
        assert channel.connected
        channel.close()
    assert len([r for r in caplog.records if "malformed" in r.message]) == 4


def test_a_line_without_end_breaks_the_channel_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received())
        agent.send(b"x" * (MAX_RULES_LINE_BYTES + 1))
        soon(lambda: not channel.connected)
        channel.report(1, 2, {})
        assert channel.checkpoint_written(1, "/out/checkpoint-1", {}) is False
        channel.close()
    assert [r.levelname for r in caplog.records if "longer than" in r.message] == ["WARNING"]


def test_the_death_of_the_agent_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received())
        agent.wait_for("hello")
        agent.die()
        soon(lambda: not channel.connected)
        for step in range(1, 500):
            channel.report(step, 500, {"loss": 1.0})
            if step % 100 == 0:
                assert channel.checkpoint_written(step, f"/out/checkpoint-{step}", {}) is False
        assert channel.is_delivered(100), "nobody is left to tell: old checkpoints may go"
        channel.close()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_the_death_of_the_agent_is_warned_about_though_the_loop_ends_at_that_moment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ClosedMeanwhile(AgentChannel):
        def _wake(self) -> None:
            if not self._connected:  # the loop has seen that nobody is there, and closes before the warning is out
                self._closing = True
            super()._wake()

    with ListeningAgent() as agent:
        channel = ClosedMeanwhile(agent.path, Received())
        agent.wait_for("hello")
        agent.die()
        soon(lambda: not channel.connected)
        channel.close()
    assert [r.levelname for r in caplog.records if "is broken" in r.message] == ["WARNING"]


@pytest.mark.parametrize("path", [None, "", "/nonexistent/channel", "/" + "x" * 200])
def test_without_an_agent_everything_is_a_no_op(path: str | None) -> None:
    channel = AgentChannel(path, Received())
    channel.report(1, 1, {"loss": 1.0})
    assert channel.checkpoint_written(1, "/out/checkpoint-1", {}) is False
    assert channel.is_delivered(1)
    channel.close()
    channel.close()


def test_a_deaf_agent_blocks_neither_progress_nor_for_long_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with ListeningAgent(deaf=True) as agent:
        channel = AgentChannel(agent.path, Received(), clock=clock)
        started_s = time.monotonic()
        big = {f"metric_{index}": 0.123456789 for index in range(1000)}
        for step in range(1, 400):
            clock.now += 1
            channel.report(step, 1000, big)
        for step in range(1, 30):  # fills what the kernel buffers
            channel.checkpoint_written(step, "/out/checkpoint", big, timeout_s=0.001)
        assert channel.checkpoint_written(400, "/out/checkpoint-400", {}, timeout_s=0.02) is False
        assert not channel.is_delivered(400)
        channel.close(timeout_s=0.02)
        assert time.monotonic() - started_s < 30
        assert not channel.connected
    assert any("has not taken the message about checkpoint-400" in r.message for r in caplog.records)


def test_metrics_that_are_no_finite_numbers_are_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    channel = AgentChannel(None, Received())
    for _ in range(3):
        clean = channel.clean_metrics({"a": 1, "b": True, "nan": math.nan, "inf": -math.inf, "text": "x", "none": None})
        assert clean == {"a": 1, "b": 1}
    assert len(caplog.records) == 4


def test_numbers_beyond_all_bounds_do_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    channel = AgentChannel(None, Received())
    odd = {"huge": 10**400, "fraction": Fraction(10**400), "digits": 10**5000, "fine": 10**300}
    assert channel.clean_metrics(odd) == {"fine": 10**300}
    assert len(caplog.records) == 3


def test_metrics_too_big_for_a_line_are_dropped_but_the_step_is_sent() -> None:
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received())
        channel.report(1, 2, {"m" * 1000 + str(index): 1.0 for index in range(100)})
        assert agent.wait_for("progress") == [{"type": "progress", "step": 1, "total": 2, "metrics": {}}]
        channel.close()


def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received())
        agent.wait_for("hello")
        child = os.fork()
        if child == 0:
            channel.report(2, 2, {})
            os._exit(0 if not channel.checkpoint_written(2, "/out/checkpoint-2", {}) and not channel.connected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        channel.report(1, 1, {})
        assert [m["step"] for m in agent.wait_for("progress")] == [1]
        channel.close()


@pytest.mark.parametrize(
    ("line", "directive"),
    [
        (b'{"type":"directive","directive":"checkpoint"}', TrainerDirective("checkpoint")),
        (
            b'{"type":"directive","directive":"stop","reason":"pause","checkpoint":true}',
            TrainerDirective("stop", "pause", True),
        ),
        (
            b'{"type":"directive","directive":"stop","reason":"pause","checkpoint":false,"grace_s":90.5}',
            TrainerDirective("stop", "pause", False, 90.5),
        ),
        (b'{"type":"other"}', None),
        (b'{"type":"directive","directive":"later"}', None),
    ],
)
def test_parse(line: bytes, directive: TrainerDirective | None) -> None:
    assert parse_directive(parse_message(line)) == directive


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"3",
        b'{"type":1}',
        b'{"type":"directive","directive":"stop","reason":"","checkpoint":true}',
        b'{"type":"directive","directive":"stop","reason":"pause","checkpoint":1}',
        b'{"type":"directive","directive":"stop","reason":"pause","checkpoint":true,"grace_s":"9"}',
    ],
)
def test_parse_refuses(line: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_directive(parse_message(line))


def test_needs_no_torch() -> None:
    code = "import sys; import gpu_client.training.channel; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_deaf_agent_is_not_told_of_files_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_QUEUED_ARTIFACTS", 5)
    with ListeningAgent(deaf=True) as agent:
        channel = AgentChannel(agent.path, Received())
        for number in range(3000):
            channel.artifact_written(f"/out/{'x' * 1000}-{number}.png")
        assert len(channel._queue) <= 5
        channel.close(timeout_s=0.05)
    assert caplog.text.count("artifacts are published at the end only") == 1


def test_a_file_whose_name_is_longer_than_a_line_is_not_told_of() -> None:
    with ListeningAgent() as agent:
        channel = AgentChannel(agent.path, Received())
        channel.artifact_written("/" + "x" * MAX_LINE_BYTES)
        channel.artifact_written("/out/a.png")
        assert agent.wait_for("artifact") == [{"type": "artifact", "path": "/out/a.png"}]
        channel.close()
