"""What the processes of one training decide together: which manifest each of them takes up next.

`groups/<name>/<run>.<number>` holds the decisions: the first process that needs the next one makes it, the others find
it there; so does a training that is resumed. A decision's manifest is pinned in the group's name before it can be found
(`pins/<name>`), until the training says that it needs no earlier ones. A training that begins anew in a group that has
been used begins another run of it, so that it never takes up what was decided for an earlier one.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable

from gpu_client.ring.errors import ObjectDamaged
from gpu_client.ring.leases import GROUPS, PINS, content_of, own_name, require_name
from gpu_client.ring.plan import Decision
from gpu_client.ring.reader import RingReader
from gpu_client.ring.ring import Ring
from gpu_client.ring.sealing import sealed, unsealed
from gpu_client.ring.store import Versioned

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
