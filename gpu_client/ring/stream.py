"""Batches for a training: the plan's, with decisions that all its processes share.

`groups/<name>/<number>` holds the decisions of one training: the first process that needs the next one makes it, the
others find it there; so does a training that is resumed. A decision's manifest is pinned in the group's name before it
can be found (`pins/<name>`), and until the training says that it needs no earlier ones (`checkpointed`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from gpu_client.ring.collector import read_so_far
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged
from gpu_client.ring.flow import Flow, read_wait
from gpu_client.ring.leases import PINS, content_of
from gpu_client.ring.manifest import Manifest, Slot
from gpu_client.ring.plan import Decision, Plan, Shape
from gpu_client.ring.reader import RingReader

logger = logging.getLogger("baton.ring")

_Pins = dict[str, list[int]]
"""Manifests that are kept for each decision, by its number."""

GROUPS = "groups/"
PINNED_S = 24 * 3600.0
"""For how long an interrupted training finds again what it has read since its last checkpoint."""
_UNMARKED_DECISIONS = 16
"""Of a training that makes no checkpoints: so many are kept, for those of its processes that are behind."""


class Stream:
    """One process's way through the plan of its group."""

    def __init__(
        self, reader: RingReader, shape: Shape, *, group: str = "train", rank: int = 0, forgets: bool = True
    ) -> None:
        """`forgets`: whether old decisions go when this one is past them; not for who runs ahead of others."""
        self._forgets = forgets
        self.plan = Plan(shape)
        self._reader = reader
        self._ring = reader.ring
        self._group = group
        self._rank = rank
        self._manifest: Manifest | None = None
        self._marked = False
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
        samples = []
        for place, slot in enumerate(slots):
            samples.append(self._sample(slot, place))
        self._reader.took(len(slots))
        return list(slots), samples

    def state_dict(self) -> dict[str, Any]:
        """Where the training is."""
        return {"group": self._group, **self.plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.plan.load_state_dict(state)
        self._marked = True
        decision = self.plan.decision
        self._manifest = self._still_there(decision.number) if decision else None
        if decision and self._manifest is None:
            self.plan.decision = None
            self.plan.position = 0

    def checkpointed(self, state: dict[str, Any]) -> None:
        """A training checkpoint with this state is safe: what was decided before it is not needed any more."""
        self._marked = True
        decided = int(state["decided"])
        if decided:
            self._prune(decided)

    def _next(self, *, count: bool) -> Sequence[Slot]:
        plan = self.plan
        while True:
            if plan.wants_decision(self._manifest):
                self._decide()
            assert self._manifest is not None
            if count:
                self._wait_for_flow()
            found = plan.next_batch(self._manifest)
            if found:
                return found
            self._decide()

    def _wait_for_flow(self) -> None:
        ratio = self._ring.settings.samples_per_insert
        if ratio is None:
            return

        def ready() -> bool:
            self._reader.tell()
            newest = self._ring.newest()
            flow = Flow(newest.inserted, 0, read_so_far(self._ring), len(newest))
            return not read_wait(flow, self._ring.settings, self.plan.shape.batch_size)

        self._reader.wait(ready, "samples were read as often as they may be")

    def _decide(self) -> None:
        """Take up the next decision; make it, if nobody has."""
        before = self._manifest
        while True:
            found = self._next_decision()
            manifest = self._still_there(found.number)
            if manifest is not None:
                break
            self.plan.decided += 1
        self.plan.decide(found, manifest, before)
        self._manifest = manifest
        self._reader.keep_only([found.number])
        if self._forgets and not self._marked and self.plan.decided > _UNMARKED_DECISIONS:
            self._prune(self.plan.decided - _UNMARKED_DECISIONS)

    def _next_decision(self) -> Decision:
        key = f"{GROUPS}{self._group}/{self.plan.decided + 1:010d}"
        found: Decision = self._reader.wait(
            lambda: self._stored(key) or self._made(key), "too few samples are readable"
        )
        return found

    def _still_there(self, number: int) -> Manifest | None:
        """A manifest that was read before; None if it was interrupted for so long that it is not kept any more."""
        try:
            return self._reader.pin(number)
        except ManifestMissing as error:
            logger.warning("what the training was reading is gone (%s): it goes on with other samples", error.problem)
            return None

    def _stored(self, key: str) -> Decision | None:
        data = self._ring.store.read(key)
        return None if data is None else Decision(*json.loads(bytes(data)))

    def _made(self, key: str) -> Decision | None:
        """A decision for the newest manifest, if there is enough in it; the stored one if another was faster."""
        newest = self._reader.newest()
        at_ms = int(self._ring.clock() * 1000)
        settings = self._ring.settings
        if len(newest) < settings.min_size or not self.plan.enough(newest, at_ms, self._manifest):
            return None
        decision = Decision(newest.number, at_ms)
        self._pin_for_all(decision)
        self._ring.store.create(key, [memoryview(json.dumps(decision).encode())])
        return self._stored(key)

    def _pin_for_all(self, decision: Decision) -> None:
        """The group keeps that manifest, with the number of the decision that it is for."""
        number = str(self.plan.decided + 1)
        # Several processes may each have found another newest: all are kept, since one of them is the decision.
        self._change_pins(lambda pins: {**pins, number: sorted({*pins.get(number, []), decision.number})})

    def _prune(self, before: int) -> None:
        """Decisions before that one, and their manifests, are not needed any more."""
        self._change_pins(lambda pins: {number: one for number, one in pins.items() if int(number) >= before})
        prefix = f"{GROUPS}{self._group}/"
        old = [key for key in self._ring.store.keys(prefix) if int(key.removeprefix(prefix)) < before]
        self._ring.store.delete(old)

    def _change_pins(self, change: Callable[[_Pins], _Pins]) -> None:
        key = f"{PINS}{self._group}"
        while True:
            record = self._ring.store.record(key)
            pins = change(content_of(record).get("decisions", {}))
            content = {
                "decisions": pins,
                "manifests": sorted({one for manifests in pins.values() for one in manifests}),
                "until_ms": int((self._ring.clock() + PINNED_S) * 1000),
            }
            data = json.dumps(content).encode()
            if self._ring.store.swap(key, data, record.version if record else None) is not None:
                return

    def _sample(self, slot: Slot, place: int) -> Any:
        """The sample, or for a damaged one another of the same manifest: the same one for every process."""
        assert self._manifest is not None
        try:
            return self._reader.sample(slot)
        except ObjectDamaged:
            self.substituted += 1
        slots = self._manifest.slots
        start = slots.index(slot)
        for offset in range(1, len(slots)):
            other = slots[(start + offset) % len(slots)]
            try:
                found = self._reader.sample(other)
            except ObjectDamaged:
                continue
            logger.warning("sample %s is damaged: %s is read for it", slot.id, other.id)
            return found
        raise ManifestMissing(f"nothing of manifest {self._manifest.number} can be read", "See baton ring verify")
