"""A recipe of two steps through real processes: killed within and between them, nothing finished runs again."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.contract.jobs.job import AttemptEnd, JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from baton.contract.worker.calls import WorkQuery
from tests.kits.stack.control_plane import TRAINERS
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

STEPS = 20
DOCUMENT = """
name: {name}
version: 1
description: Two parts, the second of which goes on from what the first left.
parameters:
  steps: {{type: integer, required: true, minimum: 1}}
  step_s: {{type: number, required: true}}
  trace: {{type: string, required: true}}
  first_s: {{type: number, default: 0}}
steps:
  - name: first
    run: [python, {script}, first]
    checkpoints: session
    outputs: [{{path: first.bin, min_bytes: 64}}]
  - name: left-out
    when: parameters.first_s > 0
    run: ["false"]
  - name: second
    run: [python, {script}, second, first]
    checkpoints: session
outputs:
  - path: first.bin
  - path: second.bin
cleanup:
  - run: [python, -c, "open({trace!r} + '.clean', 'a').write('clean ')"]
"""


def part(name: str, before: str = "") -> str:
    digest = hashlib.sha256(before.encode()).hexdigest()
    for step in range(1, STEPS + 1):
        digest = hashlib.sha256(f"{digest}{name}{step}".encode()).hexdigest()
    return digest


def submitted(shop: Workshop, step_s: float, environment: Mapping[str, str]) -> tuple[str, Path]:
    """The job, and the file in which its steps tell of themselves."""
    trace = shop.tmp_path / "trace.txt"
    name = f"relay-{uuid.uuid4().hex[:8]}"
    document = DOCUMENT.format(name=name, script=TRAINERS / "relay.py", trace=str(trace))
    shop.stack.client.push_recipe(document)
    job = shop.stack.client.submit(
        JobSubmit(
            recipe=f"{name}@1",
            parameters={"steps": STEPS, "step_s": step_s, "trace": str(trace)},
            queue=shop.queue,
            environment=dict(environment),
            policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0, stop_grace_s=20),
        )
    )
    return job.id, trace


def lines(trace: Path) -> list[str]:
    return trace.read_text().splitlines() if trace.exists() else []


def lose_agent(shop: Workshop, job_id: str) -> None:
    """Kill the one agent at work."""
    shop.lose(shop.agents[-1], job_id)
    until(lambda: not shop.trainers(), what="the end of the trainer")


def test_a_recipe_of_two_steps_is_killed_within_and_between_them(shop: Workshop) -> None:
    stack = shop.stack
    gate = shop.gate(10)
    job_id, trace = submitted(shop, 0.1, gate.environment)

    shop.agent("w1")
    stack.wait_for_commit(job_id, 5)
    lose_agent(shop, job_id)
    assert lines(trace) == ["first from 0"]

    gate.set(STEPS + 2 + 1)  # behind the second part's first; the part that is left out counts, too
    shop.agent("w2")
    # A commit beyond the first step's own checkpoints records that the first step is finished.
    recorded = stack.wait_for_commit(job_id, STEPS + 1)
    lose_agent(shop, job_id)
    assert recorded == STEPS + 1
    told = lines(trace)
    assert told[1] in {f"first from {step}" for step in (5, 10)}
    assert told[2] == "first done" and told[3:] in ([], ["second from 0"])

    gate.set(STEPS + 2 + 10)
    shop.agent("w3")
    stack.wait_for_commit(job_id, STEPS + 2 + 5)
    lose_agent(shop, job_id)
    gate.open()
    shop.agent("w4")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.COMPLETE, job.reason

    told = lines(trace)
    assert told.count("first done") == 1 and not [line for line in told[3:] if line.startswith("first")]
    assert told[-2] in {f"second from {step}" for step in (5, 10)} and told[-1] == "second done"
    first = part("first")
    assert stack.artifact(job_id, "first.bin").decode() == first
    assert stack.artifact(job_id, "second.bin").decode() == part("second", first)
    attempts = stack.attempts(job_id)
    assert [attempt.end for attempt in attempts[:3]] == [AttemptEnd.INTERRUPTED] * 3
    assert attempts[-1].end is AttemptEnd.COMPLETE
    steps = stack.steps(job_id)
    assert steps == sorted(set(steps)), "numbered through"
    assert job.progress is not None and job.progress.step == STEPS + 2 + STEPS
    assert Path(f"{trace}.clean").read_text() == "clean ", "once: a machine that is lost cleans nothing up"


def test_a_worker_that_knows_no_plans_is_given_none(shop: Workshop) -> None:
    job_id, _ = submitted(shop, 0, {})
    client = shop.stack.client
    assert client.claim(WorkQuery(queue=shop.queue)) is None
    assert shop.stack.job(job_id).state is JobState.PENDING
    item = client.claim(WorkQuery(queue=shop.queue, runs_plans=True))
    assert item is not None and item.plan is not None
    assert [order.name for order in item.plan.steps] == ["first", "second"]
    assert item.plan.steps[0].command == ["python", str(TRAINERS / "relay.py"), "first"]
