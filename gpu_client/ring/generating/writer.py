"""Putting samples into a ring.

A sample is stored, then claimed, then counted: `put` returns when it is claimed. Whichever process dies, no finished
sample is lost that was claimed (with the setting `fsync` also when the power is lost), and none is thrown away: a
writer that is too far ahead waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_client.ring.core.liveness import Held, own_name, require_name
from gpu_client.ring.core.maintenance import Keeper
from gpu_client.ring.core.rate_limiter import write_wait
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.core.storage_quota import Grants
from gpu_client.ring.errors import RingError, RingMismatch, SampleRefused, StoreFull, WaitedTooLong, WriterFenced
from gpu_client.ring.format.codecs import check_codec, require_finite, require_quantisable_arrays
from gpu_client.ring.format.manifest import WRITER_NAME, Claim, ObjectId
from gpu_client.ring.format.objects import Provenance, encode
from gpu_client.ring.format.records import WRITERS, content_of
from gpu_client.ring.format.sample_tree import Taken, take_apart
from gpu_client.ring.generating.seeds import plain_seed
from gpu_client.ring.settings import RingSettings

logger = logging.getLogger("baton.ring")


@dataclass(eq=False)
class Waiting:
    """One of them, from the beginning of its `put` on."""

    taken: Taken
    seed: object
    size_bytes: int
    stored: bool = False
    """Set for the last sample of a pack alone: the `put` of each one before it has returned."""


def bytes_of(pack: Iterable[Waiting]) -> int:
    """Add up the sizes of the samples (bytes)."""
    return sum(one.size_bytes for one in pack)


def fitting(pack: Sequence[Waiting], settings: RingSettings) -> int:
    """Count the samples that the next object holds."""
    size_bytes = 0
    for place, one in enumerate(pack[: settings.pack]):
        size_bytes += one.size_bytes
        if place and size_bytes > settings.most_pack_bytes:
            return place
    return min(len(pack), settings.pack)


_TRIES = 8
READ_AT_ONCE = 256
"""Samples that readers may take at a time without making writers wait for them to be read."""


class RingWriter:
    """One process that generates. Threads may share it; each sample is stored by who puts it, one after the other."""

    def __init__(
        self,
        ring: Ring,
        name: str = "",
        *,
        generator: str = "",
        version: str = "",
        keeper: Keeper | None = None,
        patience_s: float = 600.0,
        threads: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`name`: who takes it up again fences whoever had it; new for each process unless given.

        `generator`, `version`: what makes the samples, for their header. `keeper`: looks after the ring; one of its own
        thread unless given. `patience_s`: how long `put` waits for readers, or for room; `gives_up` is asked meanwhile,
        and ends it earlier. Without `threads` the caller calls `renew`, and the keeper's `turn`, every few moments.
        Raises RingMismatch for a name that is none.
        """
        self.name = require_name(name, "writer", WRITER_NAME) if name else own_name()
        check_codec(ring.settings.codec)
        self._ring = ring
        self._generator, self._version = generator, version
        self._patience_s, self._clock, self._pause = patience_s, clock, pause
        self._gives_up = gives_up
        self._lock = threading.Lock()
        self._inside = 0
        self._pack: list[Waiting] = []
        self._pack_bytes = 0
        self._seq = 0
        self._process = os.getpid()
        self._closed = False
        self._claimed: ObjectId | None = None
        self._unclaimed: Claim | None = None
        self._calls = threading.local()  # `raised`: the sample of the thread's last `put`, unless that has returned
        self._unseen = 0
        self._seen_turns = 0
        self._kind: object = None
        """Structure and arrays of the last sample whose schema was compared with the ring's."""
        self.waited_s = 0.0
        self.refused = 0
        """Samples that were not taken."""
        self.put_samples = 0
        self.put_bytes = 0
        self._epoch, self._lease = self._begun()
        self._grants = Grants(ring, self.name, self._epoch)
        self._closing = threading.Event()
        self._keeper = keeper or Keeper(ring, self.name)
        self._own_keeper = keeper is None
        self._renewing = threading.Thread(target=self._renew_often, name="ring-writer", daemon=True)
        if threads:
            self._renewing.start()
        if threads and self._own_keeper:
            self._keeper.start()

    def put(self, sample: object, *, seed: object = None) -> None:
        """Store a sample, when there is room for it. `seed`: what it was made from, as JSON has it.

        When `put` returns, the caller may use the arrays again. Raises SampleRefused (the ring goes on without it),
        WriterFenced, WaitedTooLong, StoreFull, and OSError where the store cannot be reached. A `put` that raises
        anything, KeyboardInterrupt too, has not taken its sample, and the caller may put that one again; but where
        `unsure` is true then, the sample is stored. Earlier samples stay: the next call or `flush` stores them.
        """
        self._calls.raised = None
        self._require_usable()
        try:
            seed = plain_seed(seed)
            taken = self._checked(sample)
        except SampleRefused:
            with self._lock:
                self.refused += 1
            raise
        self._calls.raised = own = Waiting(taken, seed, taken.size_bytes)
        with self._alone():
            self._wait_for_room()
            settings = self._ring.settings
            try:
                self._pack.append(own)
                self._pack_bytes += own.size_bytes
                # Its pack may be full with it; or one that it does not fit into, and then perhaps its own.
                while len(self._pack) >= settings.pack or self._pack_bytes >= settings.most_pack_bytes:
                    self._store()
                if self._pack:
                    # It stays for later, and its arrays are the caller's.
                    own.taken = taken.copied()
            except BaseException:
                self._pack = [one for one in self._pack if one is not own]
                self._pack_bytes = bytes_of(self._pack)
                raise
        self._calls.raised = None

    def run(self, generator: Iterable[object], *, seeds: bool = False) -> int:
        """Put everything that a generator makes; how many were taken. Refused samples are logged and left out.

        `seeds`: it makes pairs of a sample and what it was made from.
        """
        for made in generator:
            sample, seed = made if seeds and isinstance(made, tuple) else (made, None)
            try:
                self.put(sample, seed=seed)
            except SampleRefused as error:
                logger.warning("a sample was refused: %s", error)
        self.flush()
        return self.put_samples

    def flush(self) -> None:
        """Store what waits for a pack to be full."""
        self._require_usable()
        with self._alone():
            while self._pack:
                self._store()
            self._claim()

    def swap(self) -> None:
        """Make readable what there is, now."""
        self.flush()
        self._ring.publish_all(self._claimed, at_once=True)

    @property
    def unsure(self) -> bool:
        """Whether the last `put` of this thread has raised, but its sample is stored: then it must not be put again.

        The next call of any thread claims it. Of a writer that is fenced nobody can say whether the sample counts.
        """
        raised: Waiting | None = getattr(self._calls, "raised", None)
        return raised is not None and raised.stored

    def holds_name(self) -> bool:
        """Whether nobody else has taken its name, asked of the store."""
        return self._lease.is_own()

    def renew(self) -> None:
        """Say that this writer is alive, and what it has done."""
        told = {
            "put": self.put_samples,
            "bytes": self.put_bytes,
            "refused": self.refused,
            "waited_s": round(self.waited_s, 3),
        }
        self._lease.renew(**told, at_ms=self._now_ms())

    def close(self) -> None:
        """Store what is left, and leave. Its claims stay good. A second time nothing happens."""
        if self._closed or self._process != os.getpid():
            return
        self._require_outside()
        try:
            self.flush()
            self._ring.publish_all(self._ended())
        finally:
            self._closed = True
            self._closing.set()
            if self._renewing.is_alive():
                self._renewing.join()
            try:
                if self._own_keeper:
                    self._keeper.close()
            finally:
                # With something left it is for others to find out that it is gone.
                if not self._pack and self._unclaimed is None:
                    self._lease.release()

    def __enter__(self) -> RingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begun(self) -> tuple[int, Held]:
        """A new epoch of this name: whoever had it before is fenced."""
        key = f"{WRITERS}{self.name}"
        for _ in range(_TRIES):
            record = self._ring.store.record(key)
            known = [int(content_of(record).get("epoch", 0))]
            # The inbox first: what leaves it is in the newest manifest by then.
            known += [claim.object.epoch for claim in self._ring.claims() if claim.object.writer == self.name]
            last = self._ring.newest()
            known += [last.passed[self.name].epoch] if self.name in last.passed else []
            known += [slot.object.epoch for slot in last.slots if slot.object.writer == self.name]
            epoch = max(known) + 1
            lease = Held(self._ring.store, key, {"epoch": epoch, "generator": self._generator}, record)
            if not lease.lost:
                self._ring.store.create(Claim.beginning(self.name, epoch, self._now_ms()).key, [])
                return epoch, lease
        raise RingMismatch(f"the writer's name {self.name} is taken again and again", "Give each process its own")

    def _checked(self, sample: object) -> Taken:
        taken = take_apart(sample)
        settings = self._ring.settings
        if not taken.leaves:
            raise SampleRefused("it has no array", "Put arrays or tensors, and what belongs to them")
        if settings.finite:
            require_finite(taken)
        if settings.quantise:
            require_quantisable_arrays(taken, settings)
        # Without plain values, whose types count and are not in the structure, equal structures and arrays have equal
        # schemas. Making a schema takes as long as hashing a small sample.
        kind = (taken.structure, taken.arrays)
        if taken.plain or kind != self._kind:
            self._ring.require_schema(taken.schema(shapes=settings.shapes == "same"))
            self._kind = kind
        return taken

    def _wait_for_room(self) -> None:
        def why_not() -> str:
            flow = self._keeper.flow
            if self._keeper.turns != self._seen_turns:
                self._seen_turns, self._unseen = self._keeper.turns, 0
            ahead = flow._replace(finished=flow.finished + self._unseen)
            return write_wait(ahead, self._ring.settings, READ_AT_ONCE)

        self._wait_until(why_not)

    def _wait_until(self, why_not: Callable[[], str]) -> None:
        """Wait as long as there is a reason to. Raises WriterFenced, WaitedTooLong."""
        began_at = self._clock()
        settings = self._ring.settings
        try:
            while True:
                if self._lease.lost:
                    raise self._fenced()
                why = why_not()
                if not why:
                    return
                left_s = self._patience_s - (self._clock() - began_at)
                if left_s < 0 or self._gives_up():
                    trouble = self._keeper.trouble
                    raise WaitedTooLong(
                        f"for {self._patience_s:g} s, {why}{f' ({trouble})' if trouble else ''}",
                        "Read from the ring, or make it larger",
                    )
                # Not for as long as a slow publisher may take: somebody may have taken this writer for dead.
                self._keeper.wait_turn(min(settings.publish_interval_s * 2, settings.lease_s / 3, left_s + 0.001))
        finally:
            self.waited_s += self._clock() - began_at

    def _store(self) -> None:
        """Store a pack, then claim it. What was stored and not claimed is claimed first by the next call."""
        self._claim()
        settings = self._ring.settings
        count = fitting(self._pack, settings)
        pack, rest = self._pack[:count], self._pack[count:]
        for _ in range(_TRIES):
            # Counted up first: an object that was stored in part of a failure is left behind, and another made.
            self._seq += 1
            found = ObjectId(self.name, self._epoch, self._seq)
            made = encode(
                [one.taken for one in pack],
                Provenance(*found, round(self._ring.clock(), 3), self._generator, self._version),
                seeds=[one.seed for one in pack],
                codec=settings.codec,
                quantised=dict(settings.quantise),
            )
            if settings.max_bytes is not None:
                self._wait_until(lambda size=made.size_bytes: self._grants.take(size, count))  # type: ignore[misc]
            # One that is there may be of anybody: it is not claimed.
            if self._with_room(lambda key=found.key, pieces=made: self._ring.store.create(key, pieces)):  # type: ignore[misc]
                break
        else:
            raise RingMismatch(
                f"there are objects of {self.name} already, of nobody knows what", "Give it another name"
            )
        claim, stored_bytes, rest_bytes = Claim(found, count, self._now_ms()), made.size_bytes, bytes_of(rest)
        # Without a call in between: an interrupt there would have the pack stored again, or counted wrong.
        self._unclaimed, self._pack, self._pack_bytes, pack[-1].stored = claim, rest, rest_bytes, True
        self.put_bytes += stored_bytes
        self._claim()

    def _claim(self) -> None:
        claim = self._unclaimed
        if claim is None:
            return
        self._with_room(lambda: self._ring.store.create(claim.key, []))
        # Whoever takes the name does so in the lease, and begins an epoch behind it: a claim that was there while the
        # lease was still this one's counts.
        if not self._lease.is_own():
            raise self._fenced()
        self._unclaimed = None
        self._claimed = claim.object
        self.put_samples += claim.samples
        self._unseen += claim.samples
        if self._ring.settings.publish_every_samples is not None:
            self._keeper.publish_from(self._ring.settings.publish_every_samples)

    def _ended(self) -> ObjectId | None:
        """Say that nothing more comes: then this writer need not be remembered for long. None if it cannot say so."""
        if not self._lease.is_own():
            return None
        ending = Claim.ending(self.name, self._epoch, self._now_ms())
        self._ring.store.create(ending.key, [])
        return ending.object

    def _with_room(self, store: Callable[[], bool]) -> bool:
        began_at = self._clock()
        told = False
        while True:
            try:
                return store()
            except StoreFull:
                if self._gives_up() or self._clock() - began_at > self._patience_s or self._closing.is_set():
                    raise
                if not told:
                    logger.warning("there is no room for a sample: it waits")
                told = True
                self._pause(min(self._ring.settings.publish_interval_s, 1.0))

    def _renew_often(self) -> None:
        while not self._closing.wait(self._ring.settings.lease_s / 3):
            try:
                self.renew()
            except Exception as error:  # noqa: BLE001 - a writer that falls silent is taken for dead
                logger.warning("the writer's lease cannot be renewed now: %r", error)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time. Raises RingError where it would wait for itself: in a handler of a signal."""
        self._require_outside()
        with self._lock:
            self._inside = threading.get_ident()
            try:
                yield
            finally:
                self._inside = 0

    def _require_outside(self) -> None:
        if self._inside == threading.get_ident():
            raise RingError(
                f"{self.name} is putting a sample, and was interrupted for this",
                "Let handlers of signals set a flag, and close the writer behind the loop",
            )

    def _require_usable(self) -> None:
        if self._process != os.getpid():
            raise WriterFenced(f"{self.name} writes in another process", "Each process begins its own RingWriter")
        if self._closed:
            raise WriterFenced(f"{self.name} was closed", "Begin anew with RingWriter")

    def _fenced(self) -> WriterFenced:
        return WriterFenced(
            f"another process writes as {self.name}, or it was taken for dead", "Begin anew with RingWriter"
        )

    def _now_ms(self) -> int:
        # Names of claims have no sign, and a clock may be anywhere.
        return max(int(self._ring.clock() * 1000), 0)
