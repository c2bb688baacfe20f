"""Back-tests on the recorded metrics of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.contract.worker.calls import WorkQuery
from baton.contract.worker.output import LogChunk
from tests.functional.cli.people import Baton, Labour, submit

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

RULES = """
rules:
- {name: high, when: loss > 3, for: 2 checks, do: {stop: failed}}
- {name: broken, when: not isfinite(grad_norm), mode: dry_run, do: stop}
- {name: dear, when: cost > 1, do: stop}
"""


def reported(labour: Labour, first: int, *points: tuple[int, float, dict[str, Any]]) -> None:
    """Points of the held job, from number `first` of its attempt on; times count from the claim."""
    told = [{"step": step, "at": at, "metrics": metrics} for step, at, metrics in points]
    chunk = LogChunk(first_line=0, lines=[], first_point=first, points=told)
    labour.client.send_logs(labour.held.id, labour.held.lease_token, chunk)


def claim_with_gpus(labour: Labour) -> None:
    labour.item = labour.client.claim(WorkQuery(queue=labour.queue, machine_id="m-1", gpus=2))


def test_a_job_s_attempts_are_one_history(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    job = submit(baton, labour, tmp_path, requirements={"min_gpus": 2}, policy={"max_failures": 1})
    baton("rules", "backtest", rules, "--job", job).failed(2, "has no history of metrics", "baton metrics ID")

    claim_with_gpus(labour)
    began = baton("show", job, "--json").ok().json["started_at"]
    reported(labour, 0, (10, began + 0.0, {"loss": 2.0, "grad_norm": 1.0}), (20, began + 0.25, {"loss": 4.0}))
    labour.commit(10)
    labour.release()
    claim_with_gpus(labour)
    # from the checkpoint of step 10 on: the first attempt's step 20 is void
    reported(labour, 0, (20, began + 0.5, {"loss": 2.5, "grad_norm": "nan"}), (30, began + 0.75, {"loss": 3.5}))
    reported(labour, 2, (40, began + 1.0, {"loss": 3.6}), (50, began + 1.25, {"loss": 1.5}))
    said = baton("rules", "backtest", rules, "--job", job[:8], "--json").ok().json["runs"][0]
    assert (said["rows"], said["gpus"], said["failed"], said["goal"]["metric"]) == (5, 2, False, "loss")
    found = {one["rule"]: one for one in said["rules"]}
    assert (found["high"]["first_step"], found["high"]["use"]) == (40, "wrongly")
    assert found["high"]["best_later"] == {"value": 1.5, "step": 50}
    assert (found["broken"]["first_step"], found["broken"]["operands"]) == (20, {"grad_norm": "nan"})
    assert found["dear"]["tried"] is False and said["ended_by"] == "high"

    labour.fail("gone wrong")
    shown = baton("rules", "backtest", rules, "--job", job, "--job", job).ok().out
    assert "saved: the run failed." in shown
    assert shown.splitlines()[-1].startswith("2 runs, 2 ended earlier, 0 of them wrongly:")
    baton("rules", "backtest", rules, "--job", "ffffffff").failed(2, "no job id begins with")


def test_what_metrics_writes_backtest_reads(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    job = submit(baton, labour, tmp_path)
    labour.claim()
    began = baton("show", job, "--json").ok().json["started_at"]
    reported(
        labour, 0, *((step, began + step / 100, {"loss": step / 10, "grad_norm": "inf"}) for step in range(10, 60, 5))
    )
    runs = [baton("rules", "backtest", rules, "--job", job, "--json").ok().json["runs"][0]]
    for option in ("--csv", "--jsonl"):
        file = tmp_path / f"run.{option.removeprefix('--')}"
        baton("metrics", job, option, "--output", file).ok()
        runs.append(baton("rules", "backtest", rules, option, file, "--json").ok().json["runs"][0])
    plain = [[(one["rule"], one["first_step"], one["fires"], one["operands"]) for one in run["rules"]] for run in runs]
    assert plain[0] == plain[1] == plain[2]
    assert plain[0][0][:2] == ("high", 40)
