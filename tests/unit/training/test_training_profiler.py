"""The action `profile`: steps under torch's profiler."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from listening_agent import ListeningAgent

from baton import Session
from gpu_client.training.session import profiler
from gpu_client.training.session.profiler import StepProfiler

PROFILE = "rules: [{name: slow, when: loss > 2, do: {profile: 3}}]"


class Trained:
    """Steps of a session under rules, and what was decided."""

    def __init__(self, tmp_path: Path, rules: str = PROFILE, *, high: tuple[int, ...] = (4,), steps: int = 12) -> None:
        (tmp_path / "control.json").write_text(json.dumps({"rules": {"revision": 1, "text": rules}}))
        self.output = tmp_path / "output"
        self.traced: list[int] = []
        with ListeningAgent() as agent:
            variables = {
                "BATON_CHANNEL": agent.path,
                "BATON_JOB_ID": "j",
                "BATON_CONTROL": str(tmp_path / "control.json"),
            }
            with Session.start(output_dir=self.output, variables=variables) as session:
                weight = torch.ones(50, 50, requires_grad=True)
                for step in range(1, steps + 1):
                    profiler = session.steering._capabilities.profiler
                    assert profiler is not None
                    if profiler.active:
                        self.traced.append(step)
                    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
                    for _ in range(2):  # as a Trainer does, which logs behind the step
                        session.report(step, steps, loss=3.0 if step in high else 1.0)
            agent.wait_for_end()
            self.shown = [Path(one["path"]) for one in agent.of("artifact")]
            self.said = [
                (one["decision"], one["step"], one["message"])
                for one in agent.of("decision")
                if one["decision"].startswith("action.")
            ]


def test_the_next_steps_are_traced_and_the_trace_is_shown(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    (trace,) = trained.shown
    assert trace == trained.output / "profile" / "step-000005-000007.json.gz" and trained.traced == [5, 6, 7]
    names = [event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("aten::mm") >= 3 * 3, "one forward, two backward"
    (begun, ended) = trained.said
    assert begun == ("action.applied", 4, "steps 5 to 7 are profiled")
    assert ended[:2] == ("action.applied", 7) and "step-000005-000007.json.gz" in ended[2]


def test_one_at_a_time(tmp_path: Path) -> None:
    rules = "rules: [{name: a, when: loss > 2, do: {profile: 3}}, {name: b, when: loss > 2, do: {profile: 5}}]"
    trained = Trained(tmp_path, rules)
    assert [kind for kind, _, _ in trained.said] == ["action.applied", "action.rejected", "action.applied"]
    assert "under way, until step 7" in trained.said[1][2]


def test_one_that_the_end_cuts_short_is_dropped(tmp_path: Path) -> None:
    trained = Trained(tmp_path, high=(11,))
    assert trained.traced == [12] and trained.shown == [] and not list((trained.output / "profile").iterdir())
    assert trained.said[1:] == [("action.failed", 12, "the training ended before step 14: the profile is dropped")]


def test_where_torch_has_no_profiler_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(profiler.importlib, "import_module", missing)
    ((kind, step, said),) = Trained(tmp_path).said
    assert (kind, step) == ("action.rejected", 4) and "no torch.profiler" in said


def test_where_the_trace_cannot_lie_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "profile").write_text("in the way")
    ((kind, _, said),) = Trained(tmp_path).said
    assert kind == "action.failed" and "FileExistsError" in said


def test_a_trace_that_is_too_large_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MAX_TRACE_BYTES", 10)
    trained = Trained(tmp_path)
    assert trained.said[1][0] == "action.failed" and "at most 10" in trained.said[1][2]
    assert trained.shown == [] and not list((trained.output / "profile").iterdir())


@pytest.mark.parametrize("where", ["start", "step", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    module = importlib.import_module("torch.profiler")
    original = getattr(module.profile, where)

    def broken(profile: Any, *_: Any) -> None:
        if where == "stop":
            original(profile)
        raise RuntimeError("CUPTI is busy")

    monkeypatch.setattr(module.profile, where, broken)
    trained = Trained(tmp_path)
    assert trained.said[-1][0] == "action.failed" and "CUPTI is busy" in trained.said[-1][2]
    monkeypatch.undo()
    with module.profile():  # fails while another one is under way
        pass


def test_other_processes_leave_it_to_the_first(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, lambda path: None, first=False)
    assert profiler.begin(3, 1, lambda well, said: None) == "the first process profiles" and not profiler.active
    profiler.stepped(2)
    profiler.close()
