"""Batches for a training: the plan's, with decisions that all its processes share (`group.py`)."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from gpu_client.ring.core.liveness import own_name, require_name
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingError, RingMismatch
from gpu_client.ring.format.manifest import Manifest, Slot
from gpu_client.ring.format.records import GROUPS, PINS, Versioned, content_of, sealed, unsealed
from gpu_client.ring.reading.batch_plan import Decision, Plan, Shape
from gpu_client.ring.reading.reader import RingReader

logger = logging.getLogger("baton.ring")

PINNED_S = 24 * 3600.0
"""For how long an interrupted training finds again what it has read since its last checkpoint."""
_RUNS = (
    ("BATON_JOB_ID", "BATON_EPOCH"),
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)
"""What the processes of one training have in common and no other training has, by who has started it."""
_Pins = dict[str, list[int]]
"""Manifests that are kept for each decision, by its number."""


class Group:
    """One process's part in it. `run` is 0 before it has joined or resumed one."""

    def __init__(self, reader: RingReader, name: str) -> None:
        """Raises RingMismatch for a name that is none."""
        self.name = require_name(name, "group")
        self.run = 0
        self._left = 0
        self._reader = reader
        self._store = reader.ring.store
        self._key = f"{PINS}{name}"
        self._prefix = f"{GROUPS}{name}/"

    def join(self) -> bool:
        """Join the run that others have begun, or begin another; False if that cannot be said yet."""
        record = self._store.record(self._key)
        run = int(content_of(record).get("run", 0))
        others = [said for said in self._reader.others() if said.get("group") == self.name and said.get("run") == run]
        if run and run == self._left:
            # It has gone on without this process. That it still goes on may be what those say that have just died.
            if any(said.get("decided") for said in others):
                return False
        elif run and others:
            self._tell(run)
            return True
        # Told first: whoever finds the run begun finds this one in it. What was left may be forgotten by now: its
        # number is not taken again.
        following = max(run, self._left) + 1
        self._tell(following)
        if self._written(record, following, {}):
            self._store.delete([key for key in self._store.keys(self._prefix) if self._number(key)[0] < following])
            return True
        self._tell(0)
        return False

    def leave(self) -> None:
        """That run has gone on without this process, which has only just begun."""
        self._left = self.run
        self._tell(0)

    def resume(self, run: int) -> bool:
        """Go on with a run; False if another training has begun one since."""
        record = self._store.record(self._key)
        if record is not None and content_of(record).get("run") != run:
            return False
        self._tell(run)
        return True

    def decision(self, number: int) -> Decision | None:
        """One that somebody has made. Raises ObjectDamaged for one that was altered: ranks would read other samples."""
        key = self._decision_key(number)
        data = self._store.read(key)
        try:
            return None if data is None else _decision_of(bytes(data))
        except (ValueError, TypeError) as error:
            raise ObjectDamaged(
                f"{key} cannot be read: {error}", "Begin without the state, or give the training another group"
            ) from error

    def decide(self, number: int, decision: Decision) -> Decision | None:
        """Make one, or find the one that another was faster to make; None if others have forgotten it already."""

        def pinned(pins: _Pins) -> _Pins | None:
            if any(int(later) > number for later in pins):
                return None
            # Several processes may each have found another newest: all are kept, since one of them is the decision.
            return {**pins, str(number): sorted({*pins.get(str(number), []), decision.number})}

        if self._change_pins(pinned):
            self._store.create(self._decision_key(number), [memoryview(sealed(decision._asdict()))])
        return self.decision(number)

    def took_up(self, number: int) -> None:
        """This process is at that decision."""
        self._reader.decided = number

    def prune(self, before: int) -> None:
        """Decisions before that one, and their manifests, are not needed any more."""
        forget(self._reader.ring, self.name, self.run, before)

    def _change_pins(self, change: Callable[[_Pins], _Pins | None]) -> bool:
        """False, and nothing is written, where the change is None, or the group has begun another run."""
        while True:
            record = self._store.record(self._key)
            content = content_of(record)
            if record is not None and content.get("run") != self.run:
                return False
            pins = change(content.get("decisions", {}))
            if pins is None:
                return False
            if self._written(record, self.run, pins):
                return True

    def _written(self, seen: Versioned | None, run: int, pins: _Pins) -> bool:
        return _pinned(self._reader.ring, self._key, seen, run, pins)

    def _tell(self, run: int) -> None:
        self.run = run
        self._reader.group, self._reader.run, self._reader.decided = self.name, run, 0
        self._reader.tell()

    def _decision_key(self, number: int) -> str:
        return f"{self._prefix}{self.run:06d}.{number:010d}"

    def _number(self, key: str) -> tuple[int, int]:
        return _number(key.removeprefix(self._prefix))


def forget(ring: Ring, name: str, run: int, before: int) -> None:
    """What the group has decided before that decision of that run, and its manifests, are not needed any more."""
    key, prefix = f"{PINS}{name}", f"{GROUPS}{name}/"
    while True:
        record = ring.store.record(key)
        content = content_of(record)
        if record is None or content.get("run") != run:
            break
        pins = content.get("decisions", {})
        left = {number: one for number, one in pins.items() if int(number) >= before}
        if _pinned(ring, key, record, run, left):  # with as many, too: they are wanted for longer
            break
    ring.store.delete([one for one in ring.store.keys(prefix) if _number(one.removeprefix(prefix)) < (run, before)])


def _pinned(ring: Ring, key: str, seen: Versioned | None, run: int, pins: _Pins) -> bool:
    content = {
        "run": run,
        "decisions": pins,
        "manifests": sorted({one for manifests in pins.values() for one in manifests}),
        "until_ms": int((ring.clock() + PINNED_S) * 1000),
    }
    return ring.store.swap(key, sealed(content), seen.version if seen else None) is not None


def _decision_of(data: bytes) -> Decision:
    """Raises ValueError or TypeError. One without a digest was stored as a list."""
    return Decision(*json.loads(data)) if data.startswith(b"[") else Decision(**unsealed(data, frozenset()))


def _number(name: str) -> tuple[int, int]:
    run, _, number = name.partition(".")
    return int(run), int(number)


def group_of(world: int) -> str:
    """The name that the processes of this training have in common, of which there are so many."""
    if world == 1:
        return own_name()
    for names in _RUNS:
        found = [os.environ[name] for name in names if os.environ.get(name)]
        if names[0] in os.environ:
            return re.sub(r"[^A-Za-z0-9_-]", "-", "-".join(found))[-64:] or "train"
    return "train"


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
