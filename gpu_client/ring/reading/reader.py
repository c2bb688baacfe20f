"""Read a ring: pin manifests, verify samples, quarantine damaged samples."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from gpu_client.ring.core.back_pressure import RingFlow, reader_wait_reason
from gpu_client.ring.core.damage_report import quarantine_key, report_damage
from gpu_client.ring.core.garbage_collector import add_departed_reads, count_samples_read
from gpu_client.ring.core.liveness import LeaseHandle, require_name, unique_name
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingError, WaitedTooLong
from gpu_client.ring.format.manifest import RingManifest, Slot
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import READERS, decode_record
from gpu_client.ring.store.protocol import DistantStore, ExpectingStore

logger = logging.getLogger("baton.ring")

_OPEN_OBJECTS = 64
"""Maximum number of open objects, which save repeated reads of a pack."""
_OPEN_BYTES = 512 * 1024 * 1024
"""Maximum size in bytes of open objects, because some stores read objects into memory."""
_PIN_TRIES = 100
_ADVICE = ". Readers exclude the object; its generator makes other samples"
_STATS_INTERVAL_S = 1.0
"""Interval in seconds of statistics while no process waits for statistics."""
_FAST_POLL_S = 1.0
"""Seconds of fast polling at the beginning of a wait."""


class RingReader:
    """Reader that pins manifests and publishes its number of reads. Thread-safe."""

    def __init__(
        self,
        ring: Ring,
        name: str = "",
        *,
        patience_s: float = 600.0,
        threads: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`patience_s`: limit of `wait`. Without `threads` the caller calls `flush_stats` regularly.

        Raises RingMismatch for an invalid name.
        """
        self.name = require_name(name, "reader") if name else unique_name()
        self.ring = ring
        self.patience_s, self._clock, self._pause = patience_s, clock, pause
        self._pinned: list[int] = []
        self._transient_pin = 0
        self._unconfirmed: set[int] = set()
        self._objects: OrderedDict[str, StoredSamples] = OrderedDict()
        self._lock = threading.Lock()
        self._stats_lock = threading.RLock()
        self.read_samples = 0
        self.waited_s = 0.0
        self.waiting_s = 0.0
        """Duration of the current `wait`, in seconds."""
        self.wanted = 0
        """Number of samples taken at a time; back-pressure gives writers at least this slack."""
        self.group = ""
        """Name of the training's group, and the position of this process in the group."""
        self.run = self.decided = 0
        self._starved = False
        self.retries = 0
        """Number of repeated reads of replaced manifests and damaged objects."""
        self.quarantined: dict[str, str] = {}
        """Damaged objects of this reader: problem by key."""
        self._process = os.getpid()
        self._flushed_stats: dict[str, Any] = {}
        self._flushed_at = self._clock()
        self._lease = self._acquire_lease(f"{READERS}{self.name}")
        self._closing = threading.Event()
        self._renewing = threading.Thread(target=self._renew_often, name="ring-reader", daemon=True)
        if threads:
            self._renewing.start()

    def newest(self) -> RingManifest:
        """Return the newest manifest, pinned until the next call, or longer by `keep_only`.

        Raises ManifestMissing, RingMismatch.
        """
        # Every collector keeps the newest `retain` manifests, and a collector that begins after the pin respects the
        # pin. Therefore the pin is valid if the pointer, read after the pin, still has the manifest among the newest.
        for _ in range(_PIN_TRIES):
            number, _ = self.ring.pointer()
            if number and (number not in self._pinned or number in self._unconfirmed):
                with self._stats_lock:
                    pinned = [one for one in self._pinned if one != self._transient_pin]
                    self._unconfirmed.discard(number)
                    self._transient_pin = number
                    self._pin([*pinned, number])
                later, _ = self.ring.pointer()
                if later - number >= self.ring.settings.retain or number in self._unconfirmed:
                    self.retries += 1
                    continue
            return self._expect_objects(self.ring.manifest(number))
        raise ManifestMissing(
            "manifests are replaced faster than they can be read", "Raise retain, or publish less often"
        )

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Release the pins of all manifests except `numbers`."""
        wanted = set(numbers)
        with self._stats_lock:
            pinned = [one for one in self._pinned if one in wanted]
            self._transient_pin = 0
            self._unconfirmed &= wanted
            if pinned != self._pinned:
                self._pin(pinned)

    def pin(self, number: int) -> RingManifest:
        """Pin a manifest that another reader or pin protects. Raises ManifestMissing."""
        with self._stats_lock:
            self._unconfirmed.discard(number)
            self._pin([*self._pinned, number])
        return self._expect_objects(self.ring.manifest(number))

    def wait(self, ready: Callable[[], Any], why: str, *, starving: bool = True) -> Any:
        """Wait for a result of `ready` other than None and False. Raises WaitedTooLong.

        `starving`: only writers can end the wait, therefore writers must not wait for reads.
        """
        began_at = self._clock()
        interval_s = self.ring.settings.publish_interval_s
        try:
            while True:
                found = ready()
                if found is not None and found is not False:
                    return found
                self.waiting_s = waited_s = self._clock() - began_at
                if waited_s > self.patience_s:
                    raise WaitedTooLong(f"for {self.patience_s:g} s, {why}", "Start generators; see baton ring status")
                if starving and not self._starved and waited_s > interval_s:
                    self._starved = True
                    self.flush_stats()
                self._pause(
                    min(0.02, interval_s / 4) if waited_s < _FAST_POLL_S else min(max(interval_s / 2, 0.02), 1.0)
                )
        finally:
            self.waited_s += self._clock() - began_at
            self.waiting_s, self._starved = 0.0, False

    def prefetch(self, slots: Iterable[Slot]) -> None:
        """Prefetch the objects of the slots' samples from a distant store."""
        if isinstance(self.ring.store, DistantStore):
            keys = dict.fromkeys(slot.object.key for slot in slots)
            with self._lock:
                wanted = [key for key in keys if key not in self._objects]
            self.ring.store.prefetch(wanted)

    def sample(self, slot: Slot) -> Any:
        """Read a sample of a pinned manifest. Raises ObjectDamaged after two tries, and ManifestMissing."""
        key = slot.object.key
        for last_try in (False, True):
            try:
                return self._object(key).sample(slot.number)
            except (ObjectDamaged, IndexError) as error:
                with self._lock:
                    self._objects.pop(key, None)
                self.retries += 1
                if last_try:
                    self._require_retained(key)
                    raise self._quarantine(key, str(error)) from error
        raise AssertionError("unreachable")

    def sample_or_another(self, slot: Slot, manifest: RingManifest) -> tuple[Any, Slot]:
        """Read a sample; substitute a damaged sample by another of its manifest, equally in every process."""
        try:
            return self.sample(slot), slot
        except ObjectDamaged:
            pass
        slots = manifest.slots
        start = slots.index(slot)
        for offset in range(1, len(slots)):
            other = slots[(start + offset) % len(slots)]
            if other.object.key in self.quarantined:
                continue
            try:
                found = self.sample(other)
            except ObjectDamaged:
                continue
            logger.warning("sample %s is damaged: reading %s instead", slot.id, other.id)
            return found, other
        raise ManifestMissing(
            f"no sample of manifest {manifest.number} can be read", "See baton ring verify RING --repair"
        )

    def provenance(self, slot: Slot) -> dict[str, Any]:
        """Return the origin of a sample: writer, generator, seed."""
        stored = self._object(slot.object.key)
        return {**stored.provenance._asdict(), "seed": stored.seed(slot.number), "id": slot.id}

    def record_consumed(self, samples: int) -> None:
        """Count samples that the training has received."""
        with self._stats_lock:
            self.read_samples += samples

    def wait_for_flow(self, wanted: int) -> None:
        """Wait until back-pressure allows `wanted` more reads."""
        settings = self.ring.settings
        if settings.reads_per_insert is None:
            return

        def ready() -> bool:
            self.flush_stats()
            newest = self.ring.newest()
            flow = RingFlow(newest.inserted, 0, count_samples_read(self.ring), len(newest))
            return not reader_wait_reason(flow, settings, wanted)

        self.wait(ready, "the samples were read as often as samples_per_insert permits", starving=False)

    def flush_stats(self) -> None:
        """Write the statistics to the lease at once."""
        with self._stats_lock:
            content = self._stats()
            if self._lease.renew(**content):
                self._flushed_stats = content
            elif not self._closing.is_set():
                # A collector counted this reader as dead, added its reads to the total, and may have deleted its pinned
                # manifests. The old record is about to be deleted, therefore the reader continues under another name.
                self.read_samples -= int(self._flushed_stats.get("read", 0))
                self._unconfirmed |= set(self._pinned)
                self._lease = self._acquire_lease(f"{READERS}{self.name[:55]}-{secrets.token_hex(4)}")
            self._flushed_at = self._clock()

    def other_readers(self) -> list[dict[str, Any]]:
        """Read the records of all other readers, including readers that have died recently."""
        own = self._lease.key.removeprefix(READERS)
        return [note for name, note in list_readers(self.ring).items() if name != own]

    def is_own_process(self) -> bool:
        """Return False in a forked process."""
        return self._process == os.getpid()

    def close(self) -> None:
        """Leave the ring; the reads still count. If the store is unreachable, other processes detect the departure."""
        self._closing.set()
        self.prefetch(())  # The end of the process would wait for prefetches.
        if self._renewing.is_alive():
            self._renewing.join()
        try:
            with self._stats_lock:
                if self._lease.renew(manifests=[], read=self.read_samples, starved=False):
                    # The total grows before the deletion of the record, so that other processes never see fewer reads.
                    add_departed_reads(self.ring, self.read_samples, self._lease.mark)
                self._lease.release()
        except (RingError, OSError) as error:
            logger.warning("the departure of the reader cannot be recorded: %s", error)
        with self._lock:
            self._objects.clear()

    def __enter__(self) -> RingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _acquire_lease(self, key: str) -> LeaseHandle:
        while True:
            # A record under this name belongs to another process or is about to be deleted.
            lease = LeaseHandle(self.ring.store, key, self._stats(), None)
            if not lease.lost:
                self._flushed_stats = self._stats()
                return lease
            key = f"{READERS}{self.name[:55]}-{secrets.token_hex(4)}"

    def _stats(self) -> dict[str, Any]:
        return {
            "manifests": self._pinned,
            "read": self.read_samples,
            "waited_s": round(self.waited_s, 3),
            "damaged": len(self.quarantined),
            "lease_s": self.ring.settings.lease_s,
            "wanted": self.wanted,
            "starved": self._starved,
            "group": self.group,
            "run": self.run,
            "decided": self.decided,
        }

    def _pin(self, numbers: list[int]) -> None:
        self._pinned = sorted(set(numbers) - {0})
        self.flush_stats()

    def _expect_objects(self, manifest: RingManifest) -> RingManifest:
        if isinstance(self.ring.store, ExpectingStore):
            self.ring.store.expect([slot.object.key for slot in manifest.slots])
        return manifest

    def _object(self, key: str) -> StoredSamples:
        with self._lock:
            found = self._objects.get(key)
            if found is not None:
                self._objects.move_to_end(key)
                return found
        data = self.ring.store.read(key)
        if data is None:
            raise ObjectDamaged(
                f"{key} is damaged: the object is missing",
                "Readers exclude the object; its generator makes other samples",
            )
        found = StoredSamples(key, data)
        with self._lock:
            self._objects[key] = found
            open_bytes = sum(one.size_bytes for one in self._objects.values())
            while len(self._objects) > _OPEN_OBJECTS or (open_bytes > _OPEN_BYTES and len(self._objects) > 1):
                open_bytes -= self._objects.popitem(last=False)[1].size_bytes
        return found

    def _require_retained(self, key: str) -> None:
        """Raise ManifestMissing if the object was deleted and is therefore not damaged.

        The object was deleted because the ring was removed, or because a collector counted this reader as dead.
        """
        if self.ring.store.read(key) is not None:
            return
        self.ring.pointer()
        self.flush_stats()
        if self._unconfirmed:
            raise ManifestMissing(
                f"{key} was deleted: this reader was silent for too long and counted as dead",
                "Take the newest manifest, or raise lease_s",
            )

    def _quarantine(self, key: str, why: str) -> ObjectDamaged:
        if key not in self.quarantined:
            logger.error("%s", why)
            self.quarantined[key] = why
            try:
                self.ring.store.create(quarantine_key(key), [memoryview(why.encode())])
            except (RingError, OSError) as error:
                logger.warning("the damage cannot be recorded in the ring: %s", error)
            report_damage(self.ring.place, key, why.removesuffix(_ADVICE))
        return ObjectDamaged(why.removesuffix(_ADVICE), "Readers exclude the object")

    def _renew_often(self) -> None:
        settings = self.ring.settings
        # Writers that wait for reads need the statistics early.
        flush_every_s = settings.publish_interval_s if settings.reads_per_insert else _STATS_INTERVAL_S
        trouble = ""
        while not self._closing.wait(min(flush_every_s, settings.lease_s / 3)):
            if self._stats() == self._flushed_stats and self._clock() - self._flushed_at < settings.lease_s / 3:
                continue
            try:
                self.flush_stats()
                trouble = ""
            except Exception as error:  # noqa: BLE001 - a silent reader loses its pins
                if str(error) != trouble:
                    logger.warning("the reader's lease cannot be renewed now: %r", error)
                trouble = str(error)


def list_readers(ring: Ring) -> dict[str, dict[str, Any]]:
    """Read the records of the living readers by name."""
    return {key.removeprefix(READERS): decode_record(ring.store.record(key)) for key in ring.store.keys(READERS)}
