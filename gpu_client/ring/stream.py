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
from gpu_client.ring.errors import ManifestMissing, RingError, RingMismatch
from gpu_client.ring.flow import Flow, read_wait
from gpu_client.ring.leases import GROUPS, PINS, content_of, require_name
from gpu_client.ring.manifest import Manifest, Slot
from gpu_client.ring.plan import Decision, Plan, Shape
from gpu_client.ring.reader import RingReader, readers_of

logger = logging.getLogger("baton.ring")

_Pins = dict[str, list[int]]
"""Manifests that are kept for each decision, by its number."""

PINNED_S = 24 * 3600.0
"""For how long an interrupted training finds again what it has read since its last checkpoint."""
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
        require_name(group, "group")
        shape.require_fits(reader.ring.settings.cap)
        if not 0 <= rank < shape.world_size:
            raise RingError(f"there is no rank {rank} of {shape.world_size}", "Ranks begin with 0")
        reader.wanted, reader.group = shape.batch_size, group
        self._forgets = forgets
        self.plan = Plan(shape)
        self._reader = reader
        self._ring = reader.ring
        self._group = group
        self._rank = rank
        self._manifest: Manifest | None = None
        self._marked = False
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
        return {"group": self._group, **self.plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; with the newest samples, where those that were read then are not kept any more."""
        self.plan.load_state_dict(state)
        self._marked = True
        decision = self.plan.decision
        try:
            self._manifest = self._reader.pin(decision.number) if decision else None
        except ManifestMissing as error:
            logger.warning("what was read before is not kept any more (%s): the newest samples are read", error)
            self._manifest = None
            self._reader.keep_only([])
            self.plan.left()

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

        self._reader.wait(ready, "samples were read as often as they may be", starving=False)

    def _decide(self) -> None:
        """Take up the next decision; make it, if nobody has."""
        key = f"{GROUPS}{self._group}/{self.plan.decided + 1:010d}"
        before = self._manifest
        found = self._reader.wait(lambda: self._stored(key) or self._made(key), "too few samples are readable")
        try:
            manifest = self._reader.pin(found.number)
        except ManifestMissing as error:
            raise self._left_behind() from error
        self.plan.decide(found, manifest, before)
        self._manifest, self._fresh = manifest, False
        self._reader.decided = self.plan.decided
        self._reader.keep_only([found.number])
        if self._forgets and not self._marked and self.plan.decided > _UNMARKED_DECISIONS:
            self._prune(self.plan.decided - _UNMARKED_DECISIONS)

    def _anew(self) -> None:
        """What the group has decided from here on is of a training that has ended, or was taken back to a state before
        it: it goes, once nobody of that one is alive."""
        mine = self.plan.decided + 1
        if not self._fresh:
            raise self._left_behind()
        if any(
            said.get("group") == self._group and int(said.get("decided") or 0) >= mine
            for said in readers_of(self._ring).values()
        ):
            # Or dead for so short that nobody has noticed.
            if self._reader.waiting_s > 4 * self._ring.settings.lease_s:
                raise self._left_behind()
            return
        prefix = f"{GROUPS}{self._group}/"
        old = [key for key in self._ring.store.keys(prefix) if int(key.removeprefix(prefix)) >= mine]

        def before_mine(pins: _Pins) -> _Pins | None:
            # Of several that begin, those that come later find nothing that is later than their own.
            if all(int(number) <= mine for number in pins):
                return None
            return {number: one for number, one in pins.items() if int(number) < mine}

        if self._change_pins(before_mine):
            logger.info("the group %s goes on anew from decision %d", self._group, mine)
            self._ring.store.delete(old)

    def _left_behind(self) -> RingMismatch:
        return RingMismatch(
            f"decision {self.plan.decided + 1} of the group {self._group} is not kept any more: another training has"
            " used the group, or this process is too far behind its others",
            "Give each training a group of its own, or load its state",
        )

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
        if not self._pin_for_all(decision):
            # Others are further. Either they have just made this one, or they have forgotten it.
            stored = self._stored(key)
            if stored is None:
                self._anew()
            return stored
        self._ring.store.create(key, [memoryview(json.dumps(decision).encode())])
        return self._stored(key)

    def _pin_for_all(self, decision: Decision) -> bool:
        """The group keeps that manifest, for the next decision; False if there are later ones."""
        mine = self.plan.decided + 1

        def pinned(pins: _Pins) -> _Pins | None:
            if any(int(number) > mine for number in pins):
                return None
            # Several processes may each have found another newest: all are kept, since one of them is the decision.
            return {**pins, str(mine): sorted({*pins.get(str(mine), []), decision.number})}

        return self._change_pins(pinned)

    def _prune(self, before: int) -> None:
        """Decisions before that one, and their manifests, are not needed any more."""
        self._change_pins(lambda pins: {number: one for number, one in pins.items() if int(number) >= before})
        prefix = f"{GROUPS}{self._group}/"
        old = [key for key in self._ring.store.keys(prefix) if int(key.removeprefix(prefix)) < before]
        self._ring.store.delete(old)

    def _change_pins(self, change: Callable[[_Pins], _Pins | None]) -> bool:
        """False, and nothing is written, where the change is None."""
        key = f"{PINS}{self._group}"
        while True:
            record = self._ring.store.record(key)
            pins = change(content_of(record).get("decisions", {}))
            if pins is None:
                return False
            content = {
                "decisions": pins,
                "manifests": sorted({one for manifests in pins.values() for one in manifests}),
                "until_ms": int((self._ring.clock() + PINNED_S) * 1000),
            }
            data = json.dumps(content).encode()
            if self._ring.store.swap(key, data, record.version if record else None) is not None:
                return True
