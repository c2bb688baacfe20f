"""Interrupted equals uninterrupted: SIGKILL to the agent's whole process group, again and again."""

from __future__ import annotations

import hashlib
import io
import random
import re
import time
from collections.abc import Mapping

import pytest
from PIL import Image

from baton.contract.jobs.job import AttemptEnd, JobState
from tests.kits.stack.stack import chain, weights
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

# With those in tests/e2e/training more than fifty.
AGENT_ROUNDS = 12
TRAINER_ROUNDS = 25
STEPS = 300


def kill_an_agent_at_work(shop: Workshop, event: str, *, after_s: float) -> None:
    """Start an agent, and kill the agent `after_s` seconds after an event of its log."""
    agent = shop.agent("w1")
    until(lambda: event in agent.log(), what=event, every_s=0.01)
    time.sleep(after_s)  # the moment is what is tried here
    agent.kill_group()
    until(lambda: not shop.trainers(), what="the trainer's end")


def test_agents_killed_at_random_moments_the_weights_are_bit_identical(shop: Workshop) -> None:
    """A kill may fall into start-up, fetching, restoring, training, hashing, uploading, committing or recovery."""
    rng = random.Random(20_240_613)
    stack = shop.stack
    parameters = {"steps": STEPS, "every": 10, "step_s": 0.02}
    limits = {"max_interruptions": 1000, "max_fruitless_interruptions": 1000}
    gate, at_most = shop.gate(0), STEPS // (AGENT_ROUNDS + 1)  # steps of an attempt: none comes to the end
    job_id = shop.submit("chain.py", parameters, heartbeat_interval_s=2, environment=gate.environment, **limits)
    for number in range(AGENT_ROUNDS):
        gate.set((number + 1) * at_most)
        # On a slow machine no attempt commits within a second of its claim, and then none would resume.
        event = " committed: " if number % 4 == 3 else " claimed"
        kill_an_agent_at_work(shop, event, after_s=rng.uniform(0.0, 1.2))
    before = stack.job(job_id)
    assert before.state in (JobState.RUNNING, JobState.PENDING)
    gate.open()
    shop.agent("w1")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=240)
    assert job.state is JobState.COMPLETE
    assert stack.artifact(job_id) == chain(STEPS)

    attempts = stack.attempts(job_id)
    assert len(attempts) >= AGENT_ROUNDS + 1
    assert [attempt.epoch for attempt in attempts] == list(range(1, len(attempts) + 1))
    assert attempts[-1].end is AttemptEnd.COMPLETE
    assert {attempt.end for attempt in attempts[:-1]} <= {AttemptEnd.RELEASED, AttemptEnd.INTERRUPTED}
    steps = stack.steps(job_id)
    assert steps == sorted(set(steps))
    assert any(attempt.resumed_step for attempt in attempts)

    uninterrupted = shop.submit("chain.py", {**parameters, "step_s": 0.0})
    stack.wait_for(uninterrupted, JobState.COMPLETE)
    assert stack.artifact(uninterrupted) == stack.artifact(job_id)
    assert len(stack.attempts(uninterrupted)) == 1


def test_trainers_killed_at_random_moments_go_on_from_committed_states_bit_for_bit(shop: Workshop) -> None:
    """The agent lives on, and has the job again at once, with all that the dead trainer left behind."""
    rng = random.Random(20_261_121)
    stack, steps = shop.stack, 800
    limits = {"max_failures": 1000, "max_node_faults": 1000, "max_fruitless_interruptions": 1000}
    gate, at_most = shop.gate(0), steps // (TRAINER_ROUNDS + 1)
    parameters = {"steps": steps, "every": 10, "step_s": 0.01}
    job_id = shop.submit("chain.py", parameters, heartbeat_interval_s=5, environment=gate.environment, **limits)
    agent = shop.agent("w1")
    killed: set[int] = set()
    for number in range(TRAINER_ROUNDS):
        gate.set((number + 1) * at_most)
        trainer = until(lambda: next((one for one in shop.training() if one.pid not in killed), None), what="a trainer")
        time.sleep(rng.uniform(0.0, 0.5))  # the moment is what is tried here
        killed.add(trainer.pid)
        trainer.kill()
    gate.open()
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=240)
    assert job.state is JobState.COMPLETE, job.reason
    assert stack.artifact(job_id) == chain(steps)

    attempts = stack.attempts(job_id)
    assert [attempt.end for attempt in attempts] == [AttemptEnd.FAILED] * TRAINER_ROUNDS + [AttemptEnd.COMPLETE]
    assert {attempt.signal for attempt in attempts[:-1]} == {9}
    committed = stack.steps(job_id)
    assert committed == sorted(set(committed))
    found = re.findall(r"\| found (\d+) (\w{64})$", agent.log(), re.MULTILINE)
    assert len(found) > TRAINER_ROUNDS / 2, "most of them came so far as to begin"
    for step, digest in found:
        state = chain(int(step))
        assert int(step) in committed
        assert digest == hashlib.sha256(state + weights(job_id, state)).hexdigest()


def test_real_weights_are_bit_identical_too(shop: Workshop) -> None:
    """A killed `digits` training ends bit for bit as an uninterrupted one, with optimizer, scheduler and dropout."""
    stack = shop.stack
    rng = random.Random(7)
    for label in range(3):
        for index in range(10):
            image = Image.frombytes("L", (8, 8), rng.randbytes(64))
            image.save(file := io.BytesIO(), "PNG")
            stack.write(f"{shop.queue}/{label}/{index}.png", file.getvalue(), bucket="training-data")

    def submit(environment: Mapping[str, str], checkpoint_every: int) -> str:
        return shop.submit(
            "",
            {"steps": 300, "checkpoint_every": checkpoint_every, "batch_size": 8, "hidden": 8},
            command=["python", "-m", "gpu_client.training.digits"],
            outputs=("model.safetensors", "predictions.json"),
            inputs=(f"{shop.queue}/",),
            environment=environment,
        )

    # Killed wherever they are, once they have committed something of their own: the first attempt between the steps 0
    # and 100, the second between 100 and 200.
    gate = shop.gate(100)
    job_id = submit(gate.of_sessions, 20)
    for begin, end in ((0, 100), (100, 200)):
        gate.set(end)
        agent = shop.agent("w1")
        stack.wait_for_commit(job_id, begin + 1)
        agent.kill_group()
    gate.open()
    shop.agent("w1")
    assert stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED).state is JobState.COMPLETE
    attempts = stack.attempts(job_id)
    assert len(attempts) == 3
    assert [bool(attempt.resumed_step) for attempt in attempts] == [False, True, True]

    # Without checkpoints: packs of the ended job are being deleted, and a commit of the same packs waits for that.
    uninterrupted = submit({}, 300)
    stack.wait_for(uninterrupted, JobState.COMPLETE)
    assert len(stack.attempts(uninterrupted)) == 1
    for path in ("model.safetensors", "predictions.json"):
        assert stack.artifact(job_id, path) == stack.artifact(uninterrupted, path)
