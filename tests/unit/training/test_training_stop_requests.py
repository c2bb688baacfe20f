"""Requests of the agent or a signal to the loop, and the step at which the loop sees each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from listening_agent import ListeningAgent
from session_helpers import Counter, names

from baton import Session, SessionError
from tests.kits.waiting import soon

# Newer Pythons warn about forking a process that has threads; nothing is done in the child that needs them.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def test_a_checkpoint_directive_makes_one_due_once(start: Callable[..., Session]) -> None:
    with ListeningAgent() as agent:
        session = start(agent)
        assert not session.checkpoint_due(1)
        agent.send({"type": "directive", "directive": "checkpoint"})
        soon(lambda: session.checkpoint_due(2))
        session.checkpoint(2, counter=Counter())
        assert not session.checkpoint_due(3, every=50)
        assert not session.should_stop


def test_the_interval(start: Callable[..., Session]) -> None:
    session = start()
    assert [step for step in range(1, 11) if session.checkpoint_due(step, every=4)] == [4, 8]
    assert not session.checkpoint_due(4)
    with pytest.raises(SessionError, match="every 0 steps"):
        session.checkpoint_due(1, every=0)


def test_a_stop_with_checkpoint_is_shown_when_the_checkpoint_is_due(start: Callable[..., Session]) -> None:
    with ListeningAgent() as agent:
        session = start(agent)
        assert not session.checkpoint_due(1, every=50)
        agent.send({"type": "directive", "directive": "stop", "reason": "release", "checkpoint": True})
        soon(lambda: session._loop_requests._stop is not None)
        assert not session.should_stop, (
            "this step's checkpoint_due had not seen it: the loop would leave without saving"
        )
        assert session.checkpoint_due(2, every=50)
        session.checkpoint(2, counter=Counter())
        assert session.should_stop and session.stop_reason == "release"
        assert not session.checkpoint_due(3), "one is enough"


@pytest.mark.parametrize("reason", ["cancel", "lease_lost"])
def test_a_stop_without_checkpoint_is_shown_at_once_and_suppresses_the_interval(
    start: Callable[..., Session], reason: str
) -> None:
    with ListeningAgent() as agent:
        session = start(agent)
        session.checkpoint_due(1)
        agent.send({"type": "directive", "directive": "stop", "reason": reason, "checkpoint": False})
        soon(lambda: session.should_stop)
        assert session.stop_reason == reason
        assert not session.checkpoint_due(50, every=50)
        agent.send({"type": "directive", "directive": "stop", "reason": "release", "checkpoint": True})
        soon(lambda: session.stop_reason == "release")
        assert not session.checkpoint_due(51), "what has been forbidden stays so"


def test_scripts_that_never_ask_for_checkpoints_stop_at_once(start: Callable[..., Session]) -> None:
    with ListeningAgent() as agent:
        session = start(agent)
        agent.send({"type": "directive", "directive": "stop", "reason": "pause", "checkpoint": True})
        soon(lambda: session.should_stop)
        assert session.stop_reason == "pause"


def test_sigterm_is_a_stop_with_checkpoint_and_is_given_back(start: Callable[..., Session]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    session = start()
    assert not session.checkpoint_due(1, every=50)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # patience is the sender's business
    assert session.checkpoint_due(2, every=50)
    assert session.should_stop and session.stop_reason == "signal"
    session.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_existing_handler_is_called_too(start: Callable[..., Session]) -> None:
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        session = start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert called == [signal.SIGTERM] and session.should_stop
        session.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_sigterm_and_other_threads_are_respected(start: Callable[..., Session]) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        start()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


def test_children_and_canceled_loops_die_of_sigterm(start: Callable[..., Session]) -> None:
    start()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    child = os.fork()
    if child == 0:
        with ListeningAgent() as agent:
            session = start(agent)
            agent.send({"type": "directive", "directive": "stop", "reason": "cancel", "checkpoint": False})
            soon(lambda: session.should_stop)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_the_agents_death_does_not_disturb_training(start: Callable[..., Session]) -> None:
    with ListeningAgent() as agent:
        session = start(agent, keep_last=1)
        agent.wait_for("hello")
        agent.die()
        for step in range(1, 30):
            session.report(step, 30, loss=1.0)
            if session.checkpoint_due(step, every=10):
                session.checkpoint(step, counter=Counter(step))
        assert names(session) == ["checkpoint-20"]
        assert not session.should_stop
