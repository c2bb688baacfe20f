"""Rules and a command on a real training of two nodes: both act alike, and each decision is recorded once."""

from __future__ import annotations

import json

import pytest

from baton.contract.elastic.nodes import NodesSpec
from baton.contract.jobs.job import JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from baton.contract.worker.control import CommandKind, CommandRequest
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

RULES = """
rules:
  - name: learnt
    when: loss < 4 and world.loss < 4 and world.nodes == 2
    once: true  # The loss may rise again.
    do: {set: {knob: lr, factor: 0.5}}
  - {name: enough, when: lr < 1e-4, do: stop}
"""


def test_rules_and_a_command_reach_both_nodes(shop: Workshop) -> None:
    stack = shop.stack
    job = JobSubmit(
        command=["python", "-m", "gpu_client.training.byte_transformer"],
        parameters={"rounds": 100_000, "inner_steps": 5, "batch_size": 4, "context": 32, "width": 32, "layers": 1},
        nodes=NodesSpec(min=2, max=2),
        rules=RULES,
        queue=shop.queue,
        outputs=["model.safetensors", "result.json"],
        policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0, stop_grace_s=20),
    )
    job_id = stack.client.submit(job).id
    for number in range(2):
        shop.agent(f"node-{number}")

    def fired(rule: str) -> list[int]:
        return [
            one.data["step"] for one in stack.events(job_id) if one.type == "rule.fired" and one.data["rule"] == rule
        ]

    def applied() -> list[list[str]]:
        return [one.data["actions"] for one in stack.events(job_id) if one.type == "action.applied"]

    until(lambda: fired("learnt"), 120, what="the rule on the loss of the world")
    seq = stack.client.command(job_id, CommandRequest(kind=CommandKind.SET, knob="lr", value=5e-5)).seq
    ended = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=240)
    assert ended.state is JobState.COMPLETE, ended.reason
    assert ended.ended_by is not None and ended.ended_by.rule == "enough"
    assert json.loads(stack.artifact(job_id, "result.json"))["rounds"] >= ended.ended_by.step
    # The node that ends the job need not be the first member, whose last reports hold the decisions.
    until(lambda: applied()[-1:] == [["stop"]], what="the last report of the first member")
    until(lambda: not shop.trainers(), what="the end of the other node")
    (command,) = stack.client.commands(job_id).commands
    assert (command.seq, command.status, command.message) == (seq, "applied", "lr: 0.0015 -> 5e-05")
    assert (len(fired("learnt")), len(fired("enough"))) == (1, 1)
    assert applied() == [["set"], ["set"], ["stop"]]
