"""Test the liveness file: an agent that waits never counts as stuck; a stuck agent does."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.jobs.job import FailureClass
from baton.contract.worker.calls import HeartbeatRequest, WorkItem, WorkQuery
from gpu_client.agent import health
from gpu_client.agent.app.worker_loop import CLAIM_BUDGET_S, EXIT_DONE
from gpu_client.agent.attempt.lease import MAX_INTERVAL_S, LeaseKeeper
from gpu_client.agent.health import SLACK_S, VARIABLE, LivenessFile, find_problem
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import Heart, make_answer, make_item
from tests.unit.agent.test_worker_loop import Client, Desk, Stop


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "health"


def problem(path: Path, clock: Clock) -> str | None:
    return find_problem({VARIABLE: str(path)}, clock())


def test_it_lives_until_the_promised_time_and_some_more(path: Path) -> None:
    clock = Clock()
    with LivenessFile(path, clock=clock) as pulse:
        pulse.beat(30)
        clock.now += 30 + SLACK_S
        assert problem(path, clock) is None
        clock.now += 5
        assert problem(path, clock) == f"BATON_HEALTH_FILE={path}: the agent is silent for 5 s longer than announced"
        pulse.beat(1)
        assert problem(path, clock) is None
    pulse.beat(1)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_said_where_no_agent_has_been(path: Path) -> None:
    assert find_problem({}, 0) == "BATON_HEALTH_FILE: is not set; name the file that the agent updates"
    for content in (None, "", "soon", "\u00fc"):
        if content is not None:
            path.write_text(content)
        said = find_problem({VARIABLE: str(path)}, 0)
        assert said is not None and said.startswith(f"BATON_HEALTH_FILE={path}: no agent has written the file (")


def test_the_program_exits_with_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(path))
    assert health.main() == 1
    assert capsys.readouterr().err.count("\n") == 1
    with LivenessFile(path) as pulse:
        pulse.beat(1)
    assert health.main() == 0
    assert capsys.readouterr().err == ""


def test_a_beat_needs_no_more_room_than_the_one_before(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(0.0)
    with LivenessFile(path, clock=clock) as pulse:
        pulse.beat(0)
        size = path.stat().st_size
        clock.now = 4e9
        pulse.beat(1e6)
        assert path.stat().st_size == size

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with caplog.at_level(logging.WARNING):
            pulse.beat(1)
    assert "cannot be written" in caplog.text
    assert problem(path, clock) is None, "what was promised before still holds"


def test_without_a_file_nothing_is_kept() -> None:
    with LivenessFile(None) as pulse:
        pulse.beat(1)


class Watched(Stop):
    """Reads the liveness file at the end of every pause, as a health check might."""

    def __init__(self, clock: Clock, path: Path) -> None:
        super().__init__(clock)
        self.path = path

    def wait(self, timeout_s: float | None = None) -> bool:
        over = super().wait(timeout_s)
        assert problem(self.path, self.clock_of_test) is None, f"ill after {timeout_s} s"
        return over


@pytest.fixture
def desk(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(tmp_path, monkeypatch)
    desk.stop = Watched(desk.clock, path)
    yield desk
    desk.workspace.close()


def test_an_agent_that_finds_no_work_or_fails_one_job_after_another_is_well(desk: Desk, path: Path) -> None:
    desk.failures.extend([FailureClass.NODE_FAULT] * 8)
    desk.client.answers.extend([*[None] * 10, *(make_item() for _ in desk.failures)])
    desk.stop.end_after = 30
    agent = desk.agent(poll_max_s=300)
    with LivenessFile(path, clock=desk.clock) as pulse:
        agent._liveness = pulse
        assert agent.run() == EXIT_DONE
    assert max(desk.stop.pauses) == 600


def test_an_agent_that_is_stuck_in_a_claim_is_found(desk: Desk, path: Path) -> None:
    found: list[str | None] = []

    class Stuck(Client):
        def claim(self, query: WorkQuery) -> WorkItem | None:
            for pause_s in (CLAIM_BUDGET_S, 30 + SLACK_S + 1):
                desk.clock.now += pause_s
                found.append(problem(path, desk.clock))
            desk.stop.request("the test is over")
            return None

    desk.client = Stuck()
    desk.stop = Stop(desk.clock)
    agent = desk.agent(poll_max_s=30)
    with LivenessFile(path, clock=desk.clock) as pulse:
        agent._liveness = pulse
        agent.run()
    assert found[0] is None
    assert found[1] is not None and "is silent" in found[1]


@pytest.mark.parametrize("interval_s", [1, 30, 3600, 10**6])
def test_during_a_job_the_heartbeats_say_when_the_next_one_is_over(interval_s: int) -> None:
    heard: list[float] = []
    beaten = threading.Event()

    def on_pause(within_s: float) -> None:
        heard.append(within_s)
        beaten.set()

    keeper = LeaseKeeper(
        make_item(heartbeat_interval_s=interval_s),
        Heart(make_answer(heartbeat_interval_s=interval_s)),
        HeartbeatRequest,
        on_directive=lambda *_: None,
        on_lost=lambda *_: None,
        on_pause=on_pause,
        claimed_at=time.monotonic(),
    )
    keeper.start()
    assert beaten.wait(20)
    keeper.close()
    kept_s = min(interval_s, MAX_INTERVAL_S)
    assert 1.9 * kept_s <= heard[0] <= 2 * kept_s, "the pause, and a heartbeat that is not answered"
