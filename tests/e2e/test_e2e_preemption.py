"""A machine that is taken away with notice, a worker that asks for checkpoints, and where an attempt's time went."""

from __future__ import annotations

import pytest

from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import AttemptEnd, JobState
from tests.kits.network.instance_metadata import MetadataService
from tests.kits.stack.stack import chain
from tests.kits.stack.workshop import Workshop

pytestmark = [pytest.mark.processes, pytest.mark.emulator]


def assert_all_time_is_accounted_for(attempt: AttemptView, *, checkpoints: int) -> None:
    """Assert that the attempt's goodput came with its end, and accounts for all of its time."""
    assert attempt.progress and attempt.progress.goodput and attempt.ended_at
    found = attempt.progress.goodput
    spent_s = found.productive_s + found.repeated_s + found.stalled_s + found.transferring_s + found.idle_s
    # Both ends are whole seconds of another clock; claiming and the last words are nobody's time.
    assert abs(spent_s - (attempt.ended_at - attempt.started_at)) <= 3, found
    assert found.productive_s > 0 and found.repeated_s == 0, found
    assert found.checkpoints_committed == checkpoints, found
    if checkpoints:
        assert found.raw_bytes > 32_000 * checkpoints, found
        assert 32_000 * checkpoints <= found.uploaded_bytes <= found.raw_bytes - found.reused_bytes, found


def test_a_spot_notice_brings_a_last_checkpoint_and_the_next_attempt_begins_there(shop: Workshop) -> None:
    """No signal comes: the notice alone makes the agent leave. It asks for one every five seconds."""
    stack = shop.stack
    parameters = {"steps": 400, "every": 10_000, "first_step_s": 0.05, "step_s": 0.01}
    gate = shop.gate(40)
    job_id = shop.submit("chain.py", parameters, environment=gate.environment, heartbeat_interval_s=2)
    with MetadataService() as service:
        agent = shop.agent(
            "w1", spot_notices="ec2", environment={"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.url}, max_jobs=5
        )
        stack.wait_for_step(job_id, 5)
        service.announce(within_s=100)
        assert agent.wait() == 0
    gate.open()
    assert stack.job(job_id).state is JobState.PENDING
    shop.agent("w2")
    stack.wait_for(job_id, JobState.COMPLETE)

    first, second = stack.attempts(job_id)
    assert (first.end, second.end, second.worker_id) == (AttemptEnd.RELEASED, AttemptEnd.COMPLETE, "w2")
    assert first.reason
    assert (first.reason.code, first.reason.message) == ("sigterm", "spot notice")
    assert first.checkpoint_step
    assert second.resumed_step == first.checkpoint_step
    assert stack.artifact(job_id) == chain(400)
    lines = [line for line in stack.log_lines(job_id) if line.startswith("step ")]
    assert lines == [f"step {step}" for step in range(1, 401)], "no step was lost or repeated"
    assert_all_time_is_accounted_for(first, checkpoints=1)
    assert_all_time_is_accounted_for(second, checkpoints=0)


def test_the_worker_asks_the_training_for_checkpoints_as_often_as_the_job_says(shop: Workshop) -> None:
    stack = shop.stack
    parameters = {"steps": 140, "every": 10_000, "step_s": 0.05}
    job_id = shop.submit("chain.py", parameters, heartbeat_interval_s=60, checkpoint_every=5)
    shop.agent("w1")
    stack.wait_for(job_id, JobState.COMPLETE)
    (attempt,) = stack.attempts(job_id)
    assert attempt.ended_at
    steps = stack.steps(job_id)
    # 140 steps take 7 s or, on a busy machine, more; a busy worker asks late.
    assert 10 < steps[0] < 140
    assert len(steps) <= (attempt.ended_at - attempt.started_at + 1) / 5
    assert_all_time_is_accounted_for(attempt, checkpoints=len(steps))
