"""Choose the samples of the next batch, identically in every process and after a resume. Pure.

A plan advances by batches of all ranks together (global batches); each process follows the whole plan and takes its
share. The plan cannot compute the next manifest, therefore `batch_stream.py` stores the choice as a decision for all
processes. Within a decision the order is a permutation by seed, manifest and pass; no batch mixes manifests or repeats
a sample.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gpu_client.ring.errors import RingError, RingMismatch
from gpu_client.ring.format.manifest import ObjectId, RingManifest, Slot

Policy = Literal["latest", "pass"] | int
"""Time of the switch to the newest manifest: before every batch, after a pass over all samples, or after a number of
batches.
"""
_PACKS_MIXED = 32
"""Number of packs whose samples are shuffled together; a reader can keep these packs open and read each once per pass.
"""


class ManifestDecision(NamedTuple):
    """Decision to take the next batches from a manifest."""

    number: int
    """Number of the manifest."""
    at_ms: int
    """Time of the decision by the deciding process's clock (Unix ms); all processes compute ages from this time."""


@dataclass(frozen=True)
class BatchShape:
    """Partition of the samples among ranks and batches."""

    batch_size: int
    world_size: int = 1
    seed: int = 0
    policy: Policy = "pass"
    max_uses: int | None = None
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        """Raise RingError for invalid numbers."""
        if self.batch_size < 1 or self.world_size < 1:
            raise RingError(
                f"a batch of {self.batch_size} for {self.world_size} processes is empty", "Use at least 1 for both"
            )
        named = isinstance(self.policy, str)
        if (named and self.policy not in ("latest", "pass")) or (not named and int(self.policy) < 1):
            raise RingError(f"there is no policy {self.policy!r}", "Use latest, pass, or a number of batches")

    def require_fits(self, readable: int) -> None:
        """Raise RingError if `readable` samples can never fill a batch."""
        if self.global_size > readable:
            raise RingError(
                f"a batch of {self.batch_size} for each of {self.world_size} processes is more than the ring's"
                f" {readable} samples",
                "Take smaller batches, or make a larger ring",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the values that determine the order for a given ring."""
        return {"seed": self.seed, "batch_size": self.batch_size, "world_size": self.world_size}

    def require_same(self, state: Mapping[str, Any]) -> None:
        """Raise RingMismatch for a state of another order. The partition of a global batch among ranks may differ."""
        seed = state.get("seed", self.seed)
        if seed != self.seed:
            raise RingMismatch(
                f"the state was made with seed {seed}, and this has seed {self.seed}",
                "Resume with the same seed, or begin without the state",
            )
        batch, world = state.get("batch_size", self.batch_size), state.get("world_size", self.world_size)
        if batch * world != self.global_size:
            raise RingMismatch(
                f"the state was made with batches of {batch} for each of {world} processes, and this has batches of"
                f" {self.batch_size} for each of {self.world_size}",
                "Resume with as many samples for all together, or begin without the state",
            )

    @property
    def global_size(self) -> int:
        """Return the number of samples in a global batch."""
        return self.batch_size * self.world_size


@dataclass
class BatchPlan:
    """Position of a training in a ring. `batch`: number of taken global batches."""

    shape: BatchShape
    batch: int = 0
    decided: int = 0
    """Number of applied decisions."""
    decision: ManifestDecision | None = None
    passes: int = 0
    """Number of passes over the current manifest."""
    taken: int = 0
    """Number of global batches since the decision."""
    position: int = 0
    """Number of taken samples in this pass."""
    uses: dict[int, int] = field(default_factory=dict)
    """Uses of each sample of the manifest before this pass, by insertion number; counted only with `max_uses`."""
    _order: list[Slot] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON, from which a resumed training continues with equal samples."""
        return {
            "version": 1,
            **self.shape.state_dict(),
            "batch": self.batch,
            "decided": self.decided,
            "decision": list(self.decision) if self.decision else None,
            "passes": self.passes,
            "taken": self.taken,
            "position": self.position,
            "uses": [[number, count] for number, count in sorted(self.uses.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position.

        Raises ValueError, KeyError or TypeError for an invalid state, RingMismatch for another shape.
        """
        if state["version"] != 1:
            raise ValueError(f"the state has version {state['version']}")
        self.shape.require_same(state)
        self.batch, self.decided = state["batch"], state["decided"]
        self.decision = ManifestDecision(*state["decision"]) if state["decision"] else None
        self.passes, self.taken, self.position = state["passes"], state["taken"], state["position"]
        self.uses = dict(state["uses"])
        self._order = None

    def wants_decision(self, manifest: RingManifest | None) -> bool:
        """Return True if the next batch needs another decision. `manifest`: manifest of the current decision."""
        if self.decision is None or manifest is None:
            return True
        policy = self.shape.policy
        if policy == "latest":
            return self.taken >= 1
        over = self.position + self.shape.global_size > len(self._pass_order(manifest))
        return over if policy == "pass" else self.taken >= policy

    def can_fill_batch(self, manifest: RingManifest, at_ms: int, before: RingManifest | None) -> bool:
        """Return True if the manifest can fill a global batch at `at_ms`. `before`: the current manifest."""
        if before is not None and self.decision is not None:
            self._pass_order(before)
        return len(self._eligible(manifest, at_ms, self._count_uses())) >= self.shape.global_size

    def decide(self, decision: ManifestDecision, manifest: RingManifest, before: RingManifest | None) -> None:
        """Apply the next decision. A manifest with equal samples begins another pass."""
        same = before is not None and before.inserted == manifest.inserted
        if before is not None and self.decision is not None:
            self._pass_order(before)
            self._end_pass()
        self.decided += 1
        self.decision = decision
        self.passes = self.passes + 1 if same else 0
        self.taken = 0
        there = {slot.inserted for slot in manifest.slots}
        self.uses = {number: count for number, count in self.uses.items() if number in there}

    def reset(self) -> None:
        """Forget the decisions after the loss of their manifests."""
        self.decision = None
        self.decided = self.taken = self.position = self.passes = 0
        self._order = None

    def next_batch(self, manifest: RingManifest) -> Sequence[Slot]:
        """Take the next global batch; rank r gets the samples from r * batch_size on.

        The end of a pass begins the next pass.
        """
        if self.position + self.shape.global_size > len(self._pass_order(manifest)):
            self._end_pass()
            self.passes += 1
        found = self._pass_order(manifest)[self.position : self.position + self.shape.global_size]
        if len(found) < self.shape.global_size:
            return []
        self.position += len(found)
        self.taken += 1
        self.batch += 1
        return found

    def share(self, batch: Sequence[Slot], rank: int) -> Sequence[Slot]:
        """Return one rank's part of a global batch."""
        return batch[rank * self.shape.batch_size : (rank + 1) * self.shape.batch_size]

    def _eligible(self, manifest: RingManifest, at_ms: int, uses: Mapping[int, int]) -> list[Slot]:
        most, age_s = self.shape.max_uses, self.shape.max_age_s
        found = list(manifest.slots)
        if age_s is not None:
            found = [slot for slot in found if slot.at_ms >= at_ms - age_s * 1000]
        return found if most is None else [slot for slot in found if uses.get(slot.inserted, 0) < most]

    def _pass_order(self, manifest: RingManifest) -> list[Slot]:
        """Return the order of this pass."""
        if self._order is None:
            assert self.decision is not None
            self._order = self._eligible(manifest, self.decision.at_ms, self.uses)
            seed = f"{self.shape.seed}:{manifest.inserted}:{self.passes}"
            self._order = _shuffled(self._order, random.Random(seed))  # noqa: S311 - an order, not a secret
        return self._order

    def _count_uses(self) -> dict[int, int]:
        """Return the uses of each sample, including this pass."""
        if self.shape.max_uses is None:
            return {}
        found = dict(self.uses)
        for slot in (self._order or [])[: self.position]:
            found[slot.inserted] = found.get(slot.inserted, 0) + 1
        return found

    def _end_pass(self) -> None:
        self.uses = self._count_uses()
        self.position = 0
        self._order = None


def _shuffled(slots: list[Slot], chance: random.Random) -> list[Slot]:
    """Shuffle the slots, but keep the samples of a pack near each other."""
    objects: dict[ObjectId, list[Slot]] = {}
    for slot in slots:
        objects.setdefault(slot.object, []).append(slot)
    packs = list(objects.values())
    chance.shuffle(packs)
    if len(packs) == len(slots):
        return [slot for pack in packs for slot in pack]
    found: list[Slot] = []
    for begin in range(0, len(packs), _PACKS_MIXED):
        together = [slot for pack in packs[begin : begin + _PACKS_MIXED] for slot in pack]
        chance.shuffle(together)
        found += together
    return found
