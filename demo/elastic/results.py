"""Measurements and claims of the scenario: who was a member when, losses, failures, bytes, equality of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from baton.contract.elastic.world import RoundReport, WorldView
from demo.cluster import size_text
from demo.runner import Claim

SMOOTHED = 15
"""Inner steps of one node over which the first and the last loss are averaged."""
DEFINITIONS = {
    "kill_to_epoch_s": "from the SIGKILL of a machine inside a reduce until the survivors' new epoch",
    "kill_to_commit_s": "from the SIGKILL until the survivors had committed the interrupted round",
    "freeze_to_epoch_s": "from the SIGSTOP of a machine until the epoch without the machine",
    "repeated_steps": "inner steps of a surviving process that were done again; rounds of a node never go back",
    "fp32_bytes": "bytes that the same rounds would have sent without quantization",
}


@dataclass(frozen=True)
class WorldMoment:
    """The world as the API showed the world at an instant, in seconds since 1970."""

    at: float
    view: WorldView


@dataclass(frozen=True)
class TracedStep:
    """An inner step of a node."""

    at: float
    node: str
    round: int
    loss: float


@dataclass
class ElasticResults:
    """Measurements of the demo."""

    began_at: float
    moments: list[WorldMoment]
    steps: list[TracedStep]
    weights: dict[str, str]
    """SHA-256 of the final weights, by node."""
    rounds: int
    parameters: int
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Instant and name of each fault."""
    kill_to_epoch_s: float = 0.0
    kill_to_commit_s: float = 0.0
    freeze_to_epoch_s: float = 0.0
    reports: list[RoundReport] = field(default_factory=list)

    @property
    def nodes(self) -> list[str]:
        """Return all nodes in the order of their first membership."""
        return list(dict.fromkeys(one.node for moment in self.moments for one in moment.view.members))

    def spans(self, node: str) -> list[tuple[float, float]]:
        """Return begin and end of each membership of a node, in seconds from the first moment."""
        found: list[tuple[float, float]] = []
        for moment, after in pairwise(self.moments):
            if any(one.node == node for one in moment.view.members):
                begin, end = moment.at - self.began_at, after.at - self.began_at
                if found and found[-1][1] == begin:
                    found[-1] = (found[-1][0], end)
                else:
                    found.append((begin, end))
        return found

    @property
    def repeated_steps(self) -> int:
        """Return the inner steps whose round is before the round of an earlier step of the same process."""
        repeated, newest = 0, dict[str, int]()
        for one in sorted(self.steps, key=lambda one: one.at):
            repeated += one.round < newest.get(one.node, 0)
            newest[one.node] = max(newest.get(one.node, 0), one.round)
        return repeated

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that the reporting members sent in all reported rounds."""
        return sum(one.sent_bytes for one in self.reports)

    @property
    def repaired_buckets(self) -> int:
        """Return the buckets that members reduced again in all reported rounds."""
        return sum(one.repaired for one in self.reports)

    @property
    def fp32_bytes(self) -> float:
        """Return the bytes of the same rounds in float32."""
        return sum(
            2 * (one.contributors - 1) / one.contributors * 4 * self.parameters
            for one in self.reports
            if one.contributors
        )

    def mean_loss(self, steps: Sequence[TracedStep]) -> float:
        """Return the mean loss of some steps."""
        return sum(one.loss for one in steps) / max(len(steps), 1)

    @property
    def losses(self) -> tuple[float, float]:
        """Return the mean loss of the first and of the last steps."""
        ordered = sorted(self.steps, key=lambda one: one.at)
        return self.mean_loss(ordered[:SMOOTHED]), self.mean_loss(ordered[-SMOOTHED:])

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        first, last = self.losses
        return {
            "rounds": self.rounds,
            "parameters": self.parameters,
            "nodes": self.nodes,
            "epochs": max(moment.view.epoch for moment in self.moments),
            "kill_to_epoch_s": round(self.kill_to_epoch_s, 2),
            "kill_to_commit_s": round(self.kill_to_commit_s, 2),
            "freeze_to_epoch_s": round(self.freeze_to_epoch_s, 2),
            "repeated_steps": self.repeated_steps,
            "first_loss": round(first, 4),
            "last_loss": round(last, 4),
            "sent_bytes": self.sent_bytes,
            "fp32_bytes": round(self.fp32_bytes),
            "repaired_buckets": self.repaired_buckets,
            "weights_sha256": self.weights,
            "definitions": DEFINITIONS,
        }

    def claims(self) -> list[Claim]:
        """Return the claims: survivors lost nothing, the frozen machine came back, the loss fell, weights are equal."""
        first, last = self.losses
        distinct = set(self.weights.values())
        share = self.sent_bytes / self.fp32_bytes if self.fp32_bytes else 0.0
        return [
            Claim(
                f"One machine was killed inside a reduce. The survivors agreed on a new epoch "
                f"{self.kill_to_epoch_s:.1f} s later and had committed the round after {self.kill_to_commit_s:.1f} s. "
                "They repeated no inner step.",
                f"{self.repeated_steps} inner steps were repeated" if self.repeated_steps else "",
            ),
            Claim(
                f"One machine froze (SIGSTOP). The others went on without it after {self.freeze_to_epoch_s:.1f} s; "
                "after SIGCONT the machine came back with its own progress.",
            ),
            Claim(
                f"A new machine fetched the state from its peers while they trained. In all, {len(self.nodes)} nodes "
                f"took part in {self.rounds} rounds; the loss fell from {first:.2f} to {last:.2f}.",
                f"the loss went from {first:.2f} to {last:.2f}" if last >= first else "",
            ),
            Claim(
                f"The reporting members sent {size_text(self.sent_bytes)}, {100 * share:.0f} % of float32. "
                f"Buckets that survivors of faults reduced again: {self.repaired_buckets}.",
            ),
            Claim(
                f"All {len(self.weights)} processes that reached the end hold the same weights, bit for bit "
                f"(SHA-256 {next(iter(distinct), '')[:12]}...).",
                "" if len(distinct) == 1 and len(self.weights) > 1 else f"the final weights differ: {self.weights}",
            ),
        ]
