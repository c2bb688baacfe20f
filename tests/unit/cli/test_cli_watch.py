"""`baton watch` on a terminal."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from baton.contract.jobs.job import JobState
from gpu_client.cli.core.session import CliSession
from gpu_client.cli.jobs.summary import JobSummary, summarize
from gpu_client.cli.jobs.watch import display
from tests.unit.cli.cli_kit import NOW, a_job, an_attempt


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(state: JobState, attempts: int, step: int | None = None, machine_id: str | None = None) -> JobSummary:
    progress: dict[str, Any] | None = None
    if step is not None:
        progress = {"step": step, "total_steps": 2000, "metrics": {"loss": 0.3}, "reported_at": NOW}
    job = a_job(
        state,
        counters={"attempts": attempts, "runtime_s": 5000, "interruptions": 3},
        progress=progress,
        machine_id=machine_id,
        lease_expires_at=NOW,
    )
    live = state is JobState.RUNNING
    return summarize(job, an_attempt(attempts, started_at=NOW - 900, progress=progress) if live else None, 12.5)


def test_into_a_pipe_no_line_is_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    running = seen(JobState.RUNNING, 1, 150, "gpu-1")
    committed = replace(running, checkpoint_step=150)
    for as_json, lines in ((False, 1), (True, 2)):
        with display(CliSession(environ={}), as_json) as show:
            for summary in (running, running, committed, committed):
                show(summary)
        said = capsys.readouterr()
        assert len((said.out if as_json else said.err).splitlines()) == lines


def test_every_move_stays_on_the_screen_and_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    looks = [
        seen(JobState.PENDING, 0),
        seen(JobState.RUNNING, 1, None, "gpu-1"),
        seen(JobState.RUNNING, 1, 150, "gpu-1"),
        seen(JobState.RUNNING, 1, 200, "gpu-1"),
        seen(JobState.PENDING, 1, 200),
        seen(JobState.RUNNING, 2, 1200, "gpu-2"),
    ]
    with display(CliSession(environ={}), False) as show:
        for summary in looks:
            show(summary)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).replace("\r", "\n")
    lines = [line.rstrip() for line in text.split("\n")]
    moves = [line for line in lines if re.match("pending|attempt", line)]
    moved = [line.partition(",")[0] for line in dict.fromkeys(moves)]
    assert moved == ["pending", "attempt 1 on gpu-1: running", "pending", "attempt 2 on gpu-2: running"]
    bar = next(line for line in reversed(lines) if "━" in line)
    assert "60%" in bar
    assert "step 1,200/2,000 (60%)" in text
    assert "cost" in text
    assert max(len(line) for line in lines if line not in moves) <= 80
