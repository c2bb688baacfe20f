"""Batches for a training: the plan's, with decisions that all its processes share (`group.py`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from gpu_client.ring.errors import ManifestMissing, RingError, RingMismatch
from gpu_client.ring.group import Group
from gpu_client.ring.manifest import Manifest, Slot
from gpu_client.ring.plan import Decision, Plan, Shape
from gpu_client.ring.reader import RingReader

logger = logging.getLogger("baton.ring")

_MANY_DECISIONS = 1000
"""Kept for the next checkpoint: then the training is told, once."""
_UNMARKED_DECISIONS = 16
"""Of a training that makes no checkpoints: so many are kept, for those of its processes that are behind."""


class Stream:
    """One process's way through the plan of its group."""

    def __init__(
        self, reader: RingReader, shape: Shape, *, group: str = "train", rank: int = 0, forgets: bool = True
    ) -> None:
        """`forgets`: whether old decisions go when this one is past them; not for who runs ahead of others.

        Raises RingMismatch for a name of a group that is none, RingError for a shape that does not fit.
        """
        shape.require_fits(reader.ring.settings.cap)
        if not 0 <= rank < shape.world_size:
            raise RingError(f"there is no rank {rank} of {shape.world_size}", "Ranks begin with 0")
        reader.wanted = shape.batch_size
        self._forgets = forgets
        self.plan = Plan(shape)
        self._reader = reader
        self._ring = reader.ring
        self._group = Group(reader, group)
        self._rank = rank
        self._manifest: Manifest | None = None
        self._marked = False
        self._marked_at = 0
        self._fresh = True
        """It has decided nothing yet."""
        self.substituted = 0
        """Samples that were damaged, and others taken for them."""

    @property
    def manifest(self) -> Manifest:
        """That of the newest batch."""
        assert self._manifest is not None
        return self._manifest

    def skip(self) -> Sequence[Slot]:
        """Go on by one batch, which another process reads, or which was read before."""
        return self.plan.share(self._next(count=False), self._rank)

    def next_batch(self) -> tuple[list[Slot], list[Any]]:
        """This rank's part of the next global batch: which samples, and the samples. Waits for them."""
        slots = self.plan.share(self._next(count=True), self._rank)
        self._reader.soon(slots)
        samples = []
        assert self._manifest is not None
        for slot in slots:
            sample, read = self._reader.sample_or_another(slot, self._manifest)
            self.substituted += read != slot
            samples.append(sample)
        self._reader.took(len(slots))
        return list(slots), samples

    def state_dict(self) -> dict[str, Any]:
        """Where the training is."""
        return {"group": self._group.name, "run": self._group.run, **self.plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; with the newest samples, where those that were read then are not kept any more."""
        self.plan.load_state_dict(state)
        self._marked, self._marked_at = True, self.plan.decided
        decision = self.plan.decision
        try:
            if not self._group.resume(int(state.get("run", 1))):
                raise ManifestMissing("another training has begun in its group", "Give each training its own")
            self._manifest = self._reader.pin(decision.number) if decision else None
        except ManifestMissing as error:
            logger.warning("what was read before is not kept any more (%s): the newest samples are read", error)
            self._manifest = None
            self._reader.keep_only([])
            self._group.leave()
            self.plan.left()

    def checkpointed(self, state: dict[str, Any]) -> None:
        """A training checkpoint with this state is safe: what was decided before it is not needed any more."""
        self._marked = True
        decided = int(state["decided"])
        if decided:
            self._marked_at = decided
            self._group.prune(decided)

    def _next(self, *, count: bool) -> Sequence[Slot]:
        plan = self.plan
        while True:
            if plan.wants_decision(self._manifest):
                self._decide()
            assert self._manifest is not None
            if count:
                self._reader.wait_for_flow(plan.shape.batch_size)
            found = plan.next_batch(self._manifest)
            if found:
                return found
            self._decide()

    def _decide(self) -> None:
        """Take up the next decision; make it, if nobody has."""
        before = self._manifest
        found = self._reader.wait(self._following, "too few samples are readable")
        try:
            manifest = self._reader.pin(found.number)
        except ManifestMissing as error:
            raise self._left_behind() from error
        self.plan.decide(found, manifest, before)
        self._manifest, self._fresh = manifest, False
        self._group.took_up(self.plan.decided)
        self._reader.keep_only([found.number])
        if self._forgets and not self._marked and self.plan.decided > _UNMARKED_DECISIONS:
            self._group.prune(self.plan.decided - _UNMARKED_DECISIONS)
        if self._forgets and self._marked and self.plan.decided - self._marked_at == _MANY_DECISIONS:
            logger.warning(
                "%d manifests with their samples are kept for the next checkpoint: call checkpointed() more often,"
                " or take up new samples less often (policy)",
                _MANY_DECISIONS,
            )

    def _following(self) -> Decision | None:
        """The next decision; made for the newest manifest, if there is enough in it and nobody else has."""
        if not self._group.run and not self._group.join():
            self._require_not_late()
            return None
        number = self.plan.decided + 1
        stored = self._group.decision(number)
        if stored is not None:
            return stored
        newest = self._reader.newest()
        at_ms = int(self._ring.clock() * 1000)
        if len(newest) < self._ring.settings.min_size or not self.plan.enough(newest, at_ms, self._manifest):
            return None
        made = self._group.decide(number, Decision(newest.number, at_ms))
        if made is None:
            self._require_not_late()
            self._group.leave()
        return made

    def _require_not_late(self) -> None:
        """Whoever has only just begun waits for those of the group's last run who have died, until that is known."""
        if not self._fresh or self._reader.waiting_s > 4 * self._ring.settings.lease_s:
            raise self._left_behind()

    def _left_behind(self) -> RingMismatch:
        return RingMismatch(
            f"decision {self.plan.decided + 1} of the group {self._group.name} is not kept any more: another training"
            " uses the group, or this process is too far behind its others",
            "Give each training a group of its own, or load its state",
        )
