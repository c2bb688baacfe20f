"""The scenario: a training diverges; one spikes, with rules and without; one goes well and is steered while it runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import JobState, JobSubmit, JobView
from baton.contract.jobs.policy import Policy, Retention
from baton.contract.rules.document.loader import load
from baton.contract.worker.control import CommandKind, CommandRequest
from demo.cluster import DIGITS, HIDDEN, MODEL, LocalCluster
from demo.digits import Digits, read_digits
from demo.failure import DemoError
from demo.jobs import JobRecord, JobWatch
from demo.processes import Child
from demo.rules.results import Diverged, RulesResults, Spiked, Steered
from demo.runner import Stage
from demo.screen import Phase
from gpu_client.transport.api.client import BatonClient

HERE = Path(__file__).resolve().parent
STEPS = 300
TOO_HIGH = 1.0
"""A learning rate; 0.003 does well."""
DAMAGED = {"damaged_from": 161, "damaged_to": 180}
LIVE_STEPS = 3000
"""More than the training needs, because a rule shall end it."""
LIVE_FROM = 30
"""Step of the live training from which on commands are sent."""
JOB_S = 150.0
"""Deadline of each step of a job, of the first one with its worker's start."""
ACKNOWLEDGE_S = 30.0
TAG = "by-hand"
"""Tag of the checkpoint that the command orders."""


def play(stage: Stage) -> RulesResults:
    """Run the scenario. Raises DemoError for a step that failed, BatonError for a failed call."""
    cluster = LocalCluster(stage)
    with cluster.user() as user:
        data = cluster.push_digits(user)
        trainings = Trainings(cluster, user, cluster.start_worker(1, max_jobs=None), data)
        return RulesResults(trainings.diverge(), trainings.spike(), trainings.steer())


def document(name: str) -> str:
    """Read a rules document of this folder."""
    return (HERE / f"{name}.yaml").read_text(encoding="utf-8")


def condition(name: str, rule: str) -> str:
    """Return the condition of a rule in a document of this folder."""
    rules = load(document(name)).rules
    assert rules is not None
    return next(one.when.text for one in rules.rules if one.name == rule)


@dataclass(frozen=True)
class Trainings:
    """The trainings, all by one worker."""

    cluster: LocalCluster
    user: BatonClient
    worker: Child
    data: Digits

    def diverge(self) -> Diverged:
        """Train at a learning rate that is too high, until a rule fails the job."""
        with self.cluster.screen.phase("diverging", "Diverge: stopped by a rule", STEPS) as phase:
            job = self._submit("too high a rate", document("diverging"), steps=STEPS, learning_rate=TOO_HIGH)
            record = self._watch(job, phase).until_end(JobState.FAILED, JOB_S)
            by = record.job.ended_by
            if by is None or by.rule != "diverging" or record.last_step != by.step:
                raise DemoError(f"rule diverging should have ended the job, not {by}", self.worker.log)
            phase.ends_with(f"failed at step {by.step} of {STEPS}, by rule {by.rule}")
        return Diverged(record, STEPS, condition("diverging", "diverging"))

    def spike(self) -> Spiked:
        """Train on damaged batches, without rules and with a rule that rolls the job back."""
        with self.cluster.screen.phase("unruled", "Spike: without rules", STEPS) as phase:
            job = self._submit("damaged batches", None, steps=STEPS, **DAMAGED)
            without = self._watch(job, phase).until_end(JobState.COMPLETE, JOB_S)
            phase.ends_with(f"complete, last loss {without.steps[-1].loss:.3g}")
        with self.cluster.screen.phase("ruled", "Spike: rolled back by a rule", STEPS) as phase:
            job = self._submit("damaged batches, with rules", document("spiking"), steps=STEPS, **DAMAGED)
            record = self._watch(job, phase).until_end(JobState.COMPLETE, JOB_S)
            rollbacks = record.event_data(EventType.ROLLED_BACK)
            if not rollbacks:
                raise DemoError("rule spike did not roll the spiking job back", self.worker.log)
            phase.ends_with(f"complete, back from step {rollbacks[-1]['step']} to {rollbacks[-1]['to_step']}")
        accuracy, unruled_accuracy = self._accuracy(record, "rolled_back"), self._accuracy(without, "unruled")
        return Spiked(record, without, accuracy, unruled_accuracy, STEPS, condition("spiking", "spike"))

    def steer(self) -> Steered:
        """Send a running training the command to save, then the rules that end it."""
        with self.cluster.screen.phase("live", "Go well: steered while it runs") as phase:
            job = self._submit("steered", document("watching"), steps=LIVE_STEPS)
            watch = self._watch(job, phase)
            watch.until(lambda status: status.step(1) >= LIVE_FROM, f"step {LIVE_FROM}", JOB_S)
            saved_at = self._save(job, watch)
            revision, in_force_at = self._replace_rules(job, watch)
            record = watch.until_end(JobState.COMPLETE, JOB_S)
            by = record.job.ended_by
            if by is None or (by.rule, by.revision) != ("good-enough", revision):
                raise DemoError(f"rule good-enough should have ended the job, not {by}", self.worker.log)
            # While another checkpoint is on its way, the order is carried out with the first one after it.
            if not any(one.tag == TAG and one.step >= saved_at for one in self.user.checkpoints(job.id).checkpoints):
                raise DemoError(
                    f"the command save was applied at step {saved_at} without a checkpoint", self.worker.log
                )
            phase.ends_with(f"saved at {saved_at}, new rules at {in_force_at}, complete at {by.step} of {LIVE_STEPS}")
        accuracy, when = self._accuracy(record, "live"), condition("enough", "good-enough")
        return Steered(record, saved_at, revision, in_force_at, by.step, accuracy, LIVE_STEPS, when)

    def _save(self, job: JobView, watch: JobWatch) -> int:
        """Send the command to save; returns the step after which the training carried it out."""
        sent = self.user.command(job.id, CommandRequest(kind=CommandKind.SAVE, tag=TAG))

        def command() -> Any:
            return next(one for one in self.user.commands(job.id).commands if one.seq == sent.seq)

        watch.until(lambda _: command().status != "waiting", "the answer to the command save", ACKNOWLEDGE_S)
        answer = command()
        if answer.status != "applied" or answer.step is None:
            raise DemoError(f"the command save was {answer.status}", self.worker.log)
        return int(answer.step)

    def _replace_rules(self, job: JobView, watch: JobWatch) -> tuple[int, int]:
        """Send the next revision of the rules; returns its number and the step from which it is in force."""
        sent = self.user.put_rules(job.id, document("enough"), if_revision=1).newest
        assert sent is not None
        in_force = (0, 0)

        def acknowledged(_: object) -> bool:
            nonlocal in_force
            answer = self.user.rules(job.id).acknowledged
            if answer is not None and answer.rejected is not None:
                raise DemoError(f"revision {answer.rejected} of the rules was rejected: {answer.reason}")
            if answer is not None and answer.step is not None:
                in_force = (answer.revision, answer.step)
            return in_force[0] >= sent.revision

        watch.until(acknowledged, f"revision {sent.revision} of the rules in force", ACKNOWLEDGE_S)
        return sent.revision, in_force[1]

    def _submit(self, name: str, rules: str | None, **parameters: Any) -> JobView:
        return self.user.submit(
            JobSubmit(
                command=[sys.executable, str(HERE / "training.py")],
                name=name,
                parameters={"hidden": HIDDEN, **parameters},
                inputs=[DIGITS],
                outputs=[MODEL],
                # A person watches, therefore a heartbeat a second and every checkpoint kept.
                policy=Policy(heartbeat_interval_s=1, max_failures=1, retention=Retention(keep_last=100)),
                rules=rules,
            )
        )

    def _watch(self, job: JobView, phase: Phase) -> JobWatch:
        return JobWatch(self.user, job.id, self.worker, phase)

    def _accuracy(self, record: JobRecord, name: str) -> float:
        weights, _ = self.cluster.fetch_model(self.user, record.job.id, name)
        return read_digits(weights, HIDDEN, self.data.held_out).accuracy
