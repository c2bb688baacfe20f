"""Measurements that accompany reports: times of steps, waits for data, values that are not finite."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from listening_agent import ListeningAgent
from torch.utils.data import Dataset

from baton import BatchSampler, ResumableLoader, Session
from gpu_client.training import channel


class Slow(Dataset[int]):
    """A dataset that takes two milliseconds for each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index


@pytest.mark.parametrize("timed", [False, True])
def test_a_resumable_loader_is_measured_once_whether_it_is_timed_or_not(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, timed: bool
) -> None:
    monkeypatch.setattr(channel, "PROGRESS_INTERVAL_S", 0.0)
    with ListeningAgent() as agent:
        session = start(agent)
        loader = ResumableLoader(Slow(), BatchSampler(8, 4))
        session.resume(batches=loader)
        batches = iter(session.steering.timed(loader) if timed else loader)
        for step in range(1, 4):
            next(batches)
            session.report(step, 100, loss=1.0)
            agent.wait_for("progress", step)
        waited = loader.waited_s
        told = [one.get("signals", {}) for one in agent.of("progress")]
    assert told[0] == {}, "there is no step before it"
    assert 0.008 <= told[1]["data.wait"] <= told[1]["step.time"]
    assert told[2]["data.wait"] >= 0.008 and sum(one["data.wait"] for one in told[1:]) < waited


def test_a_loop_whose_data_nobody_measures_says_nothing_of_them(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROGRESS_INTERVAL_S", 0.0)
    with ListeningAgent() as agent:
        session = start(agent)
        session.resume(batches=BatchSampler(8, 4))
        for step in (1, 2):
            session.report(step, 100, loss=1.0)
            agent.wait_for("progress", step)
        assert set(agent.of("progress")[1]["signals"]) == {"step.time"}


class Read:
    """A tensor that counts how often it is read."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def item(self) -> float:
        self.reads += 1
        return self.value


def test_what_is_not_finite_is_said_in_words_and_read_once(start: Callable[..., Session]) -> None:
    with ListeningAgent() as agent:
        session = start(agent)
        metrics: dict[str, Any] = {"loss": Read(float("nan")), "norm": Read(float("-inf")), "lr": Read(0.5)}
        session.report(1, 100, **metrics)
        [told] = agent.wait_for("progress")
        session.report(2, 100, **metrics)
        assert told["metrics"] == {"lr": 0.5} and told["nonfinite"] == {"loss": "nan", "norm": "-inf"}
        assert [one.reads for one in metrics.values()] == [1, 1, 1], "within the pause between reports nothing is read"


@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_knows_when_another_library_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The greatest age of all counts: the others said the time since they began."""
    monkeypatch.setenv("RANK", str(rank))
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "BATON_OUTPUT_DIR": str(tmp_path)}
    session = Session.start(variables=variables)
    saved: list[int] = []
    monkeypatch.setattr(session.steering.signals, "checkpoint_saved", lambda: saved.append(1))
    (tmp_path / "checkpoint-3").mkdir()
    session.mark_complete(3)
    assert saved == [1]
    session.close()
