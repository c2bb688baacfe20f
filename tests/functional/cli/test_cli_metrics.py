"""Metrics as a table, as all points, and as a report."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from baton.contract.worker.calls import HeartbeatRequest
from baton.contract.worker.control import ControlReport, Decision
from baton.contract.worker.output import LogChunk, ReportedPoint
from tests.functional.cli.people import Baton, Labour, submit

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


def report(labour: Labour, first_point: int, steps: range, **metrics: Any) -> None:
    """Points of these steps, as the agent ships them."""
    points = [
        ReportedPoint(step=step, at=1000 + step, metrics={"loss": round(1 / step, 6), **metrics}) for step in steps
    ]
    chunk = LogChunk(first_line=0, lines=[], first_point=first_point, points=points)
    labour.client.send_logs(labour.held.id, labour.held.lease_token, chunk)


def trained(baton: Baton, labour: Labour, tmp_path: Path) -> str:
    """A job that was handed on at step 30, with a checkpoint of step 20, and has ended at step 40."""
    job = submit(baton, labour, tmp_path, name="<i>two</i> attempts", outputs=["model.bin"])
    labour.claim()
    report(labour, 0, range(1, 31), lr=0.5)
    labour.commit(20)
    decision = Decision(
        number=1,
        type="rule.fired",
        rule="slow",
        revision=1,
        step=25,
        at=1025,
        operands={"loss": 0.04},
        actions=["alert"],
    )
    control = ControlReport(rules_revision=1, commands_seq=0, decisions=[decision])
    request = HeartbeatRequest(step=25, total_steps=40, metrics={"loss": 0.04}, control=control)
    labour.client.heartbeat(labour.held.id, labour.held.lease_token, request)
    labour.release()
    labour.claim("m-2")
    report(labour, 0, range(21, 41), grad_norm="nan")
    labour.complete({"model.bin": b"x"})
    return job


def test_metrics_of_a_job(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job = trained(baton, labour, tmp_path)
    table = [line.split() for line in baton("metrics", job[:8]).ok().out.splitlines()]
    assert table[0] == ["metric", "points", "first", "last", "best", "at", "step", "not", "finite"]
    assert ["loss", "40", "1", "0.025", "0.025", "40"] in table
    assert ["lr", "20", "0.5", "0.5"] in table
    assert ["grad_norm", "20", "nan", "nan", "20"] in table

    rows = list(csv.DictReader(io.StringIO(baton("metrics", job, "--csv").ok().out)))
    assert [int(row["step"]) for row in rows] == list(range(1, 41)), "each step once"
    assert [row["epoch"] for row in rows] == ["1"] * 20 + ["2"] * 20
    assert rows[19] == {"epoch": "1", "step": "20", "at": "1020.0", "loss": "0.05", "lr": "0.5", "grad_norm": ""}
    assert rows[20]["grad_norm"] == "nan"

    every = baton("metrics", job, "--jsonl", "--all-attempts").ok().lines
    assert [one["step"] for one in every] == [*range(1, 31), *range(21, 41)]
    assert every[-1] == {"epoch": 2, "step": 40, "at": 1040.0, "metrics": {"loss": 0.025, "grad_norm": "nan"}}

    file = tmp_path / "loss.csv"
    said = baton("metrics", job, "--csv", "--metric", "lr", "--output", file).ok()
    assert said.out == ""
    assert file.read_text().splitlines()[:2] == ["epoch,step,at,lr", "1,1,1001.0,0.5"]
    assert len(file.read_text().splitlines()) == 21

    found = {one["name"]: one for one in baton("metrics", job, "--json").ok().json}
    assert (found["loss"]["points"], found["loss"]["best"], found["loss"]["best_step"]) == (40, 0.025, 40)
    assert (found["grad_norm"]["first"], found["grad_norm"]["not_finite"]) == ("nan", 20)


def test_wrong_usage(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job = submit(baton, labour, tmp_path)
    assert "has reported no metrics yet" in baton("metrics", job).ok().err
    assert baton("metrics", job, "--json").ok().json == []
    assert baton("metrics", job, "--csv").ok().out == "epoch,step,at\n"
    baton("metrics", job, "--csv", "--jsonl").failed(2, "exclude each other")
    baton("metrics", job, "--output", tmp_path / "x").failed(2, "--output requires --csv or --jsonl")
    baton("metrics", job, "--metric", "loss").failed(2, "there is no metric 'loss'")
    baton("metrics", "146683a1-cb76-4702-9fef-fcccd32594f1").failed(3, "job_not_found")
    baton("report", job, "--output", tmp_path / "no" / "report.html").failed(1, "report.html")
    baton("report", job, "--price-per-hour", "inf").failed(2, "finite")


def test_a_report(baton: Baton, labour: Labour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = trained(baton, labour, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert baton("report", job).ok().out.startswith(f"report-{job[:8]}.html: 50 points, ")
    page = (tmp_path / f"report-{job[:8]}.html").read_text()
    assert "&lt;i&gt;two&lt;/i&gt; attempts" in page
    for said in ("attempt 2", "slow", "checkpoint of step 20", "rule.fired", "<code>loss</code> = 0.04", "m-2"):
        assert said in page, said
    other = tmp_path / "other.html"
    told = baton("report", job, "--output", other, "--price-per-hour", "2", "--json").ok().json
    assert told == {"file": str(other), "size_bytes": other.stat().st_size, "points": 50}
    assert json.dumps(told)
    baton("report", job, "--output", other).ok()
