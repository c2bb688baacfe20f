"""The agent is killed in each of its phases: the next agent finishes the job, from whole checkpoints only."""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager, nullcontext

import pytest

from baton.contract.jobs.job import AttemptEnd, JobState
from tests.kits.network.proxies import Fault
from tests.kits.stack.stack import Stack, chain, weights
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

STEPS = 40
HELD = {
    "fetching": "GET /training-data/",
    "restoring": "GET /training-checkpoints/.*/(manifests|packs)/",
    "committing": "PUT /training-checkpoints/.*/packs/",
    "uploading": "PUT /training-checkpoints/.*/artifacts/",
}


def assert_whole_checkpoints(stack: Stack, job_id: str) -> None:
    """Every checkpoint that the control plane names is stored, to the last bit."""
    named = stack.client.checkpoints(job_id).checkpoints
    assert named
    for checkpoint in named:
        files = stack.files_of(stack.manifest(checkpoint.manifest_key))
        state = chain(checkpoint.step)
        assert json.loads(files.pop("baton.json"))["step"] == checkpoint.step
        assert files == {"state.txt": state, "weights.bin": weights(job_id, state)}


@pytest.mark.parametrize("phase", ["fetching", "restoring", "training", "committing", "uploading"])
def test_the_same_agent_started_again_hands_the_job_back_at_once(shop: Workshop, phase: str) -> None:
    """The lease is three minutes long, longer than the patience of the test."""
    stack = shop.stack
    stack.write(f"{shop.queue}/one.txt", b"input", bucket="training-data")
    gate = shop.gate(STEPS if phase == "uploading" else 25)
    job_id = shop.submit(
        "chain.py",
        {"steps": STEPS, "every": 10, "step_s": 0.03},
        inputs=(f"{shop.queue}/",),
        environment=gate.environment,
        heartbeat_interval_s=60,
    )
    ends = 1
    if phase == "restoring":
        agent = shop.agent("w1")
        stack.wait_for_commit(job_id)
        agent.kill_group()
        ends += 1
    held: AbstractContextManager[Fault | None] = nullcontext()
    if phase in HELD:
        held = stack.s3.holding(HELD[phase], drop=True)
    with held as trouble:
        agent = shop.agent("w1")
        if trouble:
            trouble.wait()
        else:
            until(lambda: shop.trainers() and stack.job(job_id).progress, what="the training")
        agent.kill_group()
    until(lambda: not shop.trainers(), what="the trainer's end")
    assert len(stack.attempts(job_id)) == ends
    assert stack.job(job_id).state is JobState.RUNNING
    newest = stack.job(job_id).checkpoint_step
    gate.open()

    shop.agent("w1")
    stack.wait_for(job_id, JobState.COMPLETE)
    attempts = stack.attempts(job_id)
    assert [attempt.end for attempt in attempts] == [AttemptEnd.INTERRUPTED] * ends + [AttemptEnd.COMPLETE]
    assert {attempt.reason.code for attempt in attempts[:-1] if attempt.reason} == {"agent_crashed"}
    assert attempts[-1].resumed_step == newest
    assert stack.artifact(job_id) == chain(STEPS)
    assert_whole_checkpoints(stack, job_id)
    assert stack.job(job_id).counters.failures == 0


def test_another_agent_takes_over_when_the_lease_has_run_out(shop: Workshop) -> None:
    stack = shop.stack
    gate, parameters = shop.gate(50), {"steps": 100, "every": 10, "step_s": 0.05}
    job_id = shop.submit("chain.py", parameters, environment=gate.environment, heartbeat_interval_s=1)
    agent = shop.agent("w1")
    stack.wait_for_commit(job_id)
    shop.lose(agent, job_id)
    newest = stack.job(job_id).checkpoint_step
    gate.open()
    shop.agent("w2")
    stack.wait_for(job_id, JobState.COMPLETE)
    first, second = stack.attempts(job_id)
    assert (first.end, first.worker_id) == (AttemptEnd.INTERRUPTED, "w1")
    assert first.reason
    assert first.reason.code == "lease_expired"
    assert (second.end, second.worker_id, second.resumed_step) == (AttemptEnd.COMPLETE, "w2", newest)
    assert stack.artifact(job_id) == chain(100)
    assert stack.job(job_id).counters.interruptions == 1


def test_a_damaged_newest_checkpoint_is_passed_over_for_the_one_before(shop: Workshop) -> None:
    stack = shop.stack
    gate, parameters = shop.gate(60), {"steps": 120, "every": 10, "step_s": 0.03}
    job_id = shop.submit("chain.py", parameters, environment=gate.environment, heartbeat_interval_s=60)
    agent = shop.agent("w1")
    stack.wait_for_commit(job_id, 20)
    agent.kill_group()
    gate.open()
    newest, before = stack.client.checkpoints(job_id).checkpoints[:2]
    for pack in stack.manifest(newest.manifest_key).packs:
        stack.write(f"packs/{pack.blake3}", bytes(pack.size_bytes))
    for store in list(shop.tmp_path.glob("workspace/slot-*/store")):
        shutil.rmtree(store)  # else nothing would be fetched

    shop.agent("w1")
    stack.wait_for(job_id, JobState.COMPLETE)
    assert stack.artifact(job_id) == chain(120)
    assert f"resumed at {before.step}" in stack.log_lines(job_id)
    damaged = [event for event in stack.events(job_id) if event.type == "checkpoint.damaged"]
    assert [(event.data["step"], event.data["fallback_step"]) for event in damaged] == [(newest.step, before.step)]
    found = {(c.step, c.epoch): c.damaged for c in stack.client.checkpoints(job_id).checkpoints}
    assert found.get((newest.step, newest.epoch), True)
