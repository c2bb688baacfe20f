"""Time until an edited rule takes effect in a running training, with a real agent and the local stack."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import TypeVar

from baton.contract.jobs.job import JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from bench.harness.figures import Figure
from bench.harness.local_stack import RunningStack, clean_environment
from bench.training.contenders import ROOT

HEARTBEAT_S = 1
STEP_S = 0.05
EDITS = 20
TIMEOUT_S = 60.0
POLL_S = 0.01
QUEUE = "edits"

T = TypeVar("T")


def measure(stack: RunningStack, scratch: Path, *, rounds: int, edits: int = EDITS) -> list[Figure]:
    """Edit the rules of one training in each round, at random moments between two heartbeats."""
    chance = random.Random(1)
    applied_by_round: list[list[float]] = []
    acknowledged_by_round: list[list[float]] = []
    with _agent(stack, scratch):
        for number in range(rounds):
            applied_s, acknowledged_s = _edited(stack, scratch / f"trace-{number}.jsonl", edits, chance)
            applied_by_round.append(applied_s)
            acknowledged_by_round.append(acknowledged_s)
    details = {
        "edits in a round": edits,
        "heartbeat_interval_s": HEARTBEAT_S,
        "step_s": STEP_S,
        "all, s": [[round(one, 3) for one in each] for each in applied_by_round],
    }
    return [
        Figure(
            name="rules edited: in force in the training (p95)",
            unit="s",
            rounds=[_p95(each) for each in applied_by_round],
            baseline_name="heartbeat + 2 steps",
            baseline=[HEARTBEAT_S + 2 * STEP_S] * rounds,
            at_most=1.0,
            details=details,
        ),
        Figure(
            name="rules edited: acknowledged (p95)",
            unit="s",
            rounds=[_p95(each) for each in acknowledged_by_round],
            baseline_name="2 heartbeats + 2 steps",
            baseline=[2 * HEARTBEAT_S + 2 * STEP_S] * rounds,
        ),
    ]


def _edited(stack: RunningStack, trace: Path, edits: int, chance: random.Random) -> tuple[list[float], list[float]]:
    """Measure seconds from each edit to its effect and to its acknowledgement."""
    with stack.client("submit") as client:
        job = JobSubmit(
            command=[sys.executable, "-m", "bench.rules.edited_process"],
            queue=QUEUE,
            parameters={"steps": 1_000_000, "step_s": STEP_S, "trace": str(trace)},
            outputs=["end.json"],
            environment={"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
            policy=Policy(heartbeat_interval_s=HEARTBEAT_S, max_failures=1),
            rules=_rules(0),
        )
        job_id = client.submit(job).id
        _when(lambda: _in_force(trace).get(1), "the training with its first rules")
        applied_s, acknowledged_s = [], []
        for number in range(1, edits + 1):
            time.sleep(chance.uniform(0, HEARTBEAT_S))
            began = time.time()
            revision = client.put_rules(job_id, _rules(number)).newest
            if revision is None:
                raise RuntimeError("the job has no rules after it was given some")
            wanted = revision.revision

            def acknowledged(wanted: int = wanted) -> float | None:
                rules = client.rules(job_id).acknowledged
                done = rules is not None and rules.revision == wanted and rules.step is not None
                return time.time() if done else None

            applied_s.append(_when(lambda wanted=wanted: _in_force(trace).get(wanted), "the edit in force") - began)
            acknowledged_s.append(_when(acknowledged, "the acknowledgement") - began)
        client.put_rules(job_id, '{"rules": [{"name": "end", "when": "step >= 1", "do": "stop"}]}')
        _when(lambda: client.get_job(job_id).state is JobState.COMPLETE or None, "the end of the training")
    return applied_s, acknowledged_s


def _rules(number: int) -> str:
    return json.dumps({"rules": [{"name": f"edit-{number}", "when": f"loss > {number + 10}", "do": "save"}]})


def _in_force(trace: Path) -> dict[int, float]:
    """Read the time at which each revision took effect."""
    if not trace.exists():
        return {}
    lines = [line for line in trace.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return {record["revision"]: record["at"] for record in map(json.loads, lines)}


def _when(found: Callable[[], T | None], event: str) -> T:
    deadline = time.monotonic() + TIMEOUT_S
    while (it := found()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{event} did not come within {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    return it


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


@contextmanager
def _agent(stack: RunningStack, scratch: Path) -> Iterator[None]:
    """Run an agent that takes these jobs one after the other."""
    variables = {
        "BATON_API_URL": stack.url,
        "BATON_API_KEY": stack.keys["worker"],
        "BATON_QUEUE": QUEUE,
        "BATON_WORKSPACE": str(scratch / "workspace"),
        "BATON_GPUS": "0",
        "BATON_VRAM_GIB": "0",
        "BATON_POLL_MAX_S": "0.5",
        "BATON_POLL_MIN_S": "0.1",
    }
    with (scratch / "agent.log").open("wb") as output:
        agent = subprocess.Popen(
            [sys.executable, "-m", "gpu_client.agent"],
            env=clean_environment() | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        agent.terminate()
        try:
            agent.wait(30)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
