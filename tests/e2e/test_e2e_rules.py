"""Rules and live commands on a training in real processes: rolled back, steered, killed, ended by a rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract.jobs import AttemptEnd, FailureClass, JobState
from contract.steering import CommandRequest
from tests.waiting import until
from tests.workshop import Workshop

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

SPIKE = "{name: spike, when: loss > 10, do: [{rollback: {to: last, skip: 3, lr_factor: 0.5, budget: 2}}]}"
ENOUGH = "{name: enough, when: step >= 70, do: [stop]}"


def rules(*each: str) -> str:
    return "rules:\n" + "".join(f"- {one}\n" for one in each)


def submitted(shop: Workshop, text: str, *, step_s: float, steps: int = 100) -> tuple[str, Path]:
    trace = shop.tmp_path / "trace.jsonl"
    parameters = {"steps": steps, "step_s": step_s, "trace": str(trace)}
    return shop.submit("steered.py", parameters, outputs=("end.json",), rules=text, heartbeat_interval_s=1), trace


def told(trace: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


def events(shop: Workshop, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [event.data for event in shop.stack.client.events(job_id, limit=1000).events if event.type == kind]


def in_force(shop: Workshop, job_id: str) -> int:
    said = shop.stack.client.rules(job_id).acknowledged
    return said.revision if said is not None and said.step is not None else 0


def test_a_training_is_rolled_back_steered_killed_and_ended_by_a_rule(shop: Workshop) -> None:
    stack, client = shop.stack, shop.stack.client
    job_id, trace = submitted(shop, rules(SPIKE), step_s=0.15)
    shop.agent("w1")

    until(lambda: events(shop, job_id, "job.rolled_back"), 60, what="the rollback")
    until(lambda: told(trace)[-1]["step"] >= 32, 60, what="the training beyond the spike")
    client.put_rules(job_id, rules(SPIKE, ENOUGH))
    command = client.command(job_id, CommandRequest(kind="set", knob="lr", factor=0.5))
    until(lambda: in_force(shop, job_id) == 2, 30, what="revision 2 in force")
    until(lambda: client.commands(job_id).commands[0].status == "applied", 30, what="the command's result")
    said = client.rules(job_id).acknowledged
    assert said is not None
    stood = {status.rule: status.state for status in said.statuses}
    assert stood == {"spike": "armed", "enough": "armed"}

    applied = client.commands(job_id).commands[0]
    assert applied.seq == command.seq and applied.step is not None
    stack.wait_for_commit(job_id, (applied.step // 10) * 10)
    shop.agents[0].kill_group()
    shop.agent("w2")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=90)
    assert job.state is JobState.COMPLETE, job.reason
    assert json.loads(stack.artifact(job_id, "end.json")) == {"step": 70}
    by = job.ended_by
    assert by is not None and (by.rule, by.revision, by.step) == ("enough", 2, 70)
    assert job.counters.failures == 0 and job.counters.interruptions == 1

    lines = told(trace)
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
    job_id, trace = submitted(shop, rules(once), step_s=0.02)
    shop.agent("w1")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=60)
    assert job.state is JobState.FAILED and job.reason is not None
    assert job.reason.code == FailureClass.STOPPED_BY_RULE and "spike" in job.reason.message
    steps = [one["step"] for one in told(trace)]
    # On a busy machine the checkpoint of step 20 is put off while that of step 10 is being stored.
    again = steps[25]
    assert steps == [*range(1, 26), *range(again, 26)] and 11 <= again <= 25, "rolled back once"

    stop = "{name: wrong, when: loss > 10, do: [{stop: failed}, {alert: 'loss is {loss:.1f}'}]}"
    job_id, _ = submitted(shop, rules(stop), step_s=0.0)
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=60)
    assert job.state is JobState.FAILED and job.ended_by is not None and job.ended_by.rule == "wrong"
    assert job.counters.attempts == 1, "not tried again"
    assert "loss is 50.0" in [one["message"] for one in events(shop, job_id, "action.applied")]


def test_a_job_that_a_command_reaches_before_its_first_step_stops_at_it(shop: Workshop) -> None:
    stack = shop.stack
    job_id, trace = submitted(shop, "", step_s=0.05)
    stack.client.command(job_id, CommandRequest(kind="stop", outcome="complete"))
    shop.agent("w1")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=60)
    assert job.state is JobState.COMPLETE and job.ended_by is not None and job.ended_by.command == 1
    assert [one["step"] for one in told(trace)] == [1]
    assert json.loads(stack.artifact(job_id, "end.json")) == {"step": 1}
