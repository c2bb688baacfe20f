"""Rules and live commands on a training in real processes: rolled back, steered, killed, ended by a rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.job import AttemptEnd, FailureClass, JobState
from baton.contract.worker.control import CommandRequest
from tests.kits.files.directories import json_lines
from tests.kits.stack.workshop import Gate, Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

SPIKE = "{name: spike, when: loss > 10, do: [{rollback: {to: last, skip: 3, lr_factor: 0.5, budget: 2}}]}"
ENOUGH = "{name: enough, when: step >= 70, do: [stop]}"


def rules(*each: str) -> str:
    return "rules:\n" + "".join(f"- {one}\n" for one in each)


def submitted(
    shop: Workshop, text: str, *, step_s: float, steps: int = 100, gate: Gate | None = None
) -> tuple[str, Path]:
    trace = shop.tmp_path / "trace.jsonl"
    parameters = {"steps": steps, "step_s": step_s, "trace": str(trace)}
    environment = gate.environment if gate else {}
    more: dict[str, Any] = {"environment": environment, "rules": text, "heartbeat_interval_s": 1}
    return shop.submit("steered.py", parameters, outputs=("end.json",), **more), trace


def events(shop: Workshop, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [event.data for event in shop.stack.client.events(job_id, limit=1000).events if event.type == kind]


def in_force(shop: Workshop, job_id: str) -> int:
    said = shop.stack.client.rules(job_id).acknowledged
    return said.revision if said is not None and said.step is not None else 0


def test_a_training_is_rolled_back_steered_killed_and_ended_by_a_rule(shop: Workshop) -> None:
    stack, client = shop.stack, shop.stack.client
    gate = shop.gate(10)
    job_id, trace = submitted(shop, rules(SPIKE), step_s=0.1, gate=gate)
    shop.agent("w1")

    def goes_on(step: int) -> None:
        """Open the gate up to `step` once the checkpoint before the gate is stored, which would delay the next one."""
        stack.wait_for_commit(job_id, gate.step)
        gate.set(step)

    goes_on(20)
    goes_on(32)
    until(lambda: events(shop, job_id, "job.rolled_back"), what="the rollback")
    until(lambda: json_lines(trace)[-1]["step"] == 32, what="the training beyond the spike")
    client.put_rules(job_id, rules(SPIKE, ENOUGH))
    command = client.command(job_id, CommandRequest(kind="set", knob="lr", factor=0.5))

    def another_step(seen: Callable[[], bool]) -> bool:
        """Return whether `seen` holds; if not, let the training do one more step, after which it reads orders."""
        if not seen():
            gate.set(min(gate.step + 1, 65))
        return seen()

    until(lambda: another_step(lambda: in_force(shop, job_id) == 2), what="revision 2 in force", every_s=0.3)
    done = "applied"
    until(lambda: another_step(lambda: client.commands(job_id).commands[0].status == done), what=done, every_s=0.3)
    said = client.rules(job_id).acknowledged
    assert said is not None
    stood = {status.rule: status.state for status in said.statuses}
    assert stood == {"spike": "armed", "enough": "armed"}

    applied = client.commands(job_id).commands[0]
    assert applied.seq == command.seq and applied.step is not None
    gate.set(65)
    stack.wait_for_commit(job_id, (applied.step // 10) * 10)
    shop.lose(shop.agents[0], job_id)
    gate.open()
    shop.agent("w2")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=200)
    assert job.state is JobState.COMPLETE, job.reason
    assert json.loads(stack.artifact(job_id, "end.json")) == {"step": 70}
    by = job.ended_by
    assert by is not None and (by.rule, by.revision, by.step) == ("enough", 2, 70)
    assert job.counters.failures == 0 and job.counters.interruptions == 1

    lines = json_lines(trace)
    first, second = [[one for one in lines if one["epoch"] == epoch] for epoch in (1, 2)]
    assert [one["step"] for one in first] == list(range(1, 26)) and first[-1]["lr"] == 1.0
    assert second[0] == {"epoch": 2, "step": 21, "lr": 0.5, "batch": 23}, "half the rate, three batches further"
    last = lines[-1]
    assert (last["epoch"], last["step"], last["lr"], last["batch"]) == (3, 70, 0.25, 72)
    # the command acts after the same step again, if the training was resumed before it
    for one in lines:
        if one["epoch"] > 1:
            assert one["lr"] == (0.5 if one["step"] <= applied.step else 0.25), one

    [back] = events(shop, job_id, "job.rolled_back")
    assert (back["rule"], back["to_step"]) == ("spike", 20)
    fired = [(one["rule"], one["step"], one["operands"]) for one in events(shop, job_id, "rule.fired")]
    assert fired == [("spike", 25, {"loss": 50.0}), ("enough", 70, {"step": 70.0})]
    ends = [attempt.end for attempt in stack.attempts(job_id)]
    assert ends == [AttemptEnd.RELEASED, AttemptEnd.INTERRUPTED, AttemptEnd.COMPLETE]


def test_a_rule_that_says_failed_fails_the_job_at_once_and_a_spent_budget_does_too(shop: Workshop) -> None:
    stack = shop.stack
    once = "{name: spike, when: loss > 10, do: [{rollback: {to: last, budget: 1}}]}"
    gate = shop.gate(10)
    job_id, trace = submitted(shop, rules(once), step_s=0.02, gate=gate)
    shop.agent("w1")
    # The store of one checkpoint may delay the next: the training waits until each is committed.
    for step in (10, 20):
        stack.wait_for_commit(job_id, step)
        gate.set(step + 10)
    gate.open()
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.FAILED and job.reason is not None
    assert job.reason.code == FailureClass.STOPPED_BY_RULE and "spike" in job.reason.message
    assert [one["step"] for one in json_lines(trace)] == [*range(1, 26), *range(21, 26)], (
        "rolled back once, at the same rate"
    )

    stop = "{name: wrong, when: loss > 10, do: [{stop: failed}, {alert: 'loss is {loss:.1f}'}]}"
    job_id, _ = submitted(shop, rules(stop), step_s=0.0)
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.FAILED and job.ended_by is not None and job.ended_by.rule == "wrong"
    assert job.counters.attempts == 1, "not tried again"
    assert "loss is 50.0" in [one["message"] for one in events(shop, job_id, "action.applied")]


def test_a_job_that_a_command_reaches_before_its_first_step_stops_at_it(shop: Workshop) -> None:
    stack = shop.stack
    job_id, trace = submitted(shop, "", step_s=0.05)
    stack.client.command(job_id, CommandRequest(kind="stop", outcome="complete"))
    shop.agent("w1")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.COMPLETE and job.ended_by is not None and job.ended_by.command == 1
    assert [one["step"] for one in json_lines(trace)] == [1]
    assert json.loads(stack.artifact(job_id, "end.json")) == {"step": 1}
