"""Outages of the control plane and the object store, and paused machines, cost no job its work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.jobs.job import AttemptEnd, JobState
from tests.kits.stack.stack import Stack, chain
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import alive, until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]


@pytest.fixture
def patient_shop(tmp_path: Path) -> Iterator[Workshop]:
    """Yield a workshop on a stack whose sweeper does not run, so that no lease ends during an outage."""
    with Stack(sweep_interval_s=3600) as stack:
        workshop = Workshop(stack, tmp_path)
        try:
            yield workshop
        finally:
            workshop.close()


def test_a_control_plane_that_is_down_for_ten_heartbeats_costs_nothing(patient_shop: Workshop) -> None:
    """The trainer is the clock: 200 steps of 50 ms are ten heartbeats of one second, the lease lasts three."""
    shop, stack = patient_shop, patient_shop.stack
    steps, gate = 260, shop.gate(20)
    parameters = {"steps": steps, "every": 10, "step_s": 0.05}
    job_id = shop.submit("chain.py", parameters, environment=gate.environment, heartbeat_interval_s=1)
    front = shop.front()
    agent = shop.agent("w1", url=front.url)
    stack.wait_for_commit(job_id)
    until(lambda: agent.last_step() == gate.step, what="the training at the gate")
    with front.dropping():
        gate.open()
        from_step = gate.step
        # A pack may leave a slow agent after the proof of the lease.
        until(lambda: agent.last_step() >= from_step + 100, what="the lease running out")
        committed = stack.steps(job_id)
        packs = len(stack.s3.requests("PUT /training-checkpoints/.*/packs/"))
        until(lambda: agent.last_step() >= from_step + 200, what="training that goes on")
        assert stack.steps(job_id) == committed
        assert len(stack.s3.requests("PUT /training-checkpoints/.*/packs/")) == packs, "uploaded without a proven lease"
        assert "heartbeat failed" in agent.log()
    stack.wait_for(job_id, JobState.COMPLETE)
    assert [attempt.end for attempt in stack.attempts(job_id)] == [AttemptEnd.COMPLETE]
    assert stack.artifact(job_id) == chain(steps)
    assert "control plane is back" in agent.log()
    assert stack.steps(job_id)[-1] == steps > committed[-1], "commits went on afterwards"
    assert stack.log_lines(job_id) == [f"step {step}" for step in range(1, steps + 1)]


def test_an_outage_while_inputs_are_fetched_and_while_the_end_is_reported(shop: Workshop) -> None:
    stack = shop.stack
    stack.write(f"{shop.queue}/one.txt", b"input", bucket="training-data")
    job_id = shop.submit("chain.py", {"steps": 5}, inputs=(f"{shop.queue}/",), heartbeat_interval_s=10)
    front = shop.front()
    with front.dropping(r"GET /job/.*/inputs") as fetching, front.dropping(r"POST /complete") as completing:
        agent = shop.agent("w1", url=front.url)
        fetching.wait_for(3)
        front.forget(fetching)
        completing.wait_for(3)
    stack.wait_for(job_id, JobState.COMPLETE)
    assert [attempt.end for attempt in stack.attempts(job_id)] == [AttemptEnd.COMPLETE]
    assert stack.artifact(job_id) == chain(5)
    until(lambda: "attempt 1: complete" in agent.log(), what="the agent's knowing it")


@pytest.mark.parametrize("status", [500, 503])
def test_an_object_store_that_stumbles(shop: Workshop, status: int) -> None:
    stack = shop.stack
    stack.write(f"{shop.queue}/one.txt", b"input", bucket="training-data")
    job_id = shop.submit("chain.py", {"steps": 20, "every": 10}, inputs=(f"{shop.queue}/",))
    with (
        stack.s3.failing("GET /training-data/", status) as inputs,
        stack.s3.failing("PUT /training-checkpoints/.*/packs/", status) as packs,
        stack.s3.failing("PUT /training-checkpoints/.*/artifacts/", status) as artifacts,
    ):
        shop.agent("w1")
        for trouble in (inputs, packs, artifacts):
            trouble.wait_for(3)
            stack.s3.forget(trouble)
    stack.wait_for(job_id, JobState.COMPLETE)
    assert [attempt.end for attempt in stack.attempts(job_id)] == [AttemptEnd.COMPLETE]
    assert stack.artifact(job_id) == chain(20)
    assert stack.steps(job_id)[-1] == 20


def test_a_machine_that_was_paused_until_its_job_moved_on_changes_nothing(shop: Workshop) -> None:
    """An agent that was paused while its trainer finished reports everything in vain: the job has a second attempt."""
    stack = shop.stack
    parameters = {"steps": 100, "every": 10, "step_s": 0.03}
    gate = shop.gate(50)
    job_id = shop.submit("chain.py", parameters, environment=gate.environment, heartbeat_interval_s=1)
    zombie = shop.agent("w1")
    stack.wait_for_commit(job_id)
    (its_trainer,) = shop.training()
    zombie.signal(signal.SIGSTOP)
    stack.expire_lease(job_id)
    gate.open()
    until(lambda: not alive(its_trainer.pid), what="the end of the zombie's trainer")
    gate.set(80)
    shop.agent("w2")
    until(lambda: stack.job(job_id).epoch == 2, what="the second attempt")
    until(lambda: stack.attempts(job_id)[1].checkpoint_step, what="a commit of the second attempt")
    held = stack.job(job_id)
    zombie.signal(signal.SIGCONT)
    until(lambda: "attempt 1: lost" in zombie.log(), what="the zombie's giving up")
    job = stack.job(job_id)
    assert (job.epoch, job.machine_id) == (2, held.machine_id)
    gate.open()
    stack.wait_for(job_id, JobState.COMPLETE)

    assert [attempt.end for attempt in stack.attempts(job_id)] == [AttemptEnd.INTERRUPTED, AttemptEnd.COMPLETE]
    assert stack.artifact(job_id) == chain(100)
    assert all("/artifacts/2/" in key for key in stack.keys_below(f"jobs/{job_id}/artifacts/"))
    commits = [event for event in stack.events(job_id) if event.type == "checkpoint.committed"]
    moved_on_at = next(index for index, event in enumerate(commits) if event.epoch == 2)
    assert {event.epoch for event in commits[moved_on_at:]} == {2}
    assert stack.job(job_id).counters.failures == 0


def test_a_wall_clock_that_is_wrong_by_an_hour_does_not_matter(shop: Workshop) -> None:
    stack = shop.stack
    wrapper = Path(__file__).parent / "skewed_agent.py"
    offsets = (3600, -3600)
    parameters = {"steps": 60, "every": 20, "step_s": 0.05}
    jobs = [shop.submit("chain.py", parameters, heartbeat_interval_s=1) for _ in offsets]
    agents = [shop.agent(f"w{offset_s}", wrapper=wrapper, skew_s=offset_s, max_jobs=1) for offset_s in offsets]
    for job_id, agent in zip(jobs, agents, strict=True):
        stack.wait_for(job_id, JobState.COMPLETE)
        assert agent.wait() == 0
    for job_id in jobs:
        assert [attempt.end for attempt in stack.attempts(job_id)] == [AttemptEnd.COMPLETE]
        # A commit that takes longer than 20 steps makes the agent skip step 40.
        assert {20, 60} <= {*stack.steps(job_id)} <= {20, 40, 60}
        assert stack.artifact(job_id) == chain(60)
