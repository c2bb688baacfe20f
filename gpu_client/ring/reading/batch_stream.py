"""Read the batches of one process of a training, by the decisions that all its processes share.

`groups/<name>/<run>.<number>` stores the decisions. The first process that needs the next decision makes the decision;
all other processes, and a resumed training, read the decision. Before a decision is visible, a pin under the name of
the group (`pins/<name>`) protects its manifest, until the training no longer needs the manifest. A training that starts
from scratch in a used group begins another run, therefore the training never applies decisions of an earlier run.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from gpu_client.ring.core.liveness import require_name, unique_name
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingError, RingMismatch
from gpu_client.ring.format.manifest import RingManifest, Slot
from gpu_client.ring.format.records import (
    GROUPS,
    PINS,
    Versioned,
    decode_checksummed,
    decode_record,
    encode_checksummed,
)
from gpu_client.ring.reading.batch_plan import BatchPlan, BatchShape, ManifestDecision
from gpu_client.ring.reading.reader import RingReader

logger = logging.getLogger("baton.ring")

PINNED_S = 24 * 3600.0
"""Seconds for which an interrupted training finds the samples read since its last checkpoint."""
_RUNS = (
    ("BATON_JOB_ID", "BATON_EPOCH"),
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)
"""Environment variables that the processes of one training share, by launcher."""
_Pins = dict[str, list[int]]
"""Manifests to keep for each decision, by the decision's number."""


class ReaderGroup:
    """Membership of one process in a group. `run`: number of the run; 0 before `join` or `resume`."""

    def __init__(self, reader: RingReader, name: str) -> None:
        """Raise RingMismatch for an invalid name."""
        self.name = require_name(name, "group")
        self.run = 0
        self._left = 0
        self._reader = reader
        self._store = reader.ring.store
        self._key = f"{PINS}{name}"
        self._prefix = f"{GROUPS}{name}/"

    def join(self) -> bool:
        """Join the current run or begin another. Returns False while the state of the run is uncertain."""
        record = self._store.record(self._key)
        run = int(decode_record(record).get("run", 0))
        others = [
            record
            for record in self._reader.other_readers()
            if record.get("group") == self.name and record.get("run") == run
        ]
        if run and run == self._left:
            # The run has continued without this process, or the records are of recently died processes.
            if any(record.get("decided") for record in others):
                return False
        elif run and others:
            self._announce(run)
            return True
        # The announcement comes first, so that a process that finds the new run also finds this process in the run.
        # The number of the left run must not be reused, even if the store has forgotten the run.
        following = max(run, self._left) + 1
        self._announce(following)
        if self._write_pins(record, following, {}):
            self._store.delete([key for key in self._store.keys(self._prefix) if self._number(key)[0] < following])
            return True
        self._announce(0)
        return False

    def leave(self) -> None:
        """Leave a run that has continued without this process."""
        self._left = self.run
        self._announce(0)

    def resume(self, run: int) -> bool:
        """Resume a run. Returns False if another training has begun a newer run."""
        record = self._store.record(self._key)
        if record is not None and decode_record(record).get("run") != run:
            return False
        self._announce(run)
        return True

    def decision(self, number: int) -> ManifestDecision | None:
        """Read a decision. Raises ObjectDamaged for an altered decision, which would give ranks different samples."""
        key = self._decision_key(number)
        data = self._store.read(key)
        try:
            return None if data is None else _decision_of(bytes(data))
        except (ValueError, TypeError) as error:
            raise ObjectDamaged(
                f"{key} cannot be read: {error}", "Begin without the state, or give the training another group"
            ) from error

    def decide(self, number: int, decision: ManifestDecision) -> ManifestDecision | None:
        """Make a decision, or return the decision of a faster process; None if the group has already forgotten it."""

        def pinned(pins: _Pins) -> _Pins | None:
            if any(int(later) > number for later in pins):
                return None
            # Several processes may each have found another newest manifest. One of these manifests becomes the
            # decision, therefore the pin keeps all of them.
            return {**pins, str(number): sorted({*pins.get(str(number), []), decision.number})}

        if self._change_pins(pinned):
            self._store.create(self._decision_key(number), [memoryview(encode_checksummed(decision._asdict()))])
        return self.decision(number)

    def mark_taken_up(self, number: int) -> None:
        """Publish that this process has applied the decision."""
        self._reader.decided = number

    def prune(self, before: int) -> None:
        """Forget the decisions before the number `before`, and release their manifests."""
        prune_decisions(self._reader.ring, self.name, self.run, before)

    def _change_pins(self, change: Callable[[_Pins], _Pins | None]) -> bool:
        """Change the pins. Returns False without a write if `change` returns None or another run has begun."""
        while True:
            record = self._store.record(self._key)
            content = decode_record(record)
            if record is not None and content.get("run") != self.run:
                return False
            pins = change(content.get("decisions", {}))
            if pins is None:
                return False
            if self._write_pins(record, self.run, pins):
                return True

    def _write_pins(self, seen: Versioned | None, run: int, pins: _Pins) -> bool:
        return _swap_pins(self._reader.ring, self._key, seen, run, pins)

    def _announce(self, run: int) -> None:
        self.run = run
        self._reader.group, self._reader.run, self._reader.decided = self.name, run, 0
        self._reader.flush_stats()

    def _decision_key(self, number: int) -> str:
        return f"{self._prefix}{self.run:06d}.{number:010d}"

    def _number(self, key: str) -> tuple[int, int]:
        return _number(key.removeprefix(self._prefix))


def prune_decisions(ring: Ring, name: str, run: int, before: int) -> None:
    """Forget the decisions of a run before the number `before`, and release their manifests."""
    key, prefix = f"{PINS}{name}", f"{GROUPS}{name}/"
    while True:
        record = ring.store.record(key)
        content = decode_record(record)
        if record is None or content.get("run") != run:
            break
        pins = content.get("decisions", {})
        left = {number: one for number, one in pins.items() if int(number) >= before}
        if _swap_pins(ring, key, record, run, left):  # Also if the number is equal, to extend the expiry.
            break
    ring.store.delete([one for one in ring.store.keys(prefix) if _number(one.removeprefix(prefix)) < (run, before)])


def _swap_pins(ring: Ring, key: str, seen: Versioned | None, run: int, pins: _Pins) -> bool:
    content = {
        "run": run,
        "decisions": pins,
        "manifests": sorted({one for manifests in pins.values() for one in manifests}),
        "until_ms": int((ring.clock() + PINNED_S) * 1000),
    }
    return ring.store.swap(key, encode_checksummed(content), seen.version if seen else None) is not None


def _decision_of(data: bytes) -> ManifestDecision:
    """Decode a decision. Raises ValueError or TypeError. Decisions without a digest are lists."""
    return (
        ManifestDecision(*json.loads(data))
        if data.startswith(b"[")
        else ManifestDecision(**decode_checksummed(data, frozenset()))
    )


def _number(name: str) -> tuple[int, int]:
    run, _, number = name.partition(".")
    return int(run), int(number)


def choose_group_name(world: int) -> str:
    """Choose a name that the `world` processes of this training share."""
    if world == 1:
        return unique_name()
    for names in _RUNS:
        found = [os.environ[name] for name in names if os.environ.get(name)]
        if names[0] in os.environ:
            return re.sub(r"[^A-Za-z0-9_-]", "-", "-".join(found))[-64:] or "train"
    return "train"


_MANY_DECISIONS = 1000
"""Number of decisions without a checkpoint after which a warning is logged, once."""
_UNMARKED_DECISIONS = 16
"""Number of decisions kept for slower processes of a training without checkpoints."""


class BatchStream:
    """Stream of the batches of one process, by the plan of its group."""

    def __init__(
        self, reader: RingReader, shape: BatchShape, *, group: str = "train", rank: int = 0, forgets: bool = True
    ) -> None:
        """`forgets`: delete the decisions that this process has passed; False for a process that runs ahead.

        Raises RingMismatch for an invalid group name, RingError for a shape that does not fit.
        """
        shape.require_fits(reader.ring.settings.cap)
        if not 0 <= rank < shape.world_size:
            raise RingError(f"there is no rank {rank} of {shape.world_size}", "Ranks are 0 to world_size - 1")
        reader.wanted = shape.batch_size
        self._forgets = forgets
        self.plan = BatchPlan(shape)
        self._reader = reader
        self._ring = reader.ring
        self._group = ReaderGroup(reader, group)
        self._rank = rank
        self._manifest: RingManifest | None = None
        self._marked = False
        self._marked_at = 0
        self._fresh = True
        """True before the first decision."""
        self.substituted = 0
        """Number of substituted damaged samples."""

    @property
    def manifest(self) -> RingManifest:
        """Return the manifest of the newest batch."""
        assert self._manifest is not None
        return self._manifest

    def skip(self) -> Sequence[Slot]:
        """Advance by one batch without reading its samples."""
        return self.plan.share(self._next(count=False), self._rank)

    def next_batch(self) -> tuple[list[Slot], list[Any]]:
        """Read this rank's part of the next global batch: slots and samples. Waits for samples."""
        slots = self.plan.share(self._next(count=True), self._rank)
        self._reader.prefetch(slots)
        samples = []
        assert self._manifest is not None
        for slot in slots:
            sample, read = self._reader.sample_or_another(slot, self._manifest)
            self.substituted += read != slot
            samples.append(sample)
        self._reader.record_consumed(len(slots))
        return list(slots), samples

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training as JSON."""
        return {"group": self._group.name, "run": self._group.run, **self.plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position; continue with the newest samples if the position's samples are deleted."""
        self.plan.load_state_dict(state)
        self._marked, self._marked_at = True, self.plan.decided
        decision = self.plan.decision
        try:
            if not self._group.resume(int(state.get("run", 1))):
                raise ManifestMissing(
                    "another training has begun in the group", "Give each training a group of its own"
                )
            self._manifest = self._reader.pin(decision.number) if decision else None
        except ManifestMissing as error:
            logger.warning("the samples of the state are gone (%s): reading the newest samples", error)
            self._manifest = None
            self._reader.keep_only([])
            self._group.leave()
            self.plan.reset()

    def checkpointed(self, state: dict[str, Any]) -> None:
        """Record that a checkpoint with this state is stored, which makes earlier decisions unnecessary."""
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
        """Apply the next decision; make the decision if no other process has."""
        before = self._manifest
        found = self._reader.wait(self._next_decision, "too few samples are readable")
        try:
            manifest = self._reader.pin(found.number)
        except ManifestMissing as error:
            raise self._fallen_behind_error() from error
        self.plan.decide(found, manifest, before)
        self._manifest, self._fresh = manifest, False
        self._group.mark_taken_up(self.plan.decided)
        self._reader.keep_only([found.number])
        if self._forgets and not self._marked and self.plan.decided > _UNMARKED_DECISIONS:
            self._group.prune(self.plan.decided - _UNMARKED_DECISIONS)
        if self._forgets and self._marked and self.plan.decided - self._marked_at == _MANY_DECISIONS:
            logger.warning(
                "%d manifests with their samples are kept for the next checkpoint: call checkpointed() more often,"
                " or take up new samples less often (policy)",
                _MANY_DECISIONS,
            )

    def _next_decision(self) -> ManifestDecision | None:
        """Read the next decision, or decide for the newest manifest if the manifest has enough samples."""
        if not self._group.run and not self._group.join():
            self._require_fresh()
            return None
        number = self.plan.decided + 1
        stored = self._group.decision(number)
        if stored is not None:
            return stored
        newest = self._reader.newest()
        at_ms = int(self._ring.clock() * 1000)
        if len(newest) < self._ring.settings.min_size or not self.plan.can_fill_batch(newest, at_ms, self._manifest):
            return None
        made = self._group.decide(number, ManifestDecision(newest.number, at_ms))
        if made is None:
            self._require_fresh()
            self._group.leave()
        return made

    def _require_fresh(self) -> None:
        """Raise RingMismatch unless this process has just begun.

        A new process waits until the deaths of the last run's processes are certain.
        """
        if not self._fresh or self._reader.waiting_s > 4 * self._ring.settings.lease_s:
            raise self._fallen_behind_error()

    def _fallen_behind_error(self) -> RingMismatch:
        return RingMismatch(
            f"decision {self.plan.decided + 1} of the group {self._group.name} was deleted: another training uses"
            " the group, or this process is too far behind the others",
            "Give each training a group of its own, or load its state",
        )
