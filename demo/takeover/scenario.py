"""The scenario: train, kill the worker, take over, complete; train the same undisturbed; compare."""

from __future__ import annotations

import time

from baton.contract.jobs.job import JobState, JobSubmit, JobView
from baton.contract.jobs.policy import Policy, Retention
from demo import digits
from demo.cluster import DIGITS, HIDDEN, LocalCluster
from demo.failure import DemoError
from demo.jobs import JobRecord, JobWatch
from demo.processes import Child
from demo.runner import Stage
from demo.screen import Phase
from demo.takeover.results import Interruption, TakeoverResults
from gpu_client.transport.api.client import BatonClient

STEPS = 500
KILL_AT = 0.40
CHECKPOINT_EVERY = 80
"""At 40 % of the steps the last checkpoint is some way back, so that the next worker repeats steps."""
BATCH_SIZE = 1024
"""Most of the training set: a smaller batch makes a noisier curve."""
LEARNING_RATE = 2e-3
START_S = 120.0
"""Deadline from the start of a worker to its first step."""
TRAIN_S = 180.0
"""Deadline of each step of a training."""
LEAVE_S = 20.0
"""Deadline for a worker to leave after its job."""


def play(stage: Stage) -> TakeoverResults:
    """Run the scenario. Raises DemoError for a step that failed, BatonError for a failed call."""
    cluster = LocalCluster(stage)
    with cluster.user() as user:
        data = cluster.push_digits(user)
        interrupted, interruption = _train_with_a_kill(cluster, user)
        weights, digest = cluster.fetch_model(user, interrupted.job.id, "interrupted")
        with stage.screen.phase("measure", "Measure its accuracy") as phase:
            readings = digits.read_digits(weights, HIDDEN, data.held_out)
            phase.ends_with(f"{100 * readings.accuracy:.1f} % of {len(readings.predicted)} held-out digits")
        undisturbed = _train_undisturbed(cluster, user)
        other_weights, other_digest = cluster.fetch_model(user, undisturbed.job.id, "undisturbed")
        traffic = cluster.traffic(user)
    with stage.screen.phase("compare", "Compare the weights") as phase:
        different = digits.different_tensors(weights, other_weights)
        phase.ends_with("DIFFERENT" if different else "identical, bit for bit")
    return TakeoverResults(
        interrupted=interrupted,
        undisturbed=undisturbed,
        steps_wanted=STEPS,
        interruption=interruption,
        readings=readings,
        different_tensors=different,
        weights_blake3=digest.blake3,
        undisturbed_weights_blake3=other_digest.blake3,
        traffic=traffic,
    )


def _submit(user: BatonClient, name: str) -> JobView:
    parameters = {
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "hidden": HIDDEN,
        "learning_rate": LEARNING_RATE,
        "checkpoint_every": CHECKPOINT_EVERY,
    }
    policy = Policy(heartbeat_interval_s=1, retention=Retention(keep_last=100))
    return user.submit(JobSubmit(recipe="digits@1", name=name, parameters=parameters, inputs=[DIGITS], policy=policy))


def _train_with_a_kill(cluster: LocalCluster, user: BatonClient) -> tuple[JobRecord, Interruption]:
    job = _submit(user, "digits, interrupted")
    with cluster.screen.phase("first_worker", "Train: worker 1", STEPS) as phase:
        worker, watch = _start_worker(cluster, user, job, 1, phase)
        watch.until(lambda status: status.step(1) >= KILL_AT * STEPS, f"step {KILL_AT * STEPS:.0f}", TRAIN_S)
        killed_at = time.monotonic()
        processes_killed = worker.kill_group()
        killed_at_step = next(one.progress.step for one in user.attempts(job.id).attempts if one.progress)
        phase.at(killed_at_step)
        phase.ends_with(f"SIGKILL at step {killed_at_step}: {processes_killed} processes gone")
    with cluster.screen.phase("takeover", "Take over: worker 2, elsewhere") as phase:
        phase.at(0, "lease runs out, worker starts")
        worker = cluster.start_worker(2)
        status = JobWatch(user, job.id, worker, phase).until(
            lambda status: status.step(2) > 0, "the first step of worker 2", START_S
        )
        first_new_step_s = time.monotonic() - killed_at
        resumed_from = next(attempt.resumed_step for attempt in status.attempts if attempt.epoch == 2) or 0
        phase.ends_with(f"from checkpoint {resumed_from}, {first_new_step_s:.1f} s after the kill")
    with cluster.screen.phase("second_worker", "Train on: worker 2", STEPS) as phase:
        watch = JobWatch(user, job.id, worker, phase)
        watch.until(lambda status: status.step(2) > killed_at_step, "regaining the lost steps", TRAIN_S)
        regained_s = time.monotonic() - killed_at
        record = _to_the_end(watch, worker, phase)
    return record, Interruption(
        killed_at_step, resumed_from, processes_killed, round(first_new_step_s, 2), round(regained_s, 2)
    )


def _train_undisturbed(cluster: LocalCluster, user: BatonClient) -> JobRecord:
    job = _submit(user, "digits, undisturbed")
    with cluster.screen.phase("undisturbed", "The same undisturbed: worker 3", STEPS) as phase:
        worker, watch = _start_worker(cluster, user, job, 3, phase)
        return _to_the_end(watch, worker, phase)


def _start_worker(
    cluster: LocalCluster, user: BatonClient, job: JobView, number: int, phase: Phase
) -> tuple[Child, JobWatch]:
    """Start a worker, and wait for the first step of the job's first attempt."""
    phase.at(0, "worker starts, fetches the digits")
    worker = cluster.start_worker(number)
    watch = JobWatch(user, job.id, worker, phase)
    watch.until(lambda status: status.step(1) > 0, f"the first step of {worker.name}", START_S)
    return worker, watch


def _to_the_end(watch: JobWatch, worker: Child, phase: Phase) -> JobRecord:
    record = watch.until_end(JobState.COMPLETE, TRAIN_S)
    exit_code = worker.wait(LEAVE_S)
    if exit_code != 0:
        raise DemoError(f"{worker.name} completed the job but left with exit code {exit_code}", worker.log)
    phase.at(STEPS)
    phase.ends_with("complete")
    return record
