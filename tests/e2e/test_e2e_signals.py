"""SIGTERM, pause and cancel: what a person or a cloud asks for, in every phase."""

from __future__ import annotations

import json
import signal
import time

import pytest

from baton.contract.jobs.job import AttemptEnd, JobState
from tests.kits.stack.stack import chain
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

NO_CHECKPOINT_OF_ITS_OWN = {"steps": 200, "every": 10_000, "step_s": 0.02}


def test_sigterm_commits_a_last_checkpoint_and_another_worker_has_the_job_within_seconds(shop: Workshop) -> None:
    stack = shop.stack
    gate = shop.gate(50)
    job_id = shop.submit("chain.py", NO_CHECKPOINT_OF_ITS_OWN, environment=gate.environment, heartbeat_interval_s=60)
    agent = shop.agent("w1", max_jobs=5)
    until(lambda: shop.trainers() and stack.job(job_id).epoch == 1, what="the training")
    until(lambda: "training" in agent.log(), what="the training")
    shop.agent("w2")
    until(lambda: list(shop.tmp_path.glob("workspace/slot-*/jobs/*/output")), what="the output directory")
    until(lambda: any("step 5" in line for line in agent.log().splitlines()), what="step 5", every_s=0.02)
    (state,) = shop.tmp_path.glob("workspace/slot-*/agent-state.json")
    lease_token = json.loads(state.read_text())["lease_token"]
    asked_at = time.monotonic()
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 0
    gate.open()
    until(lambda: stack.job(job_id).epoch == 2, what="the second attempt")
    assert time.monotonic() - asked_at < 90, "the lease is three minutes long: it was released, not waited for"
    stack.wait_for(job_id, JobState.COMPLETE)

    first, second = stack.attempts(job_id)
    assert (first.end, second.end, second.worker_id) == (AttemptEnd.RELEASED, AttemptEnd.COMPLETE, "w2")
    assert first.reason
    assert (first.reason.code, first.reason.message) == ("sigterm", "SIGTERM")
    assert first.checkpoint_step
    assert second.resumed_step == first.checkpoint_step
    assert stack.artifact(job_id) == chain(200)
    lines = stack.log_lines(job_id)
    assert lines.count("step 1") == 1, "a step before the checkpoint was repeated"
    assert lease_token not in agent.log()
    assert "leaving: release" in lines, "the last lines of an attempt are shipped before it is released"


def test_a_second_sigterm_leaves_at_once(shop: Workshop) -> None:
    stack = shop.stack
    job_id = shop.submit("misbehave.py", arguments=("deaf",), heartbeat_interval_s=60, stop_grace_s=600)
    agent = shop.agent("w1")
    until(lambda: list(shop.tmp_path.glob("workspace/slot-*/jobs/*/output/deaf")), what="the trainer's deafness")
    agent.signal(signal.SIGTERM)
    until(lambda: "SIGTERM received: drain" in agent.log(), what="the first signal")
    first_at = time.monotonic()
    # Two signals within a second are one request.
    until(lambda: time.monotonic() - first_at > 1.2)
    agent.signal(signal.SIGTERM)
    assert agent.wait() in (0, 4)
    until(lambda: not shop.trainers(), what="the trainer's end")
    assert stack.wait_for(job_id, JobState.PENDING).counters.releases == 1


def test_a_trainer_that_ignores_sigterm_is_killed_after_its_grace(shop: Workshop) -> None:
    stack = shop.stack
    job_id = shop.submit("misbehave.py", arguments=("deaf",), heartbeat_interval_s=60, stop_grace_s=1)
    agent = shop.agent("w1")
    until(lambda: list(shop.tmp_path.glob("workspace/slot-*/jobs/*/output/deaf")), what="the trainer's deafness")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 0
    assert not shop.trainers()
    assert stack.job(job_id).state is JobState.PENDING
    assert [attempt.end for attempt in stack.attempts(job_id)] == [AttemptEnd.RELEASED]
    assert stack.job(job_id).counters.failures == 0


def test_an_idle_agent_leaves_on_sigterm(shop: Workshop) -> None:
    front = shop.front()
    agent = shop.agent("w1", url=front.url, poll_min_s=300, poll_max_s=300)
    until(lambda: front.requests("GET /work"), what="its first question")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 0


def test_pause_commits_a_checkpoint_and_resume_goes_on_from_it(shop: Workshop) -> None:
    stack = shop.stack
    gate = shop.gate(50)
    job_id = shop.submit("chain.py", NO_CHECKPOINT_OF_ITS_OWN, environment=gate.environment, heartbeat_interval_s=1)
    shop.agent("w1")
    stack.wait_for_step(job_id, 5)
    stack.client.pause(job_id)
    paused = stack.wait_for(job_id, JobState.PAUSED)
    assert paused.checkpoint_step
    assert paused.reason
    assert paused.reason.code == "paused_by_user"
    assert not shop.trainers()
    gate.open()
    stack.client.resume(job_id)
    stack.wait_for(job_id, JobState.COMPLETE)
    first, second = stack.attempts(job_id)
    assert (first.end, second.end) == (AttemptEnd.RELEASED, AttemptEnd.COMPLETE)
    assert second.resumed_step == paused.checkpoint_step
    assert stack.artifact(job_id) == chain(200)


def test_a_job_canceled_before_its_start_never_starts(shop: Workshop) -> None:
    job_id = shop.submit("chain.py", {"steps": 5})
    shop.stack.client.stop(job_id)
    agent = shop.agent("w1", exit_when_idle_s=0.5)
    assert agent.wait() == 0
    assert shop.stack.job(job_id).state is JobState.CANCELED
    assert shop.stack.attempts(job_id) == []
    assert "claimed" not in agent.log()


@pytest.mark.parametrize(
    ("phase", "held"),
    [
        ("download", "GET /training-data/"),
        ("upload", "PUT /training-checkpoints/.*/artifacts/"),
        ("commit", "PUT /training-checkpoints/.*/packs/"),
    ],
)
def test_canceled_while_bytes_move(shop: Workshop, phase: str, held: str) -> None:
    stack = shop.stack
    stack.write(f"{shop.queue}/one.txt", b"input", bucket="training-data")
    job_id = shop.submit("chain.py", {"steps": 10}, inputs=(f"{shop.queue}/",), heartbeat_interval_s=1)
    agent = shop.agent("w1", max_jobs=1)
    with stack.s3.holding(held, drop=True) as trouble:
        trouble.wait()
        stack.client.stop(job_id, message="wrong prompt")
        assert agent.wait(45) == 0, "it waits for no byte of a canceled job"
    job = stack.job(job_id)
    assert job.state is JobState.CANCELED
    assert job.artifacts == []
    assert [attempt.end for attempt in stack.attempts(job_id)] == [AttemptEnd.CANCELED]
    assert "attempt 1: canceled" in agent.log()
    assert bool(stack.steps(job_id)) == (phase == "upload")
    assert ("step 1" in agent.log()) == (phase != "download")
    assert not stack.keys_below(f"jobs/{job_id}/artifacts/")


def test_a_trainer_that_ends_well_after_a_cancel_has_not_completed(shop: Workshop) -> None:
    stack = shop.stack
    job_id = shop.submit("misbehave.py", arguments=("polite",), heartbeat_interval_s=1)
    agent = shop.agent("w1")
    stack.wait_for_step(job_id, 1)
    stack.client.stop(job_id)
    until(lambda: "attempt 1: canceled" in agent.log(), what="the end of the attempt")
    job = stack.job(job_id)
    assert (job.state, job.artifacts) == (JobState.CANCELED, [])
    assert not stack.keys_below(f"jobs/{job_id}/artifacts/")
    # The worker is none the worse for it.
    following = shop.submit("chain.py", {"steps": 5})
    stack.wait_for(following, JobState.COMPLETE)


def test_what_a_trainer_forks_ends_with_its_job(shop: Workshop) -> None:
    stack = shop.stack
    job_id = shop.submit("misbehave.py", arguments=("family",), heartbeat_interval_s=1)
    agent = shop.agent("w1")
    stack.wait_for_step(job_id, 1)
    until(lambda: len([p for p in shop.trainers() if p.name() == "sleep"]) == 2, what="the family")
    stack.client.stop(job_id)
    until(lambda: "attempt 1: canceled" in agent.log(), what="the end of the attempt")
    assert not shop.trainers()
