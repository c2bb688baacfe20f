"""Measurements and claims of the scenario: the diverged, the spiked and the steered job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from baton.contract.jobs.history import EventType
from baton.contract.rules.document import presets
from demo.jobs import JobRecord
from demo.runner import Claim
from gpu_client.cli.jobs.rule_events import line_of

LEAST_ACCURACY = 0.95
HISTORY = frozenset(
    {
        EventType.RULE_FIRED,
        EventType.RULE_UPDATED,
        EventType.ACTION_APPLIED,
        EventType.ACTION_FAILED,
        EventType.ACTION_REJECTED,
        EventType.ROLLED_BACK,
    }
)
DEFINITIONS = {
    "steps_saved": "steps of the diverging job that were not trained",
    "steps_saved_share": "steps_saved as a share of all steps of the diverging job",
    "machine_time_saved_s": "steps_saved at the seconds per step of the job without rules: GPU time on a "
    "machine with a GPU",
    "steps_repeated": "steps between the spike and the checkpoint to which the job was rolled back",
    "final_loss": "mean over the last 20 steps, in nats",
    "accuracy": "share of held-out digits read correctly by the fetched weights, measured by the demo",
    "history": "effects of rules and commands, in the words of `baton watch`",
}


@dataclass(frozen=True)
class Firing:
    """A rule that fired, with the values that it read."""

    rule: str
    step: int
    operands: dict[str, Any]

    @property
    def because(self) -> str:
        """Format the longest expression that has a number: `mean(loss, 10) = 757`; without one, all values."""
        numbers = {text: value for text, value in self.operands.items() if isinstance(value, int | float)}
        if not numbers:
            return ", ".join(f"{text} = {value}" for text, value in self.operands.items())
        text = max(numbers, key=len)
        return f"{text} = {numbers[text]:.3g}"


def firings(record: JobRecord) -> list[Firing]:
    """Return the firings of the job's own rules, oldest first."""
    return [
        Firing(str(data["rule"]), int(data["step"]), dict(data.get("operands") or {}))
        for data in record.event_data(EventType.RULE_FIRED)
        if data["rule"] not in presets.NAMES
    ]


@dataclass(frozen=True)
class Diverged:
    """The job whose learning rate was too high. `condition`: of the rule that failed it."""

    record: JobRecord
    steps_wanted: int
    condition: str

    @property
    def steps_saved(self) -> int:
        """Return the number of steps that were not trained."""
        return self.steps_wanted - self.record.last_step

    @property
    def share_saved(self) -> float:
        """Return the share of the job's steps that were not trained, 0 to 1."""
        return self.steps_saved / self.steps_wanted


@dataclass(frozen=True)
class Spiked:
    """The job with damaged batches and a rule, and the same job without rules. `condition`: of the rule."""

    record: JobRecord
    without: JobRecord
    accuracy: float
    unruled_accuracy: float
    steps_wanted: int
    condition: str

    @property
    def rollbacks(self) -> list[dict[str, Any]]:
        """Return each rollback's `step`, `to_step`, `skip` and `lr_factor`."""
        return self.record.event_data(EventType.ROLLED_BACK)

    @property
    def steps_repeated(self) -> int:
        """Return the number of steps that the rollbacks threw away."""
        return sum(back["step"] - back["to_step"] for back in self.rollbacks)

    def rollback_failure(self) -> str:
        """Compare the first step after the last rollback with the rollback; "" if step, batch and rate are right."""
        back, factor = self.rollbacks[-1], math.prod(one["lr_factor"] for one in self.rollbacks)
        epoch = self.record.epochs[-1]
        first = self.record.of_attempt(epoch)[0]
        same = next(one for one in self.without.steps if one.step == first.step)
        skipped = int(first.metrics["batch"]) - first.step
        rate, expected = first.metrics["lr"], same.metrics["lr"] * factor
        if first.step != back["to_step"] + 1:
            return f"attempt {epoch} went on at step {first.step}, after a rollback to {back['to_step']}"
        if skipped < back["skip"]:
            return f"attempt {epoch} passed over {skipped} batches, not {back['skip']}"
        if not math.isclose(rate, expected, rel_tol=1e-6):
            return f"attempt {epoch} went on with learning rate {rate:g}, not with {expected:g}"
        return ""

    def accuracy_failure(self) -> str:
        """Return why the accuracy after the rollback is too low; "" if it is not."""
        if self.accuracy >= max(LEAST_ACCURACY, self.unruled_accuracy):
            return ""
        return (
            f"the job that was rolled back reads {100 * self.accuracy:.1f} % of the held-out digits, the one without "
            f"rules {100 * self.unruled_accuracy:.1f} %; at least {100 * LEAST_ACCURACY:g} %, and more, was expected"
        )


@dataclass(frozen=True)
class Steered:
    """The job that was steered while it ran, with the step of each effect. `condition`: of the rule that ended it."""

    record: JobRecord
    saved_at: int
    revision: int
    in_force_at: int
    ended_at: int
    accuracy: float
    steps_wanted: int
    condition: str


@dataclass(frozen=True)
class RulesResults:
    """All jobs of the scenario."""

    diverged: Diverged
    spiked: Spiked
    steered: Steered

    @property
    def time_saved_s(self) -> float:
        """Return the machine seconds that the diverging job did not use."""
        without = self.spiked.without
        goodputs = [one.progress.goodput for one in without.attempts if one.progress and one.progress.goodput]
        step_s = sum(one.productive_s for one in goodputs) / max(without.last_step, 1)
        return self.diverged.steps_saved * step_s

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        diverged, spiked, steered = self.diverged, self.spiked, self.steered
        return {
            "diverging": {
                **_job(diverged.record, diverged.steps_wanted),
                "steps_saved": diverged.steps_saved,
                "steps_saved_share": round(diverged.share_saved, 4),
                "machine_time_saved_s": round(self.time_saved_s, 2),
            },
            "spiking": {
                **_job(spiked.record, spiked.steps_wanted),
                "rollbacks": spiked.rollbacks,
                "steps_repeated": spiked.steps_repeated,
                "accuracy": round(spiked.accuracy, 6),
            },
            "spiking_without_rules": {
                **_job(spiked.without, spiked.steps_wanted),
                "accuracy": round(spiked.unruled_accuracy, 6),
            },
            "live": {
                **_job(steered.record, steered.steps_wanted),
                "saved_at_step": steered.saved_at,
                "revision": steered.revision,
                "revision_in_force_at_step": steered.in_force_at,
                "ended_at_step": steered.ended_at,
                "accuracy": round(steered.accuracy, 6),
            },
            "definitions": DEFINITIONS,
        }

    def claims(self) -> list[Claim]:
        """Return the claims: one job stopped, one rolled back and saved, one steered and ended."""
        diverged, spiked, steered = self.diverged, self.spiked, self.steered
        fired, spike, enough = (firings(one.record)[-1] for one in (diverged, spiked, steered))
        back, accuracy = spiked.rollbacks[-1], f"{100 * steered.accuracy:.1f} %"
        return [
            Claim(
                f"Learning rate too high: rule {fired.rule} fired at step {fired.step} ({fired.because}) and failed "
                f"the job. {diverged.steps_saved} of {diverged.steps_wanted} steps "
                f"({100 * diverged.share_saved:.0f} % of machine time, here {self.time_saved_s:.0f} s) were saved."
            ),
            Claim(
                f"Damaged batches: rule {spike.rule} fired at step {spike.step} ({spike.because}). The job went back "
                f"to the checkpoint of step {back['to_step']}, passed over {back['skip']} batches and went on at "
                f"{back['lr_factor']:g} times the learning rate; {spiked.steps_repeated} steps were thrown away. The "
                f"model reads {100 * spiked.accuracy:.1f} % of the held-out digits, loss "
                f"{final_loss(spiked.record):.3g}.",
                spiked.rollback_failure() or spiked.accuracy_failure(),
            ),
            Claim(
                f"The same job without rules never recovered: {100 * spiked.unruled_accuracy:.1f} %, loss "
                f"{final_loss(spiked.without):.3g}. Baton reported nothing; the job ended as complete."
            ),
            Claim(
                f"Steered while it ran: the command save was carried out after step {steered.saved_at}, revision "
                f"{steered.revision} of the rules was in force from step {steered.in_force_at}, and its rule "
                f"{enough.rule} ({enough.because}) ended the job as complete at step {steered.ended_at} of "
                f"{steered.steps_wanted}. The model reads {accuracy}.",
                "" if steered.accuracy >= LEAST_ACCURACY else f"the steered job reads only {accuracy} of the digits",
            ),
        ]


def final_loss(record: JobRecord) -> float:
    """Return the mean loss of the last 20 steps."""
    last = record.steps[-20:]
    return sum(one.loss for one in last) / len(last)


def _job(record: JobRecord, steps_wanted: int) -> dict[str, Any]:
    loss = final_loss(record)
    return {
        "job_id": record.job.id,
        "state": record.job.state,
        "ended_by": record.job.ended_by.model_dump(mode="json") if record.job.ended_by else None,
        "attempts": len(record.attempts),
        "steps_trained": len(record.steps),
        "final_loss": round(loss, 6) if math.isfinite(loss) else str(loss),
        "history": [line_of(event) for event in record.events if event.type in HISTORY],
        "steps_wanted": steps_wanted,
    }
