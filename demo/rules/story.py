"""The plot: a training diverges, one spikes, with rules and without, and one goes well and is steered while it runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.rules.account import Account, ask
from demo.rules.summary import Diverged, Live, Result, Spiked
from demo.steps import HIDDEN, MODEL, PREFIX, Steps

from baton.contract.history import EventType
from baton.contract.jobs import InputRef, JobState, JobSubmit, JobView, Policy, Retention
from baton.contract.rules.document import load
from baton.contract.steering import CommandKind, CommandRequest
from demo import measure
from demo.digits import Digits
from demo.failure import DemoError
from demo.processes import Child
from demo.rules import pictures
from demo.screen import Phase, Screen
from gpu_client.transport.api.client import BatonClient

HERE = Path(__file__).resolve().parent
STEPS = 300
TOO_HIGH = 1.0
"""A learning rate; 0.003 does well."""
DAMAGED = (161, 180)
LIVE_STEPS = 3000
"""More than it takes: a rule is to end it."""
LIVE_FROM = 30
"""The step from which on the live training is told things."""
TAG = "by-hand"
LEAST_ACCURACY = 0.95
JOB_S = 150.0
"""Deadline of a job, its worker's start included."""
ACKNOWLEDGE_S = 30.0
POLL_S = 0.3


def tell(steps: Steps, screen: Screen, report: Path) -> Result:
    """All of it; picture and numbers go to `report`.

    Raises DemoError for what went or came out wrong, BatonError for what the API refused.
    """
    steps.start_control_plane()
    with steps.user() as user:
        data = steps.push_digits(user)
        worker = steps.start_worker(1, max_jobs=None)
        diverged = _diverge(screen, user, worker)
        spiked = _spike(steps, screen, user, worker, data)
        live = _live(steps, screen, user, worker, data)
    result = Result(diverged, spiked, live, {**screen.durations_s, "total": round(screen.elapsed_s, 2)})
    with screen.phase("draw", "Draw the picture") as phase:
        pictures.figure_of(result).savefig(report / "rules.png")
        phase.ends_with("rules.png")
    (report / "summary.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n", encoding="utf-8")
    return result


def rules(name: str) -> str:
    """One of the documents that lie here."""
    return (HERE / f"{name}.yaml").read_text(encoding="utf-8")


def _condition(document: str, rule: str) -> str:
    found = load(rules(document)).rules
    assert found is not None
    return next(one.when.text for one in found.rules if one.name == rule)


def _submit(user: BatonClient, name: str, text: str | None, **parameters: Any) -> JobView:
    return user.submit(
        JobSubmit(
            command=[sys.executable, str(HERE / "training.py")],
            name=name,
            parameters={"hidden": HIDDEN, **parameters},
            inputs=[InputRef(prefix=PREFIX, into="digits")],
            outputs=[MODEL],
            # Told every second, and every checkpoint kept: people watch.
            policy=Policy(heartbeat_interval_s=1, max_failures=1, retention=Retention(keep_last=100)),
            rules=text,
        )
    )


def _diverge(screen: Screen, user: BatonClient, worker: Child) -> Diverged:
    with screen.phase("diverging", "Diverge: stopped by a rule", STEPS) as phase:
        job = _submit(user, "too high a rate", rules("diverging"), steps=STEPS, learning_rate=TOO_HIGH)
        account = _Watch(user, job.id, worker, phase).to_the_end(JobState.FAILED)
        by = account.job.ended_by
        if by is None or by.rule != "diverging" or account.last_step != by.step:
            raise DemoError(f"rule diverging should have ended the diverging job, but it was {by}", worker.log)
        phase.ends_with(f"failed at step {by.step} of {STEPS}, by rule {by.rule}")
    return Diverged(account, STEPS, _condition("diverging", "diverging"))


def _spike(steps: Steps, screen: Screen, user: BatonClient, worker: Child, data: Digits) -> Spiked:
    damaged = {"damaged_from": DAMAGED[0], "damaged_to": DAMAGED[1]}
    with screen.phase("unruled", "Spike: without rules", STEPS) as phase:
        job = _submit(user, "damaged batches", None, steps=STEPS, **damaged)
        without = _Watch(user, job.id, worker, phase).to_the_end(JobState.COMPLETE)
        phase.ends_with(f"complete, last loss {without.steps[-1].loss:.3g}")
    with screen.phase("ruled", "Spike: rolled back by a rule", STEPS) as phase:
        job = _submit(user, "damaged batches, with rules", rules("spiking"), steps=STEPS, **damaged)
        ruled = _Watch(user, job.id, worker, phase).to_the_end(JobState.COMPLETE)
        went_back = ruled.told(EventType.ROLLED_BACK)
        if not went_back:
            raise DemoError("rule spike did not roll the spiking job back", worker.log)
        back = went_back[-1]
        phase.ends_with(f"complete, back from step {back['step']} to {back['to_step']}")
    accuracy = _accuracy(steps, user, data, ruled, "rolled_back")
    unruled_accuracy = _accuracy(steps, user, data, without, "unruled")
    spiked = Spiked(ruled, without, accuracy, unruled_accuracy, STEPS, _condition("spiking", "spike"))
    if wrong := spiked.wrong():
        raise DemoError(wrong, worker.log)
    if accuracy < max(LEAST_ACCURACY, unruled_accuracy):
        raise DemoError(
            f"the job that was rolled back reads {100 * accuracy:.1f} % of the held-out digits, the one without rules "
            f"{100 * unruled_accuracy:.1f} %; at least {100 * LEAST_ACCURACY:g} %, and more, was expected"
        )
    return spiked


def _live(steps: Steps, screen: Screen, user: BatonClient, worker: Child, data: Digits) -> Live:
    with screen.phase("live", "Go well: steered while it runs") as phase:
        job = _submit(user, "steered", rules("watching"), steps=LIVE_STEPS)
        watch = _Watch(user, job.id, worker, phase)
        watch.until(lambda now: _step(now) >= LIVE_FROM, "its first steps", JOB_S)
        given = user.command(job.id, CommandRequest(kind=CommandKind.SAVE, tag=TAG))
        watch.until(
            lambda _: _command(user, job.id, given.seq)[0] != "waiting",
            "the answer to the command save",
            ACKNOWLEDGE_S,
        )
        status, saved_at = _command(user, job.id, given.seq)
        if status != "applied" or saved_at is None:
            raise DemoError(f"the command save was {status}", worker.log)
        revision = user.put_rules(job.id, rules("enough"), if_revision=1).newest
        assert revision is not None
        watch.until(
            lambda _: _in_force(user, job.id)[0] >= revision.revision,
            f"revision {revision.revision} of the rules in force",
            ACKNOWLEDGE_S,
        )
        _, in_force_at = _in_force(user, job.id)
        account = watch.to_the_end(JobState.COMPLETE)
        by = account.job.ended_by
        if by is None or (by.rule, by.revision) != ("good-enough", revision.revision):
            raise DemoError(f"rule good-enough should have ended the steered job, but it was {by}", worker.log)
        if saved_at not in [one.step for one in account.checkpoints]:
            raise DemoError(f"the command save was applied at step {saved_at}, but no checkpoint is there", worker.log)
        phase.ends_with(f"saved at {saved_at}, new rules at {in_force_at}, complete at {by.step} of {LIVE_STEPS}")
    accuracy = _accuracy(steps, user, data, account, "live")
    if accuracy < LEAST_ACCURACY:
        raise DemoError(f"the job that was good enough reads only {100 * accuracy:.1f} % of the held-out digits")
    condition = _condition("enough", "good-enough")
    return Live(account, saved_at, revision.revision, in_force_at, by.step, accuracy, LIVE_STEPS, condition)


def _command(user: BatonClient, job_id: str, seq: int) -> tuple[str, int | None]:
    found = next(one for one in user.commands(job_id).commands if one.seq == seq)
    return found.status, found.step


def _in_force(user: BatonClient, job_id: str) -> tuple[int, int]:
    """The revision that the training goes by, and since which step."""
    said = user.rules(job_id).acknowledged
    if said is not None and said.rejected is not None:
        raise DemoError(f"revision {said.rejected} of the rules was rejected: {said.reason}")
    return (0, 0) if said is None or said.step is None else (said.revision, said.step)


def _accuracy(steps: Steps, user: BatonClient, data: Digits, account: Account, name: str) -> float:
    weights, _ = steps.fetch_model(user, account.job.id, name)
    return measure.read_digits(weights, HIDDEN, data.held_out).accuracy


class _Watch:
    """On one job and the worker that is to do it; what is seen is shown in `phase`."""

    def __init__(self, user: BatonClient, job_id: str, worker: Child, phase: Phase) -> None:
        self._user = user
        self._job_id = job_id
        self._worker = worker
        self._phase = phase

    def to_the_end(self, expected: JobState) -> Account:
        """Wait until it has ended. Raises DemoError if not as expected."""
        self.until(lambda now: now.state.terminal, "the job", JOB_S)
        account = ask(self._user, self._job_id)
        if account.job.state is not expected:
            because = _why(account.job)
            raise DemoError(f"the job should be {expected} but is {account.job.state}: {because}", self._worker.log)
        if not account.steps:
            raise DemoError("the job has no output that tells of its steps", self._worker.log)
        return account

    def until(self, condition: Callable[[JobView], bool], what: str, deadline_s: float) -> None:
        """Poll until `condition` holds.

        Raises DemoError after `deadline_s`, if the job ends first, or if the worker has left.
        """
        until = time.monotonic() + deadline_s
        while True:
            # Asked before the job is: a worker may finish between the two questions.
            left_with = self._worker.exit_code
            job = self._user.get_job(self._job_id)
            self._show(job)
            if condition(job):
                return
            if job.state.terminal:
                raise DemoError(f"the job is {job.state} before {what} came: {_why(job)}", self._worker.log)
            if left_with is not None:
                name = self._worker.name
                raise DemoError(f"{name} left before its work was done, with exit code {left_with}", self._worker.log)
            if time.monotonic() > until:
                raise DemoError(f"{what} took more than {deadline_s:.0f} s", self._worker.log)
            time.sleep(POLL_S)

    def _show(self, job: JobView) -> None:
        if job.progress is not None:
            loss = job.progress.metrics.get("loss")
            step = job.progress.step
            self._phase.at(step, f"step {step}" + (f", loss {loss:.3g}" if loss is not None else ""))


def _why(job: JobView) -> str:
    return job.reason.message or job.reason.code if job.reason else "no reason given"


def _step(job: JobView) -> int:
    return job.progress.step if job.progress is not None else 0
