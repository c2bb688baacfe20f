"""The demo's plot: train, kill, take over, complete; do the same undisturbed; compare."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from demo.follow import Attempts, Follower, Point, ended, step_of
from demo.saving import Saving
from demo.steps import HIDDEN, STEPS, Steps
from demo.summary import Interruption, Result

from demo import measure, pictures
from demo.failure import DemoError
from demo.processes import Child
from demo.screen import Phase, Screen
from gpu_client.transport.api.client import BatonClient

KILL_AT = 0.40
LEAST_ACCURACY = 0.97
START_S = 120.0
"""Deadline from the start of a worker to its first step."""
TRAIN_S = 180.0
"""Deadline of a training."""
LEAVE_S = 20.0
"""Deadline for a worker to leave when its job is done."""


@dataclass(frozen=True)
class Trained:
    """A job that ran to its end."""

    job_id: str
    attempts: Attempts
    points: list[Point]


def tell(steps: Steps, screen: Screen, report: Path) -> Result:
    """All of it; pictures and numbers go to `report`.

    Raises DemoError for what went or came out wrong, BatonError for what the API refused.
    """
    steps.start_control_plane()
    with steps.user() as user:
        data = steps.push_digits(user)
        interrupted, interruption = _train_with_a_kill(steps, screen, user)
        weights, digest = steps.fetch_model(user, interrupted.job_id, "interrupted")
        with screen.phase("measure", "Measure its accuracy") as phase:
            readings = measure.read_digits(weights, HIDDEN, data.held_out)
            phase.ends_with(f"{100 * readings.accuracy:.1f} % of {len(readings.predicted)} held-out digits")
        if readings.accuracy < LEAST_ACCURACY:
            raise DemoError(
                f"the fetched model reads only {100 * readings.accuracy:.1f} % of the held-out digits correctly; "
                f"at least {100 * LEAST_ACCURACY:g} % were expected"
            )
        undisturbed = _train_undisturbed(steps, screen, user)
        other_weights, other_digest = steps.fetch_model(user, undisturbed.job_id, "undisturbed")
        callers = steps.callers(user)
    with screen.phase("compare", "Compare the weights") as phase:
        different = measure.different_tensors(weights, other_weights)
        phase.ends_with("DIFFERENT" if different else "identical, bit for bit")
    with screen.phase("draw", "Draw the pictures") as phase:
        pictures.draw_loss(interrupted.points, undisturbed.points, interruption, STEPS, report / "loss.png")
        pictures.draw_predictions(readings, report / "predictions.png")
        pictures.draw_time(Saving.of(interrupted.attempts, undisturbed.attempts), report / "time.png")
        phase.ends_with("loss.png, predictions.png, time.png")
    result = Result(
        job_id=interrupted.job_id,
        undisturbed_job_id=undisturbed.job_id,
        steps_wanted=STEPS,
        interruption=interruption,
        attempts=interrupted.attempts,
        undisturbed_attempts=undisturbed.attempts,
        accuracy=readings.accuracy,
        held_out=len(readings.predicted),
        different_tensors=different,
        weights_blake3=digest.blake3,
        undisturbed_weights_blake3=other_digest.blake3,
        callers=callers,
        durations_s={**screen.durations_s, "total": round(screen.elapsed_s, 2)},
    )
    (report / "summary.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n", encoding="utf-8")
    if different:
        raise DemoError(f"interrupted and undisturbed training ended in different weights: {', '.join(different)}")
    return result


def _train_with_a_kill(steps: Steps, screen: Screen, user: BatonClient) -> tuple[Trained, Interruption]:
    job = steps.submit(user, "digits, interrupted")
    follower = Follower(user, job.id)
    with screen.phase("first_worker", "Train: worker 1", STEPS) as phase:
        phase.at(0, "worker starts, fetches the digits")
        worker = steps.start_worker(1)
        _first_step(follower, 1, worker)
        follower.until(
            lambda attempts: (step_of(attempts, 1) or 0) >= KILL_AT * STEPS,
            deadline_s=TRAIN_S,
            what=f"training to {100 * KILL_AT:.0f} %",
            worker=worker,
            on_step=lambda attempts: _show_step(phase, attempts, 1),
        )
        killed_at = time.monotonic()
        processes_killed = worker.kill_group()
        killed_at_step = step_of(follower.look(), 1) or 0
        phase.at(killed_at_step)
        phase.ends_with(f"SIGKILL at step {killed_at_step}: {processes_killed} processes gone")
    with screen.phase("takeover", "Take over: worker 2, elsewhere") as phase:
        phase.at(0, "lease runs out, worker starts")
        worker = steps.start_worker(2)
        attempts = _first_step(follower, 2, worker)
        first_new_step_s = time.monotonic() - killed_at
        resumed_from = next(attempt.resumed_step for attempt in attempts if attempt.epoch == 2) or 0
        phase.ends_with(f"from checkpoint {resumed_from}, {first_new_step_s:.1f} s after the kill")
    if not 0 < resumed_from <= killed_at_step:
        raise DemoError(
            f"worker 2 resumed from step {resumed_from}, but worker 1 had come to {killed_at_step}", worker.log
        )
    with screen.phase("second_worker", "Train on: worker 2", STEPS) as phase:
        follower.until(
            lambda attempts: (step_of(attempts, 2) or 0) > killed_at_step,
            deadline_s=TRAIN_S,
            what="regaining the lost steps",
            worker=worker,
            on_step=lambda attempts: _show_step(phase, attempts, 2),
        )
        regained_s = time.monotonic() - killed_at
        trained = _to_the_end(follower, job.id, 2, worker, phase)
    return trained, Interruption(
        killed_at_step=killed_at_step,
        resumed_from_step=resumed_from,
        processes_killed=processes_killed,
        first_new_step_s=round(first_new_step_s, 2),
        regained_s=round(regained_s, 2),
    )


def _train_undisturbed(steps: Steps, screen: Screen, user: BatonClient) -> Trained:
    job = steps.submit(user, "digits, undisturbed")
    follower = Follower(user, job.id)
    with screen.phase("undisturbed", "The same undisturbed: worker 3", STEPS) as phase:
        phase.at(0, "worker starts, fetches the digits")
        worker = steps.start_worker(3)
        _first_step(follower, 1, worker)
        return _to_the_end(follower, job.id, 1, worker, phase)


def _first_step(follower: Follower, epoch: int, worker: Child) -> Attempts:
    return follower.until(
        lambda attempts: step_of(attempts, epoch) is not None,
        deadline_s=START_S,
        what=f"the first step of {worker.name}",
        worker=worker,
    )


def _to_the_end(follower: Follower, job_id: str, epoch: int, worker: Child, phase: Phase) -> Trained:
    follower.until(
        lambda attempts: ended(attempts, epoch),
        deadline_s=TRAIN_S,
        what=f"the training of {worker.name}",
        worker=worker,
        on_step=lambda attempts: _show_step(phase, attempts, epoch),
    )
    exit_code = worker.wait(LEAVE_S)
    if exit_code != 0:
        raise DemoError(f"{worker.name} completed the job but left with exit code {exit_code}", worker.log)
    phase.at(STEPS)
    phase.ends_with("complete")
    follower.look_back()
    return Trained(job_id, follower.look(), follower.curve.points)


def _show_step(phase: Phase, attempts: Attempts, epoch: int) -> None:
    for attempt in attempts:
        if attempt.epoch == epoch and attempt.progress:
            loss = attempt.progress.metrics.get("loss")
            phase.at(attempt.progress.step, f"step {attempt.progress.step}" + (f", loss {loss:.3f}" if loss else ""))
