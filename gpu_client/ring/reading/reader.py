"""Reading from a ring: what is pinned stays readable, and what is damaged is noticed, told and left out."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from gpu_client.ring.core.damage_report import quarantine_key, tell_job
from gpu_client.ring.core.garbage_collector import add_read, read_so_far
from gpu_client.ring.core.liveness import Held, own_name, require_name
from gpu_client.ring.core.rate_limiter import Flow, read_wait
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingError, WaitedTooLong
from gpu_client.ring.format.manifest import Manifest, Slot
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import READERS, content_of
from gpu_client.ring.store.protocol import DistantStore, ExpectingStore

logger = logging.getLogger("baton.ring")

_OPEN_OBJECTS = 64
"""Objects that a reader keeps open, so that samples of one pack are read once."""
_OPEN_BYTES = 512 * 1024 * 1024
"""And so much of them: not every place gives them without taking memory."""
_PIN_TRIES = 100
_ADVICE = ". It is left out; its generator makes another one"
_TOLD_EVERY_S = 1.0
"""What a reader has read, where nobody waits for it."""
_OFTEN_S = 1.0
"""For so long it looks often for what it waits for; then as often as something can come."""


class RingReader:
    """One process that reads. It says which manifests it needs, and how much it has read. Threads may share it."""

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
        """`patience_s`: how long `wait` waits. Without `threads` the caller calls `tell` every few moments.

        Raises RingMismatch for a name that is none.
        """
        self.name = require_name(name, "reader") if name else own_name()
        self.ring = ring
        self.patience_s, self._clock, self._pause = patience_s, clock, pause
        self._pinned: list[int] = []
        self._passing = 0
        self._doubted: set[int] = set()
        self._objects: OrderedDict[str, StoredSamples] = OrderedDict()
        self._lock = threading.Lock()
        self._telling = threading.RLock()
        self.read_samples = 0
        self.waited_s = 0.0
        self.waiting_s = 0.0
        """For how long `wait` has waited by now."""
        self.wanted = 0
        """Samples that are taken at a time: writers do not wait for fewer to be read."""
        self.group = ""
        """The training that it reads for, if it has a plan with others; and how far it is in it."""
        self.run = self.decided = 0
        self._starved = False
        self.retries = 0
        """How often something had to be looked at again: a manifest that was left behind, an object that was bad."""
        self.quarantined: dict[str, str] = {}
        """Damaged objects that this reader has met: why, by their key."""
        self._process = os.getpid()
        self._told: dict[str, Any] = {}
        self._told_at = self._clock()
        self._lease = self._begun(f"{READERS}{self.name}")
        self._closing = threading.Event()
        self._renewing = threading.Thread(target=self._renew_often, name="ring-reader", daemon=True)
        if threads:
            self._renewing.start()

    def newest(self) -> Manifest:
        """The newest manifest, pinned until the next call of this, or for longer by `keep_only`.

        Raises ManifestMissing, RingMismatch.
        """
        # A manifest is kept while it is among the newest `retain`; the pin is seen by every collector that begins after
        # it was written. So it holds if the pointer, looked at behind it, has not left the manifest behind.
        for _ in range(_PIN_TRIES):
            number, _ = self.ring.pointer()
            if number and (number not in self._pinned or number in self._doubted):
                with self._telling:
                    kept = [one for one in self._pinned if one != self._passing]
                    self._doubted.discard(number)
                    self._passing = number
                    self._pin([*kept, number])
                later, _ = self.ring.pointer()
                if later - number >= self.ring.settings.retain or number in self._doubted:
                    self.retries += 1
                    continue
            return self._upcoming(self.ring.manifest(number))
        raise ManifestMissing(
            "manifests are replaced faster than they can be read", "Raise retain, or publish less often"
        )

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Give up all pins but these."""
        wanted = set(numbers)
        with self._telling:
            kept = [one for one in self._pinned if one in wanted]
            self._passing = 0
            self._doubted &= wanted
            if kept != self._pinned:
                self._pin(kept)

    def pin(self, number: int) -> Manifest:
        """One that another reader, or a pin, is known to keep. Raises ManifestMissing."""
        with self._telling:
            self._doubted.discard(number)
            self._pin([*self._pinned, number])
        return self._upcoming(self.ring.manifest(number))

    def wait(self, ready: Callable[[], Any], why: str, *, starving: bool = True) -> Any:
        """The first result of `ready` that is none of None and False. Raises WaitedTooLong.

        `starving`: only writers can end it, who are told not to wait for more reading.
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
                    raise WaitedTooLong(
                        f"for {self.patience_s:g} s, {why}", "Are generators running? See baton ring status"
                    )
                if starving and not self._starved and waited_s > interval_s:
                    self._starved = True
                    self.tell()
                self._pause(min(0.02, interval_s / 4) if waited_s < _OFTEN_S else min(max(interval_s / 2, 0.02), 1.0))
        finally:
            self.waited_s += self._clock() - began_at
            self.waiting_s, self._starved = 0.0, False

    def soon(self, slots: Iterable[Slot]) -> None:
        """These samples are read next: where objects are far away, they are fetched at the same time."""
        if isinstance(self.ring.store, DistantStore):
            keys = dict.fromkeys(slot.object.key for slot in slots)
            with self._lock:
                wanted = [key for key in keys if key not in self._objects]
            self.ring.store.begin(wanted)

    def sample(self, slot: Slot) -> Any:
        """One sample of a pinned manifest. Raises ObjectDamaged, after having looked twice, and ManifestMissing."""
        key = slot.object.key
        for last_try in (False, True):
            try:
                return self._object(key).sample(slot.number)
            except (ObjectDamaged, IndexError) as error:
                with self._lock:
                    self._objects.pop(key, None)
                self.retries += 1
                if last_try:
                    self._require_kept(key)
                    raise self._quarantined(key, str(error)) from error
        raise AssertionError("unreachable")

    def sample_or_another(self, slot: Slot, manifest: Manifest) -> tuple[Any, Slot]:
        """The sample, or for a damaged one another of the same manifest, which is the same one for every process."""
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
            logger.warning("sample %s is damaged: %s is read for it", slot.id, other.id)
            return found, other
        raise ManifestMissing(f"nothing of manifest {manifest.number} can be read", "See baton ring verify --repair")

    def provenance(self, slot: Slot) -> dict[str, Any]:
        """Who made a sample, and from what."""
        stored = self._object(slot.object.key)
        return {**stored.provenance._asdict(), "seed": stored.seed(slot.number), "id": slot.id}

    def took(self, samples: int) -> None:
        """So many were handed to the training."""
        with self._telling:
            self.read_samples += samples

    def wait_for_flow(self, wanted: int) -> None:
        """Until so many samples more may be read, where a sample is not to be read too often in the mean."""
        settings = self.ring.settings
        if settings.reads_per_insert is None:
            return

        def ready() -> bool:
            self.tell()
            newest = self.ring.newest()
            flow = Flow(newest.inserted, 0, read_so_far(self.ring), len(newest))
            return not read_wait(flow, settings, wanted)

        self.wait(ready, "samples were read as often as they may be", starving=False)

    def tell(self) -> None:
        """Say now what is otherwise said every few moments."""
        with self._telling:
            content = self._content()
            if self._lease.renew(**content):
                self._told = content
            elif not self._closing.is_set():
                # Taken for dead: what it had told that it has read was counted then, and what it had pinned may be
                # gone. It begins again under another name: the one that it had is about to be removed.
                self.read_samples -= int(self._told.get("read", 0))
                self._doubted |= set(self._pinned)
                self._lease = self._begun(f"{READERS}{self.name[:55]}-{secrets.token_hex(4)}")
            self._told_at = self._clock()

    def others(self) -> list[dict[str, Any]]:
        """What other readers say of themselves, that are alive or have died only just now."""
        own = self._lease.key.removeprefix(READERS)
        return [said for name, said in readers_of(self.ring).items() if name != own]

    def is_own_process(self) -> bool:
        """False in a process that was forked from the one that made it."""
        return self._process == os.getpid()

    def close(self) -> None:
        """Leave; what was read counts on. Where the store cannot be reached, others notice that it is gone."""
        self._closing.set()
        self.soon(())  # what nobody reads any more is given up: else the process would wait for it at its end
        if self._renewing.is_alive():
            self._renewing.join()
        try:
            with self._telling:
                if self._lease.renew(manifests=[], read=self.read_samples, starved=False):
                    # Before the record goes: at no time does it look to others as if less had been read.
                    add_read(self.ring, self.read_samples, self._lease.mark)
                self._lease.release()
        except (RingError, OSError) as error:
            logger.warning("the reader cannot say that it leaves: %s", error)
        with self._lock:
            self._objects.clear()

    def __enter__(self) -> RingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begun(self, key: str) -> Held:
        while True:
            # One of that name that is there is another's, or is about to be removed.
            lease = Held(self.ring.store, key, self._content(), None)
            if not lease.lost:
                self._told = self._content()
                return lease
            key = f"{READERS}{self.name[:55]}-{secrets.token_hex(4)}"

    def _content(self) -> dict[str, Any]:
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
        self.tell()

    def _upcoming(self, manifest: Manifest) -> Manifest:
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
            raise ObjectDamaged(f"{key} is damaged: it is not there", "It is left out; its generator makes another one")
        found = StoredSamples(key, data)
        with self._lock:
            self._objects[key] = found
            open_bytes = sum(one.size_bytes for one in self._objects.values())
            while len(self._objects) > _OPEN_OBJECTS or (open_bytes > _OPEN_BYTES and len(self._objects) > 1):
                open_bytes -= self._objects.popitem(last=False)[1].size_bytes
        return found

    def _require_kept(self, key: str) -> None:
        """What is not there is no damage if this reader was taken for dead since it pinned it, or the ring is gone."""
        if self.ring.store.read(key) is not None:
            return
        self.ring.pointer()
        self.tell()
        if self._doubted:
            raise ManifestMissing(
                f"{key} is not kept any more: this reader was silent for so long that it was taken for dead",
                "Take the newest manifest, or raise lease_s",
            )

    def _quarantined(self, key: str, why: str) -> ObjectDamaged:
        if key not in self.quarantined:
            logger.error("%s", why)
            self.quarantined[key] = why
            try:
                self.ring.store.create(quarantine_key(key), [memoryview(why.encode())])
            except (RingError, OSError) as error:
                logger.warning("the damage cannot be noted in the ring: %s", error)
            tell_job(self.ring.place, key, why.removesuffix(_ADVICE))
        return ObjectDamaged(why.removesuffix(_ADVICE), "It is left out")

    def _renew_often(self) -> None:
        settings = self.ring.settings
        # Where writers wait for what is read, they have to be told soon.
        told_s = settings.publish_interval_s if settings.reads_per_insert else _TOLD_EVERY_S
        trouble = ""
        while not self._closing.wait(min(told_s, settings.lease_s / 3)):
            if self._content() == self._told and self._clock() - self._told_at < settings.lease_s / 3:
                continue
            try:
                self.tell()
                trouble = ""
            except Exception as error:  # noqa: BLE001 - a reader that falls silent loses what it has pinned
                if str(error) != trouble:
                    logger.warning("the reader's lease cannot be renewed now: %r", error)
                trouble = str(error)


def readers_of(ring: Ring) -> dict[str, dict[str, Any]]:
    """What each living reader says of itself."""
    return {key.removeprefix(READERS): content_of(ring.store.record(key)) for key in ring.store.keys(READERS)}
