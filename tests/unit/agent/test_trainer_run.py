"""Test how a trainer is asked to leave, with a recording trainer and channel."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gpu_client.agent.app.shutdown import ShutdownRequest
from gpu_client.agent.attempt.checkpoint_scheduler import CheckpointScheduler
from gpu_client.agent.attempt.trainer_run import TrainerRun
from gpu_client.agent.control.channel_messages import CheckpointNotice, TrainingProgress
from gpu_client.agent.control.channel_server import StopReason
from gpu_client.agent.process.failures import ExitStatus
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import make_item
from tests.unit.agent.test_checkpoint_scheduler import committed

CLEAN = ExitStatus(code=0, signal=None, oom_suspected=False, stopped_by_us=False)


class Trainer:
    """Ends when told to, or when a test demands it."""

    def __init__(self) -> None:
        self.status: ExitStatus | None = None
        self.graces_s: list[float] = []

    def poll(self) -> ExitStatus | None:
        return self.status

    def stop(self, grace_s: float) -> ExitStatus:
        self.graces_s.append(grace_s)
        self.status = self.status or ExitStatus(code=None, signal=15, oom_suspected=False, stopped_by_us=True)
        return self.status


class Channel:
    """Session that ends as soon as it is asked to leave."""

    def __init__(self, trainer: Trainer, connected: int = 1) -> None:
        self._trainer = trainer
        self._connected = connected
        self.at: TrainingProgress | None = TrainingProgress(7, 10, {})
        self.notices: list[CheckpointNotice] = []
        self.asked: list[Any] = []

    def wait(self, timeout_s: float) -> bool:
        return False

    def progress(self) -> TrainingProgress | None:
        return self.at

    def advanced_at(self) -> float | None:
        return None

    def take_checkpoints(self) -> list[CheckpointNotice]:
        taken, self.notices = self.notices, []
        return taken

    def request_checkpoint(self) -> int:
        self.asked.append("checkpoint")
        return self._connected

    def request_stop(self, reason: StopReason, checkpoint: bool, grace_s: float | None = None) -> int:
        self.asked.append((reason, checkpoint))
        self.grace_s = grace_s
        if self._connected:
            self._trainer.status = CLEAN
        return self._connected


class Scene:
    """World of one run."""

    def __init__(self, *, connected: int = 1, **fields: Any) -> None:
        self.clock = Clock()
        self.stop = ShutdownRequest(self.clock)
        self.trainer = Trainer()
        self.channel = Channel(self.trainer, connected)
        item = make_item(**fields)
        self.pace = CheckpointScheduler(item, self.clock)
        self.gathered: list[bool] = []
        self.run = TrainerRun(
            item,
            self.trainer,  # type: ignore[arg-type]
            self.channel,  # type: ignore[arg-type]
            scheduler=self.pace,
            stop=self.stop,
            lease_lost=threading.Event(),
            canceled=lambda: False,
            stop_reason=lambda: "release" if self.stop.is_set() else None,
            collect=self._gather,
        )

    def _gather(self, news: bool) -> None:
        self.gathered.append(news)
        if len(self.gathered) > 2 and not self.stop.is_set():
            self.trainer.status = CLEAN


def test_there_is_time_for_a_last_checkpoint() -> None:
    scene = Scene(stop_grace_s=30)
    scene.pace.record_commit(committed(5, 10.0))
    scene.stop.announce("spot notice", 119)
    assert scene.run.run().status is CLEAN
    assert scene.channel.asked == [("release", True)]
    assert scene.channel.grace_s == 30
    assert (scene.run.asked_to_leave, scene.run.last_checkpoint_skipped) == (True, "")


def test_there_is_none() -> None:
    scene = Scene(stop_grace_s=30)
    scene.pace.record_commit(committed(5, 100.0))
    scene.stop.announce("spot notice", 119)
    scene.run.run()
    assert scene.channel.asked == [("release", False)]
    assert scene.run.last_checkpoint_skipped == "a checkpoint takes about 130 s, and 119 s are left"


def test_without_a_known_end_a_last_checkpoint_is_always_tried() -> None:
    scene = Scene()
    scene.pace.record_commit(committed(5, 1000.0))
    scene.stop.request("SIGTERM")
    scene.run.run()
    assert scene.channel.asked == [("release", True)]


def test_a_script_without_a_session_gets_what_storing_leaves_of_the_grace() -> None:
    scene = Scene(connected=0, stop_grace_s=60)
    scene.pace.record_commit(committed(5, 20.0))
    scene.stop.announce("spot notice", 40)
    scene.run.run()
    assert scene.trainer.graces_s == [pytest.approx(40 - 26, abs=0.5)]
    assert not scene.run.asked_to_leave


def test_a_checkpoint_is_asked_for_when_it_is_due() -> None:
    scene = Scene(checkpoint_every=60)
    scene.pace.record_step(6)
    scene.clock.now += 60
    scene.run.run()
    assert scene.channel.asked == ["checkpoint"], "once"


def test_nobody_to_ask_is_no_question() -> None:
    scene = Scene(checkpoint_every=60, connected=0)
    scene.pace.record_step(6)
    scene.clock.now += 60
    scene.run.run()
    assert scene.channel.asked == ["checkpoint"] * 3


def test_stalls_and_progress_are_heard() -> None:
    scene = Scene()
    scene.channel.notices = [CheckpointNotice(7, None, {}, 0.25)]  # type: ignore[arg-type]
    scene.run.run()
    assert scene.gathered == [True, False, False]
    assert scene.pace.last_step == 7
    assert scene.pace.last_checkpoint_problem(0.0) == "", "a stall alone says nothing of storing"
