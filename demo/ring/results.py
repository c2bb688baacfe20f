"""Measurements and claims of the scenario: two trainings, the state of the ring, the samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo.runner import Claim

DEFINITIONS = {
    "wait_share": "share of the time from the first batch on that was spent waiting for a batch, measuring left out",
    "first_batch_s": "time until the first batch",
    "held_out_loss": "mean cross-entropy in nats over held-out pictures, at the end",
    "accuracy": "share of the held-out pictures whose shape is named correctly, at the end",
    "reuse": "samples read per sample that became readable",
    "lost": "samples that a generator began to draw and that never became readable",
    "replayed": "samples that were drawn again from the seed stored with them, and were equal bit for bit",
}


@dataclass(frozen=True)
class Step:
    """Training step. `at`: this machine's monotonic clock, in seconds."""

    at: float
    wait_s: float
    step_s: float
    loss: float


@dataclass(frozen=True)
class Measured:
    """The quality of the model at one moment."""

    at: float
    held_out_loss: float
    accuracy: float


@dataclass(frozen=True)
class Training:
    """The steps and measurements of one training; the properties need at least one step."""

    steps: list[Step]
    measured: list[Measured]

    @property
    def began_at(self) -> float:
        """Return the time of the first batch."""
        return self.steps[0].at - self.steps[0].step_s

    @property
    def wait_share(self) -> float:
        """Return the share of time after the first batch that was spent waiting, 0 to 1."""
        waited = sum(step.wait_s for step in self.steps[1:])
        return waited / max(waited + sum(step.step_s for step in self.steps), 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Return the training's part of `summary.json`."""
        last = self.measured[-1]
        return {
            "steps": len(self.steps),
            "wait_share": round(self.wait_share, 4),
            "first_batch_s": round(self.steps[0].wait_s, 2),
            "held_out_loss": round(last.held_out_loss, 4),
            "accuracy": round(last.accuracy, 4),
        }


def read_training(file: Path) -> Training:
    """Read what a training, finished or not, has written to `file`."""
    steps, measured = [], []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        found = json.loads(line)
        if "step_s" in found:
            steps.append(Step(**found))
        else:
            measured.append(Measured(**found))
    return Training(steps, measured)


@dataclass(frozen=True)
class RingState:
    """The ring and its generators at one moment; ages of the newest and oldest readable sample."""

    at: float
    readable: int
    inserted: int
    read: int
    newest_s: float
    oldest_s: float
    generators: int


@dataclass(frozen=True)
class GeneratorEvent:
    """A kill or start of generators."""

    at: float
    killed: int = 0
    started: int = 0


@dataclass(frozen=True)
class Proof:
    """The samples after the training."""

    begun: int
    """Samples that generators began to draw."""
    inserted: int
    """Samples that became readable."""
    kills: int
    objects: int
    """Samples that were in the ring at the end, all of them verified."""
    damaged: int
    replayed: int
    wrong: list[str]
    """Ids of the samples that their seeds do not reproduce."""

    @property
    def lost(self) -> int:
        """Return the number of samples that a generator was drawing or storing when it was killed."""
        return self.begun - self.inserted

    def failure(self) -> str:
        """Return what is wrong with the samples; "" if nothing is."""
        if not 0 <= self.lost <= self.kills:
            return f"{self.lost} samples were lost in {self.kills} kills"
        if self.damaged:
            return f"{self.damaged} of {self.objects} stored samples are damaged"
        if self.wrong:
            return f"sample {self.wrong[0]} is not reproduced by its seed"
        return ""


@dataclass(frozen=True)
class RingResults:
    """Both trainings, the ring's states over time, and its samples at the end."""

    coupled: Training
    fed: Training
    states: list[RingState]
    events: list[GeneratorEvent]
    proof: Proof
    cap: int

    @property
    def reuse(self) -> float:
        """Return the mean number of times that a sample was read."""
        return self.states[-1].read / max(self.proof.inserted, 1)

    @property
    def oldest_s(self) -> float:
        """Return the greatest age of a readable sample in seconds."""
        return max(state.oldest_s for state in self.states)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        return {
            "without_the_ring": self.coupled.as_dict(),
            "with_the_ring": {**self.fed.as_dict(), "reuse": round(self.reuse, 2), "oldest_s": round(self.oldest_s, 2)},
            "ring": {"cap": self.cap, **asdict(self.proof), "lost": self.proof.lost},
            "definitions": DEFINITIONS,
        }

    def claims(self) -> list[Claim]:
        """Return the claims: the ring ends the waiting, generators may die, no other sample is lost or damaged."""
        without, fed, proof = self.coupled, self.fed, self.proof
        gap_s = max((end - begin for begin, end in gaps(self.events)), default=0.0)
        waits, fed_waits = f"{100 * without.wait_share:.1f} %", f"{100 * fed.wait_share:.1f} %"
        helps = ""
        if fed.wait_share >= without.wait_share / 2:
            helps = f"the training waited {fed_waits} of its time with the ring, and {waits} without"
        elif len(fed.steps) <= len(without.steps):
            helps = f"the training made {len(fed.steps)} steps with the ring, and {len(without.steps)} without"
        return [
            Claim(
                f"Drawing its pictures in its own DataLoader, with four workers, the training waited {waits} of its "
                f"time: {len(without.steps)} steps, {100 * without.measured[-1].accuracy:.0f} % of unseen shapes named "
                "correctly."
            ),
            Claim(
                f"With a ring between it and the same four processes, the training waited {fed_waits} of its time: "
                f"{len(fed.steps)} steps in as many seconds, {100 * fed.measured[-1].accuracy:.0f} % named correctly. "
                f"The training read each sample {self.reuse:.1f} times on average.",
                helps,
            ),
            Claim(
                f"{proof.kills} generators were killed, for {gap_s:.0f} s none was alive, and the training went on. No "
                f"readable sample was ever older than {self.oldest_s:.0f} s."
            ),
            Claim(
                f"Of {proof.begun} samples that generators had begun, {proof.lost} never became readable: at most one "
                f"for each kill. All {proof.objects} samples in the ring were verified; {proof.replayed} of them, "
                "drawn again from the stored seed, are equal bit for bit.",
                proof.failure(),
            ),
        ]


def gaps(events: Sequence[GeneratorEvent]) -> list[tuple[float, float]]:
    """Return the times between which no generator was alive, start-up left out."""
    found, alive, since = [], 0, None
    for event in events:
        alive += event.started - event.killed
        if event.killed and not alive:
            since = event.at
        elif alive and since is not None:
            found.append((since, event.at))
            since = None
    return found
