"""Put samples into a ring.

A sample is stored, then claimed, then counted; `put` returns after the claim. No claimed sample is lost, whichever
process dies (with `fsync` also after a loss of power), and none is thrown away: a writer that is too far ahead waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_client.ring.core.back_pressure import writer_wait_reason
from gpu_client.ring.core.liveness import LeaseHandle, require_name, unique_name
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.core.storage_quota import WriterGrants
from gpu_client.ring.errors import RingError, RingMismatch, SampleRefused, StoreFull, WaitedTooLong, WriterFenced
from gpu_client.ring.format.codecs import require_codec, require_finite, require_quantisable_arrays
from gpu_client.ring.format.manifest import WRITER_NAME, ObjectId, SampleClaim
from gpu_client.ring.format.objects import Provenance, encode
from gpu_client.ring.format.records import WRITERS, decode_record
from gpu_client.ring.format.sample_tree import FlattenedSample, flatten
from gpu_client.ring.generating.seeds import to_json_seed
from gpu_client.ring.settings import RingSettings

logger = logging.getLogger("baton.ring")


@dataclass(eq=False)
class PendingSample:
    """A sample whose pack is not full, from the beginning of its `put`."""

    taken: FlattenedSample
    seed: object
    size_bytes: int
    stored: bool = False
    """Set only for the last sample of a pack: the `put` of each earlier one has returned."""


def sum_bytes(pack: Iterable[PendingSample]) -> int:
    """Sum up the sizes of the samples (bytes)."""
    return sum(one.size_bytes for one in pack)


def count_fitting(pack: Sequence[PendingSample], settings: RingSettings) -> int:
    """Count the samples that the next object holds."""
    size_bytes = 0
    for place, one in enumerate(pack[: settings.pack]):
        size_bytes += one.size_bytes
        if place and size_bytes > settings.most_pack_bytes:
            return place
    return min(len(pack), settings.pack)


_TRIES = 8
READ_AT_ONCE = 256
"""Samples that readers may take at a time without making writers wait."""


class RingWriter:
    """Generating process. Thread-safe: concurrent `put` calls store one sample after the other."""

    def __init__(
        self,
        ring: Ring,
        name: str = "",
        *,
        generator: str = "",
        version: str = "",
        maintainer: Maintainer | None = None,
        patience_s: float = 600.0,
        threads: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
        should_give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`name`: a process that takes an existing name fences its former owner; default: a new name.

        `generator`, `version`: origin of the samples, for their headers. `maintainer`: maintains the ring; default: an
        own thread. `patience_s`: limit of the wait for readers or space; `should_give_up` is polled meanwhile and ends
        the wait. Without `threads` the caller calls `renew`, and `turn` of the maintainer, regularly. Raises
        RingMismatch for an invalid name.
        """
        self.name = require_name(name, "writer", WRITER_NAME) if name else unique_name()
        require_codec(ring.settings.codec)
        self._ring = ring
        self._generator, self._version = generator, version
        self._patience_s, self._clock, self._pause = patience_s, clock, pause
        self._should_give_up = should_give_up
        self._lock = threading.Lock()
        self._inside = 0
        self._pack: list[PendingSample] = []
        self._pack_bytes = 0
        self._seq = 0
        self._process = os.getpid()
        self._closed = False
        self._claimed: ObjectId | None = None
        self._unclaimed: SampleClaim | None = None
        self._calls = threading.local()  # `raised`: sample of the thread's last `put` that has not returned
        self._uncounted_samples = 0
        self._seen_turns = 0
        self._kind: object = None
        """Structure and arrays of the last sample whose schema was compared with the ring's."""
        self.waited_s = 0.0
        self.refused = 0
        """Number of refused samples."""
        self.put_samples = 0
        self.put_bytes = 0
        self._epoch, self._lease = self._begin_epoch()
        self._grants = WriterGrants(ring, self.name, self._epoch)
        self._closing = threading.Event()
        self._maintainer = maintainer or Maintainer(ring, self.name)
        self._owns_maintainer = maintainer is None
        self._renewing = threading.Thread(target=self._renew_often, name="ring-writer", daemon=True)
        if threads:
            self._renewing.start()
        if threads and self._owns_maintainer:
            self._maintainer.start()

    def put(self, sample: object, *, seed: object = None) -> None:
        """Store a sample when there is space. `seed`: origin of the sample, a JSON value.

        When `put` returns, the caller may reuse the arrays. Raises SampleRefused (the ring continues without the
        sample), WriterFenced, WaitedTooLong, StoreFull, and OSError for an unreachable store. After any exception,
        KeyboardInterrupt included, the caller may put the sample again, unless `commit_uncertain` is True: then the
        sample is stored. Earlier samples stay: the next call or `flush` stores them.
        """
        self._calls.raised = None
        self._require_usable()
        try:
            seed = to_json_seed(seed)
            taken = self._check(sample)
        except SampleRefused:
            with self._lock:
                self.refused += 1
            raise
        self._calls.raised = own = PendingSample(taken, seed, taken.size_bytes)
        with self._exclusive():
            self._wait_for_room()
            settings = self._ring.settings
            try:
                self._pack.append(own)
                self._pack_bytes += own.size_bytes
                # The sample may fill its pack, or exceed an incomplete one and then perhaps fill its own.
                while len(self._pack) >= settings.pack or self._pack_bytes >= settings.most_pack_bytes:
                    self._store()
                if self._pack:
                    # The sample is stored later, and the arrays belong to the caller.
                    own.taken = taken.copied()
            except BaseException:
                self._pack = [one for one in self._pack if one is not own]
                self._pack_bytes = sum_bytes(self._pack)
                raise
        self._calls.raised = None

    def run(self, generator: Iterable[object], *, seeds: bool = False) -> int:
        """Put all samples of a generator. Returns the number of accepted samples; refused ones are logged.

        `seeds`: the generator yields pairs of sample and seed.
        """
        for encoded in generator:
            sample, seed = encoded if seeds and isinstance(encoded, tuple) else (encoded, None)
            try:
                self.put(sample, seed=seed)
            except SampleRefused as error:
                logger.warning("a sample was refused: %s", error)
        self.flush()
        return self.put_samples

    def flush(self) -> None:
        """Store the samples of an incomplete pack."""
        self._require_usable()
        with self._exclusive():
            while self._pack:
                self._store()
            self._claim()

    def swap(self) -> None:
        """Publish all samples now."""
        self.flush()
        self._ring.publish_all(self._claimed, at_once=True)

    @property
    def commit_uncertain(self) -> bool:
        """True if the last `put` of this thread has raised after storing its sample: do not put the sample again.

        The next call of any thread claims the sample. For a fenced writer it is unknown whether the sample counts.
        """
        raised: PendingSample | None = getattr(self._calls, "raised", None)
        return raised is not None and raised.stored

    def owns_name(self) -> bool:
        """Read the store and return True if no other process has taken the name."""
        return self._lease.is_own()

    def renew(self) -> None:
        """Renew the lease with the current statistics."""
        stats = {
            "put": self.put_samples,
            "bytes": self.put_bytes,
            "refused": self.refused,
            "waited_s": round(self.waited_s, 3),
        }
        self._lease.renew(**stats, at_ms=self._now_ms())

    def close(self) -> None:
        """Store the remaining samples and leave. The claims stay valid. A second call does nothing."""
        if self._closed or self._process != os.getpid():
            return
        self._require_not_inside()
        try:
            self.flush()
            self._ring.publish_all(self._claim_end())
        finally:
            self._closed = True
            self._closing.set()
            if self._renewing.is_alive():
                self._renewing.join()
            try:
                if self._owns_maintainer:
                    self._maintainer.close()
            finally:
                # If samples remain, other processes detect the departure.
                if not self._pack and self._unclaimed is None:
                    self._lease.release()

    def __enter__(self) -> RingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_epoch(self) -> tuple[int, LeaseHandle]:
        """Begin a new epoch of this name, which fences its former owner."""
        key = f"{WRITERS}{self.name}"
        for _ in range(_TRIES):
            record = self._ring.store.record(key)
            known = [int(decode_record(record).get("epoch", 0))]
            # Inbox before manifest: claims that leave the inbox are in the newest manifest by then.
            known += [claim.object.epoch for claim in self._ring.claims() if claim.object.writer == self.name]
            last = self._ring.newest()
            known += [last.passed[self.name].epoch] if self.name in last.passed else []
            known += [slot.object.epoch for slot in last.slots if slot.object.writer == self.name]
            epoch = max(known) + 1
            lease = LeaseHandle(self._ring.store, key, {"epoch": epoch, "generator": self._generator}, record)
            if not lease.lost:
                self._ring.store.create(SampleClaim.beginning(self.name, epoch, self._now_ms()).key, [])
                return epoch, lease
        raise RingMismatch(f"the writer's name {self.name} is taken again and again", "Give each process its own")

    def _check(self, sample: object) -> FlattenedSample:
        taken = flatten(sample)
        settings = self._ring.settings
        if not taken.leaves:
            raise SampleRefused("the sample has no array", "Put at least one array or tensor")
        if settings.finite:
            require_finite(taken)
        if settings.quantise:
            require_quantisable_arrays(taken, settings)
        # Plain values, whose types count, are not in the structure. Without them, equal structures and arrays have
        # equal schemas, and making a schema takes as long as hashing a small sample.
        kind = (taken.structure, taken.arrays)
        if taken.plain or kind != self._kind:
            self._ring.require_schema(taken.schema(shapes=settings.shapes == "same"))
            self._kind = kind
        return taken

    def _wait_for_room(self) -> None:
        def reason_to_wait() -> str:
            flow = self._maintainer.flow
            if self._maintainer.turns != self._seen_turns:
                self._seen_turns, self._uncounted_samples = self._maintainer.turns, 0
            ahead = flow._replace(finished=flow.finished + self._uncounted_samples)
            return writer_wait_reason(ahead, self._ring.settings, READ_AT_ONCE)

        self._wait_while(reason_to_wait)

    def _wait_while(self, reason_to_wait: Callable[[], str]) -> None:
        """Wait while there is a reason. Raises WriterFenced, WaitedTooLong."""
        began_at = self._clock()
        settings = self._ring.settings
        try:
            while True:
                if self._lease.lost:
                    raise self._fenced_error()
                why = reason_to_wait()
                if not why:
                    return
                left_s = self._patience_s - (self._clock() - began_at)
                if left_s < 0 or self._should_give_up():
                    trouble = self._maintainer.trouble
                    raise WaitedTooLong(
                        f"for {self._patience_s:g} s, {why}{f' ({trouble})' if trouble else ''}",
                        "Read from the ring, or make a larger ring",
                    )
                # Bound the wait for a slow publisher, because this writer may be taken for dead meanwhile.
                self._maintainer.wait_turn(min(settings.publish_interval_s * 2, settings.lease_s / 3, left_s + 0.001))
        finally:
            self.waited_s += self._clock() - began_at

    def _store(self) -> None:
        """Store and claim a pack. An object without a claim is claimed first by the next call."""
        self._claim()
        settings = self._ring.settings
        count = count_fitting(self._pack, settings)
        pack, rest = self._pack[:count], self._pack[count:]
        for _ in range(_TRIES):
            # Increment first: an object that was stored despite a failure is left behind, and another is made.
            self._seq += 1
            found = ObjectId(self.name, self._epoch, self._seq)
            encoded = encode(
                [one.taken for one in pack],
                Provenance(*found, round(self._ring.clock(), 3), self._generator, self._version),
                seeds=[one.seed for one in pack],
                codec=settings.codec,
                quantised=dict(settings.quantise),
            )
            if settings.max_bytes is not None:
                self._wait_while(lambda size=encoded.size_bytes: self._grants.reserve(size, count))  # type: ignore[misc]
            # An existing object may be of any process and is not claimed.
            if self._create_with_retries(found.key, encoded):
                break
        else:
            raise RingMismatch(
                f"objects of unknown origin exist under the name {self.name}", "Give the writer another name"
            )
        claim, stored_bytes, rest_bytes = SampleClaim(found, count, self._now_ms()), encoded.size_bytes, sum_bytes(rest)
        # One statement without calls: an interrupt in between would store the pack again or count it wrong.
        self._unclaimed, self._pack, self._pack_bytes, pack[-1].stored = claim, rest, rest_bytes, True
        self.put_bytes += stored_bytes
        self._claim()

    def _claim(self) -> None:
        claim = self._unclaimed
        if claim is None:
            return
        self._create_with_retries(claim.key, [])
        # A new owner takes the lease and then begins an epoch: a claim that existed while the lease was ours counts.
        if not self._lease.is_own():
            raise self._fenced_error()
        self._unclaimed = None
        self._claimed = claim.object
        self.put_samples += claim.samples
        self._uncounted_samples += claim.samples
        if self._ring.settings.publish_every_samples is not None:
            self._maintainer.publish_from(self._ring.settings.publish_every_samples)

    def _claim_end(self) -> ObjectId | None:
        """Claim the end of the epoch, so that the writer can be forgotten soon. Returns None without the lease."""
        if not self._lease.is_own():
            return None
        ending = SampleClaim.ending(self.name, self._epoch, self._now_ms())
        self._ring.store.create(ending.key, [])
        return ending.object

    def _create_with_retries(self, key: str, pieces: Sequence[memoryview]) -> bool:
        began_at = self._clock()
        stats = False
        while True:
            try:
                return self._ring.store.create(key, pieces)
            except StoreFull:
                if self._should_give_up() or self._clock() - began_at > self._patience_s or self._closing.is_set():
                    raise
                if not stats:
                    logger.warning("there is no space for a sample: waiting")
                stats = True
                self._pause(min(self._ring.settings.publish_interval_s, 1.0))

    def _renew_often(self) -> None:
        while not self._closing.wait(self._ring.settings.lease_s / 3):
            try:
                self.renew()
            except Exception as error:  # noqa: BLE001 - a silent writer counts as dead
                logger.warning("the writer's lease cannot be renewed now: %r", error)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Serialize threads. Raises RingError for a nested call in a signal handler, which would deadlock."""
        self._require_not_inside()
        with self._lock:
            self._inside = threading.get_ident()
            try:
                yield
            finally:
                self._inside = 0

    def _require_not_inside(self) -> None:
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

    def _fenced_error(self) -> WriterFenced:
        return WriterFenced(
            f"another process writes as {self.name}, or the writer counted as dead", "Begin anew with RingWriter"
        )

    def _now_ms(self) -> int:
        # Keys of claims have no sign, and a clock may be negative.
        return max(int(self._ring.clock() * 1000), 0)
