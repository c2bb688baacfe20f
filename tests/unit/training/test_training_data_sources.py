"""A loader with a data source: its metrics are reported, and it learns which checkpoints are safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from listening_agent import ListeningAgent
from session_helpers import Counter

from baton import Session
from gpu_client.training import channel


class Source(Counter):
    """Batches that are `value` seconds old."""

    def __init__(self) -> None:
        super().__init__()
        self.safe: list[Mapping[str, int]] = []
        self.waited_s = 0.0

    def data_metrics(self) -> dict[str, float]:
        return {"data.age": float(self.value), "data.reuse": 2.0} if self.value else {}

    def checkpointed(self, state: Mapping[str, int]) -> None:
        self.safe.append(state)


def test_what_it_measures_goes_out_with_each_report_and_the_script_s_own_is_preferred(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROGRESS_INTERVAL_S", 0.0)
    with ListeningAgent() as agent:
        session, source = start(agent), Source()
        session.resume(batches=source)
        session.report(0, 10, loss=3.0)
        agent.wait_for("progress", 1)
        source.value = 7
        session.report(1, 10, loss=1.0)
        agent.wait_for("progress", 2)
        session.report(2, 10, **{"loss": 0.5, "data.age": 1.0})
        told = [one["metrics"] for one in agent.wait_for("progress", 3)]
        assert told == [
            {"loss": 3.0},
            {"data.age": 7.0, "data.reuse": 2.0, "loss": 1.0},
            {"data.age": 1.0, "data.reuse": 2.0, "loss": 0.5},
        ]
        session.checkpoint(3, {"loss": 0.1}, batches=source)


def test_rules_read_it(start: Callable[..., Session], tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{name: old, when: data.age > 10s and data.reuse >= 2, do: stop}]")
    with Session.start(output_dir=tmp_path / "alone", rules=rules, variables={}) as session:
        source = Source()
        session.resume(batches=source)
        for step in (1, 2):
            source.value = 4 * step
            session.report(step, 10)
            assert not session.should_stop
        source.value = 11
        session.report(3, 10)
        assert session.should_stop and session.finishing


def test_an_end_that_nobody_knows_is_told_as_such(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ListeningAgent() as agent:
        session = start(agent)
        monkeypatch.setattr(channel, "PROGRESS_INTERVAL_S", 3600.0)
        session.report(1, 0, loss=1.0)
        agent.wait_for("progress", 1)
        session.report(2, 0, loss=1.0)
        session.close()
        assert [(one["step"], one["total"]) for one in agent.wait_for("progress", 2)] == [(1, None), (2, None)]


@pytest.mark.parametrize("keep_last", [1, 3])
def test_it_keeps_what_the_newest_checkpoints_need(start: Callable[..., Session], keep_last: int) -> None:
    session, source = start(keep_last=keep_last), Source()
    session.resume(batches=source, other=Counter())
    kept = max(keep_last, 2)
    for step in range(1, 7):
        source.value = step
        session.checkpoint(step, batches=source, other=Counter(step))
        assert source.safe[-1] == {"value": max(step - kept + 1, 0)}


def test_resumed_it_keeps_what_the_checkpoint_needs_that_it_was_resumed_from(start: Callable[..., Session]) -> None:
    session, source = start(), Source()
    session.resume(batches=source)
    source.value = 5
    session.checkpoint(5, batches=source)
    session.close()
    session, source = start(resume=True), Source()
    assert session.resume(batches=source) == 5
    safe: list[Any] = []
    for value in (6, 7, 8):
        source.value = value
        session.checkpoint(value, batches=source)
        safe.append(source.safe[-1]["value"])
    assert safe == [5, 6, 7], "the newest may not be stored yet"
