"""What the two trainings and the ring came to be, and how they are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEFINITIONS = {
    "wait_share": "of the time from the first batch on: waiting for a batch; measuring is left out",
    "first_batch_s": "waiting for the first batch",
    "held_out_loss": "mean cross-entropy in nats over pictures that no training has seen, at the end",
    "accuracy": "share of those pictures whose shape is named correctly, at the end",
    "reuse": "samples read per sample that became readable",
    "lost": "samples that a generator had begun to draw and that never became readable",
    "replayed": "samples drawn anew from the seed that is stored with them, and equal bit for bit",
}


@dataclass(frozen=True)
class Step:
    """One batch trained on. `at`: this machine's monotonic clock, in seconds."""

    at: float
    wait_s: float
    step_s: float
    loss: float


@dataclass(frozen=True)
class Measured:
    """How well the training does."""

    at: float
    held_out_loss: float
    accuracy: float


@dataclass(frozen=True)
class Trained:
    """One training. It has at least one step."""

    steps: list[Step]
    measured: list[Measured]

    @property
    def began_at(self) -> float:
        """When it had its first batch."""
        return self.steps[0].at - self.steps[0].step_s

    @property
    def wait_share(self) -> float:
        """Behind the first batch."""
        waited = sum(step.wait_s for step in self.steps[1:])
        return waited / max(waited + sum(step.step_s for step in self.steps), 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """For the summary."""
        last = self.measured[-1]
        return {
            "steps": len(self.steps),
            "wait_share": round(self.wait_share, 4),
            "first_batch_s": round(self.steps[0].wait_s, 2),
            "held_out_loss": round(last.held_out_loss, 4),
            "accuracy": round(last.accuracy, 4),
        }


def trained_of(file: Path) -> Trained:
    """As far as it has come."""
    steps, measured = [], []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        found = json.loads(line)
        if "step_s" in found:
            steps.append(Step(**found))
        else:
            measured.append(Measured(**found))
    return Trained(steps, measured)


@dataclass(frozen=True)
class Look:
    """The ring at one moment."""

    at: float
    readable: int
    inserted: int
    read: int
    newest_s: float
    oldest_s: float
    generators: int


@dataclass(frozen=True)
class Event:
    """Generators were killed, or started."""

    at: float
    killed: int = 0
    started: int = 0


@dataclass(frozen=True)
class Proof:
    """What looking at all samples has shown."""

    begun: int
    """By all generators."""
    inserted: int
    """Of these, readable at some time."""
    kills: int
    objects: int
    """Read and verified in the end."""
    damaged: int
    replayed: int
    wrong: list[str]
    """Ids of samples that their seeds do not give."""

    @property
    def lost(self) -> int:
        """What was being made, or stored, when somebody was killed."""
        return self.begun - self.inserted


@dataclass(frozen=True)
class Result:
    """Everything that a run found out."""

    coupled: Trained
    fed: Trained
    looks: list[Look]
    events: list[Event]
    proof: Proof
    cap: int
    durations_s: dict[str, float]

    @property
    def reuse(self) -> float:
        """In the mean."""
        return self.looks[-1].read / max(self.proof.inserted, 1)

    @property
    def oldest_s(self) -> float:
        """The greatest age at which anything could be read."""
        return max(look.oldest_s for look in self.looks)

    def wrong(self) -> str:
        """What did not come out as it should; "" if all did."""
        proof = self.proof
        if proof.lost > proof.kills or proof.lost < 0:
            return f"{proof.lost} samples were lost in {proof.kills} kills"
        if proof.damaged:
            return f"{proof.damaged} of {proof.objects} stored samples are damaged"
        if proof.wrong:
            return f"sample {proof.wrong[0]} is not what its seed gives"
        if self.fed.wait_share >= self.coupled.wait_share / 2:
            return (
                f"the training waited {100 * self.fed.wait_share:.1f} % of its time with the ring, and "
                f"{100 * self.coupled.wait_share:.1f} % without"
            )
        if len(self.fed.steps) <= len(self.coupled.steps):
            return f"the training made {len(self.fed.steps)} steps with the ring, and {len(self.coupled.steps)} without"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        proof = asdict(self.proof)
        return {
            "without_the_ring": self.coupled.as_dict(),
            "with_the_ring": {**self.fed.as_dict(), "reuse": round(self.reuse, 2), "oldest_s": round(self.oldest_s, 2)},
            "ring": {"cap": self.cap, **proof, "lost": self.proof.lost},
            "durations_s": self.durations_s,
            "definitions": DEFINITIONS,
        }

    def in_plain_words(self) -> list[str]:
        """What just happened, a sentence or two a line."""
        without, fed, proof = self.coupled, self.fed, self.proof
        return [
            f"Drawing its pictures in its own DataLoader, with four workers, the training waited "
            f"{100 * without.wait_share:.1f} % of its time: {len(without.steps)} steps, "
            f"{100 * without.measured[-1].accuracy:.0f} % of unseen shapes named correctly.",
            f"With a ring between it and the same four processes it waited {100 * fed.wait_share:.1f} % of its time: "
            f"{len(fed.steps)} steps in as many seconds, {100 * fed.measured[-1].accuracy:.0f} % named correctly. Each "
            f"sample was read {self.reuse:.1f} times in the mean.",
            f"{proof.kills} generators were killed, for {_gap_s(self.events):.0f} s there was none at all, and the "
            f"training went on. No sample that could be read was ever older than {self.oldest_s:.0f} s.",
            f"Of {proof.begun} samples that were begun, {proof.lost} never became readable: at most one for each kill. "
            f"All {proof.objects} that lie in the ring were verified; {proof.replayed} of them, drawn again from the "
            "seed that is stored with them, are the same bit for bit.",
        ]


def nobody(events: Sequence[Event]) -> list[tuple[float, float]]:
    """From when to when no generator ran, after there had been one."""
    found, alive, since = [], 0, None
    for event in events:
        alive += event.started - event.killed
        if event.killed and not alive:
            since = event.at
        elif alive and since is not None:
            found.append((since, event.at))
            since = None
    return found


def _gap_s(events: Sequence[Event]) -> float:
    return max((end - begin for begin, end in nobody(events)), default=0.0)
