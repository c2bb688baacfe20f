"""Which samples make the next batch: the same for every process that asks, and for a training that is resumed.

Pure. A plan goes from batch to batch of all ranks together (a global batch); every process goes through the same plan
and takes its share. What cannot be computed, when to look at which manifest, comes from outside as decisions, which are
stored for all (`reader.py`). Within a decision the order is a permutation by seed, manifest and pass; no batch has
samples of two manifests, and no sample is in it twice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gpu_client.ring.errors import RingError, RingMismatch
from gpu_client.ring.format.manifest import Manifest, ObjectId, Slot

Policy = Literal["latest", "pass"] | int
"""When the newest manifest is taken up: before every batch, when all samples were read, or after so many batches."""
_TOGETHER = 32
"""Packs of which samples are mixed at a time: a reader has so many open, and reads each of them about once a pass."""


class Decision(NamedTuple):
    """From now on batches come from this manifest."""

    number: int
    """Of the manifest."""
    at_ms: int
    """When, by the clock of who decided: what is too old is so for all alike."""


@dataclass(frozen=True)
class Shape:
    """How samples are shared out."""

    batch_size: int
    world_size: int = 1
    seed: int = 0
    policy: Policy = "pass"
    max_uses: int | None = None
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        """Raises RingError for numbers that mean nothing."""
        if self.batch_size < 1 or self.world_size < 1:
            raise RingError(
                f"a batch of {self.batch_size} for {self.world_size} processes is none", "Both are at least 1"
            )
        named = isinstance(self.policy, str)
        if (named and self.policy not in ("latest", "pass")) or (not named and int(self.policy) < 1):
            raise RingError(f"there is no policy {self.policy!r}", "Use latest, pass, or a number of batches")

    def require_fits(self, readable: int) -> None:
        """Raises RingError where a ring of which so many can be read at a time can never fill a batch."""
        if self.global_size > readable:
            raise RingError(
                f"a batch of {self.batch_size} for each of {self.world_size} processes is more than the ring's"
                f" {readable} samples",
                "Take smaller batches, or make a larger ring",
            )

    def state_dict(self) -> dict[str, Any]:
        """What the order of samples comes from, besides the ring."""
        return {"seed": self.seed, "batch_size": self.batch_size, "world_size": self.world_size}

    def require_same(self, state: Mapping[str, Any]) -> None:
        """Raises RingMismatch for a state of which others would come: samples twice in a pass, or never.

        The ranks may share out the same global batches in another way. States once had none of this.
        """
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
        """Samples that all ranks take together."""
        return self.batch_size * self.world_size


@dataclass
class Plan:
    """Where a training is in the ring. `batch` global batches were taken."""

    shape: Shape
    batch: int = 0
    decided: int = 0
    """Decisions that were taken up."""
    decision: Decision | None = None
    passes: int = 0
    """Over the present manifest."""
    taken: int = 0
    """Global batches since the decision."""
    position: int = 0
    """Samples taken of this pass."""
    uses: dict[int, int] = field(default_factory=dict)
    """How often each sample of the present manifest was taken before this pass, by its number of insertion.

    Counted only where there is a limit to it.
    """
    _order: list[Slot] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON. With it and the stored decisions, a resumed training takes the same samples."""
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
        """Raises ValueError, KeyError or TypeError for what is no state, RingMismatch for one of another shape."""
        if state["version"] != 1:
            raise ValueError(f"the state has version {state['version']}")
        self.shape.require_same(state)
        self.batch, self.decided = state["batch"], state["decided"]
        self.decision = Decision(*state["decision"]) if state["decision"] else None
        self.passes, self.taken, self.position = state["passes"], state["taken"], state["position"]
        self.uses = dict(state["uses"])
        self._order = None

    def wants_decision(self, manifest: Manifest | None) -> bool:
        """Whether the next batch needs another decision. `manifest`: the present one's."""
        if self.decision is None or manifest is None:
            return True
        policy = self.shape.policy
        if policy == "latest":
            return self.taken >= 1
        over = self.position + self.shape.global_size > len(self._ordered(manifest))
        return over if policy == "pass" else self.taken >= policy

    def enough(self, manifest: Manifest, at_ms: int, before: Manifest | None) -> bool:
        """Whether a global batch could be taken from that manifest, were it decided for now. `before`: the present."""
        if before is not None and self.decision is not None:
            self._ordered(before)
        return len(self._eligible(manifest, at_ms, self._used())) >= self.shape.global_size

    def decide(self, decision: Decision, manifest: Manifest, before: Manifest | None) -> None:
        """Take up the next decision. The same samples again are another pass over them."""
        same = before is not None and before.inserted == manifest.inserted
        if before is not None and self.decision is not None:
            self._ordered(before)
            self._end_pass()
        self.decided += 1
        self.decision = decision
        self.passes = self.passes + 1 if same else 0
        self.taken = 0
        there = {slot.inserted for slot in manifest.slots}
        self.uses = {number: count for number, count in self.uses.items() if number in there}

    def left(self) -> None:
        """The present manifest is there no more, and what was decided: decisions begin anew."""
        self.decision = None
        self.decided = self.taken = self.position = self.passes = 0
        self._order = None

    def next_batch(self, manifest: Manifest) -> Sequence[Slot]:
        """The next global batch: rank r has the samples from r * batch_size on. Where a pass ends, the next begins."""
        if self.position + self.shape.global_size > len(self._ordered(manifest)):
            self._end_pass()
            self.passes += 1
        found = self._ordered(manifest)[self.position : self.position + self.shape.global_size]
        if len(found) < self.shape.global_size:
            return []
        self.position += len(found)
        self.taken += 1
        self.batch += 1
        return found

    def share(self, batch: Sequence[Slot], rank: int) -> Sequence[Slot]:
        """One rank's part of a global batch."""
        return batch[rank * self.shape.batch_size : (rank + 1) * self.shape.batch_size]

    def _eligible(self, manifest: Manifest, at_ms: int, uses: Mapping[int, int]) -> list[Slot]:
        most, age_s = self.shape.max_uses, self.shape.max_age_s
        found = list(manifest.slots)
        if age_s is not None:
            found = [slot for slot in found if slot.at_ms >= at_ms - age_s * 1000]
        return found if most is None else [slot for slot in found if uses.get(slot.inserted, 0) < most]

    def _ordered(self, manifest: Manifest) -> list[Slot]:
        """This pass's order."""
        if self._order is None:
            assert self.decision is not None
            self._order = self._eligible(manifest, self.decision.at_ms, self.uses)
            seed = f"{self.shape.seed}:{manifest.inserted}:{self.passes}"
            self._order = _shuffled(self._order, random.Random(seed))  # noqa: S311 - an order, not a secret
        return self._order

    def _used(self) -> dict[int, int]:
        """`uses`, with this pass."""
        if self.shape.max_uses is None:
            return {}
        found = dict(self.uses)
        for slot in (self._order or [])[: self.position]:
            found[slot.inserted] = found.get(slot.inserted, 0) + 1
        return found

    def _end_pass(self) -> None:
        self.uses = self._used()
        self.position = 0
        self._order = None


def _shuffled(slots: list[Slot], chance: random.Random) -> list[Slot]:
    """In another order, in which samples of one pack are near to each other."""
    objects: dict[ObjectId, list[Slot]] = {}
    for slot in slots:
        objects.setdefault(slot.object, []).append(slot)
    packs = list(objects.values())
    chance.shuffle(packs)
    if len(packs) == len(slots):
        return [slot for pack in packs for slot in pack]
    found: list[Slot] = []
    for begin in range(0, len(packs), _TOGETHER):
        together = [slot for pack in packs[begin : begin + _TOGETHER] for slot in pack]
        chance.shuffle(together)
        found += together
    return found
