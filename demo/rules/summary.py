"""The numbers of this demo: what they are, what they have to be, and how they are told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from baton.contract.history import EventType
from demo.rules.account import Account
from gpu_client.cli.firings import line_of

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
    "steps_saved": "steps of the diverging job that nobody trained",
    "steps_saved_share": "of all of its steps",
    "machine_time_saved_s": "what these steps take, at the seconds a step of the job without rules: time of a GPU, "
    "where there is one",
    "steps_repeated": "steps between the checkpoint that was gone back to and the spike",
    "final_loss": "mean over the last 20 steps, in nats",
    "accuracy": "share of held-out digits read correctly by the fetched weights, measured by the demo",
    "history": "what rules and commands did, as `baton watch` tells it",
}


@dataclass(frozen=True)
class Diverged:
    """The job whose learning rate was too high."""

    account: Account
    steps_wanted: int
    condition: str
    """Of the rule."""

    @property
    def steps_saved(self) -> int:
        """Not trained."""
        return self.steps_wanted - self.account.last_step


@dataclass(frozen=True)
class Spiked:
    """The job with damaged batches, rolled back, and the same without rules."""

    account: Account
    without: Account
    accuracy: float
    unruled_accuracy: float
    steps_wanted: int
    condition: str
    """Of the rule."""

    @property
    def rollbacks(self) -> list[dict[str, Any]]:
        """Each with `step`, `to_step`, `skip`, `lr_factor`."""
        return self.account.told(EventType.ROLLED_BACK)

    @property
    def steps_repeated(self) -> int:
        """Trained, and thrown away."""
        return sum(back["step"] - back["to_step"] for back in self.rollbacks)

    def wrong(self) -> str:
        """What is not as the rollbacks say, of the first step after the last of them; "" if all is."""
        back, factor = self.rollbacks[-1], math.prod(one["lr_factor"] for one in self.rollbacks)
        epoch = self.account.epochs[-1]
        first = self.account.of_attempt(epoch)[0]
        same = next(one for one in self.without.steps if one.step == first.step)
        skipped = first.batch - first.step
        if first.step != back["to_step"] + 1:
            return f"attempt {epoch} went on at step {first.step}, after a rollback to {back['to_step']}"
        if skipped < back["skip"]:
            return f"attempt {epoch} passed over {skipped} batches, not {back['skip']}"
        if not math.isclose(first.lr, same.lr * factor, rel_tol=1e-6):
            return f"attempt {epoch} went on with learning rate {first.lr:g}, not with {same.lr * factor:g}"
        return ""


@dataclass(frozen=True)
class Live:
    """The job that was told things while it ran; steps at which they came to be."""

    account: Account
    saved_at: int
    revision: int
    in_force_at: int
    ended_at: int
    accuracy: float
    steps_wanted: int
    condition: str
    """Of the rule."""


@dataclass(frozen=True)
class Result:
    """Everything that a run found out."""

    diverged: Diverged
    spiked: Spiked
    live: Live
    durations_s: dict[str, float]

    @property
    def time_saved_s(self) -> float:
        """By stopping what diverged."""
        a_step_s = self.spiked.without.productive_s / max(self.spiked.without.last_step, 1)
        return self.diverged.steps_saved * a_step_s

    def as_dict(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        diverged, spiked, live = self.diverged, self.spiked, self.live
        return {
            "diverging": {
                **_job(diverged.account),
                "steps_wanted": diverged.steps_wanted,
                "steps_saved": diverged.steps_saved,
                "steps_saved_share": round(diverged.steps_saved / diverged.steps_wanted, 4),
                "machine_time_saved_s": round(self.time_saved_s, 2),
            },
            "spiking": {
                **_job(spiked.account),
                "steps_wanted": spiked.steps_wanted,
                "rollbacks": spiked.rollbacks,
                "steps_repeated": spiked.steps_repeated,
                "accuracy": round(spiked.accuracy, 6),
            },
            "spiking_without_rules": {
                **_job(spiked.without),
                "steps_wanted": spiked.steps_wanted,
                "accuracy": round(spiked.unruled_accuracy, 6),
            },
            "live": {
                **_job(live.account),
                "steps_wanted": live.steps_wanted,
                "saved_at_step": live.saved_at,
                "revision": live.revision,
                "revision_in_force_at_step": live.in_force_at,
                "ended_at_step": live.ended_at,
                "accuracy": round(live.accuracy, 6),
            },
            "durations_s": self.durations_s,
            "definitions": DEFINITIONS,
        }

    def in_plain_words(self) -> list[str]:
        """What just happened, a sentence or two a line."""
        diverged, spiked, live = self.diverged, self.spiked, self.live
        fired, spike, enough = (one.account.firings[-1] for one in (diverged, spiked, live))
        back = spiked.rollbacks[-1]
        return [
            f"Learning rate too high: rule {fired.rule} fired at step {fired.step} ({fired.because}) and failed the "
            f"job. {diverged.steps_saved} of {diverged.steps_wanted} steps "
            f"({100 * diverged.steps_saved / diverged.steps_wanted:.0f} % of the machine's time, here "
            f"{self.time_saved_s:.0f} s) were not burned.",
            f"Damaged batches: rule {spike.rule} fired at step {spike.step} ({spike.because}). The job went back to "
            f"the checkpoint of step {back['to_step']}, passed over {back['skip']} batches and went on at "
            f"{back['lr_factor']:g} times the learning rate; {spiked.steps_repeated} steps were thrown away. It reads "
            f"{100 * spiked.accuracy:.1f} % of the held-out digits, loss {final_loss(spiked.account):.3g}.",
            f"The same without rules never recovered: {100 * spiked.unruled_accuracy:.1f} %, loss "
            f"{final_loss(spiked.without):.3g}. Nobody was told; it ended as complete.",
            f"Told while it ran: the command save was carried out after step {live.saved_at}, revision "
            f"{live.revision} of the rules was in force from step {live.in_force_at}, and its rule {enough.rule} "
            f"({enough.because}) ended the job as complete at step {live.ended_at} of {live.steps_wanted}. It reads "
            f"{100 * live.accuracy:.1f} %.",
        ]


def final_loss(account: Account) -> float:
    """Mean over its last 20 steps."""
    last = account.steps[-20:]
    return sum(one.loss for one in last) / len(last)


def _job(account: Account) -> dict[str, Any]:
    loss = final_loss(account)
    return {
        "job_id": account.job.id,
        "state": account.job.state,
        "ended_by": account.job.ended_by.model_dump(mode="json") if account.job.ended_by else None,
        "attempts": len(account.attempts),
        "steps_trained": len(account.steps),
        "final_loss": round(loss, 6) if math.isfinite(loss) else str(loss),
        "history": [line_of(event) for event in account.events if event.type in HISTORY],
    }
