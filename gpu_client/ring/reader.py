"""Reading from a ring: what is pinned stays readable, and what is damaged is noticed, told and left out."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from gpu_client.ring.collector import add_read
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingError, WaitedTooLong
from gpu_client.ring.leases import READERS, Held, content_of
from gpu_client.ring.manifest import Manifest, Slot
from gpu_client.ring.objects import StoredSamples
from gpu_client.ring.ring import Ring
from gpu_client.ring.store import DistantStore

logger = logging.getLogger("baton.ring")

QUARANTINE = "quarantine/"
_OPEN_OBJECTS = 64
"""Objects that a reader keeps mapped, so that samples of one pack are read once."""
_PIN_TRIES = 100


class RingReader:
    """One process that reads. It says which manifests it needs, and how much it has read."""

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
        """`patience_s`: how long `wait` waits. Without `threads` the caller calls `tell` every few moments."""
        self.name = name or f"{socket.gethostname().split('.')[0][:32]}-{os.getpid()}-{secrets.token_hex(3)}"
        self.ring = ring
        self.patience_s, self._clock, self._pause = patience_s, clock, pause
        self._pinned: list[int] = []
        self._objects: OrderedDict[str, StoredSamples] = OrderedDict()
        self._lock = threading.Lock()
        self.read_samples = 0
        self.waited_s = 0.0
        self.quarantined: dict[str, str] = {}
        """Damaged objects that this reader has met: why, by their key."""
        self._process = os.getpid()
        self._lease = self._begun()
        self._closing = threading.Event()
        self._renewing = threading.Thread(target=self._renew_often, name="ring-reader", daemon=True)
        if threads:
            self._renewing.start()

    def newest(self) -> Manifest:
        """The newest manifest, pinned from now on. Raises ManifestMissing."""
        # A manifest is kept while it is among the newest `retain`; the pin is seen by every collector that begins after
        # it was written. So it holds if the pointer, looked at behind it, has not left the manifest behind.
        for _ in range(_PIN_TRIES):
            number, _ = self.ring.pointer()
            self._pin([*self._pinned, number])
            later, _ = self.ring.pointer()
            if later - number < self.ring.settings.retain:
                return self.ring.manifest(number)
            self._pin([one for one in self._pinned if one != number])
        raise ManifestMissing(
            "manifests are replaced faster than they can be read", "Raise retain, or publish_interval_s"
        )

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Give up all pins but these."""
        wanted = set(numbers)
        kept = [one for one in self._pinned if one in wanted]
        if kept != self._pinned:
            self._pin(kept)

    def pin(self, number: int) -> Manifest:
        """One that another reader, or a pin, is known to keep."""
        self._pin([*self._pinned, number])
        return self.ring.manifest(number)

    def wait(self, ready: Callable[[], Any], why: str) -> Any:
        """The first result of `ready` that is none of None and False. Raises WaitedTooLong."""
        began_at = self._clock()
        while True:
            found = ready()
            if found is not None and found is not False:
                self.waited_s += self._clock() - began_at
                return found
            if self._clock() - began_at > self.patience_s:
                raise WaitedTooLong(
                    f"for {self.patience_s:g} s, {why}", "Are generators running? See baton ring status"
                )
            self._pause(min(0.02, self.ring.settings.publish_interval_s / 4))

    def soon(self, slots: Iterable[Slot]) -> None:
        """These samples are read next: where objects are far away, they are fetched at the same time."""
        if isinstance(self.ring.store, DistantStore):
            keys = dict.fromkeys(slot.object.key for slot in slots)
            with self._lock:
                wanted = [key for key in keys if key not in self._objects]
            self.ring.store.begin(wanted)

    def sample(self, slot: Slot) -> Any:
        """One sample of a pinned manifest. Raises ObjectDamaged, after having looked twice."""
        key = slot.object.key
        for last_try in (False, True):
            try:
                return self._object(key).sample(slot.number)
            except (ObjectDamaged, IndexError) as error:
                with self._lock:
                    self._objects.pop(key, None)
                if last_try:
                    raise self._quarantined(key, str(error)) from error
        raise AssertionError("unreachable")

    def provenance(self, slot: Slot) -> dict[str, Any]:
        """Who made a sample, and from what."""
        stored = self._object(slot.object.key)
        return {**vars(stored.provenance), "seed": stored.seed(slot.number), "id": slot.id}

    def took(self, samples: int) -> None:
        """So many were handed to the training."""
        self.read_samples += samples

    def tell(self) -> None:
        """Say now what is otherwise said every few moments."""
        if not self._lease.renew(**self._content()) and not self._closing.is_set():
            # Taken for dead: what it has read was counted then. It begins again.
            self.read_samples = 0
            self._lease = self._begun()

    def is_own_process(self) -> bool:
        """False in a process that was forked from the one that made it."""
        return self._process == os.getpid()

    def close(self) -> None:
        """Leave; what was read counts on."""
        self._closing.set()
        if self._renewing.is_alive():
            self._renewing.join()
        if self._lease.renew(manifests=[], read=0):
            add_read(self.ring, self.read_samples)
        self._lease.release()
        with self._lock:
            self._objects.clear()

    def __enter__(self) -> RingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begun(self) -> Held:
        while True:
            key = f"{READERS}{self.name}"
            record = self.ring.store.record(key)
            lease = Held(self.ring.store, key, self._content(), record)
            if not lease.lost:
                return lease

    def _content(self) -> dict[str, Any]:
        return {
            "manifests": self._pinned,
            "read": self.read_samples,
            "waited_s": round(self.waited_s, 3),
            "damaged": len(self.quarantined),
            "lease_s": self.ring.settings.lease_s,
        }

    def _pin(self, numbers: list[int]) -> None:
        self._pinned = sorted(set(numbers) - {0})
        self.tell()

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
            while len(self._objects) > _OPEN_OBJECTS:
                self._objects.popitem(last=False)
        return found

    def _quarantined(self, key: str, why: str) -> ObjectDamaged:
        if key not in self.quarantined:
            logger.error("%s", why)
            self.quarantined[key] = why
            record = QUARANTINE + key.replace("/", ".")
            self.ring.store.create(record, [memoryview(why.encode())])
        return ObjectDamaged(why.removesuffix(". It is left out; its generator makes another one"), "It is left out")

    def _renew_often(self) -> None:
        while not self._closing.wait(min(self.ring.settings.publish_interval_s, self.ring.settings.lease_s / 3)):
            try:
                self.tell()
            except (RingError, OSError) as error:
                logger.warning("the reader's lease cannot be renewed now: %s", error)


def quarantined(ring: Ring) -> dict[str, str]:
    """Damaged objects that any reader has met: why, by their key."""
    found = {}
    for key in ring.store.keys(QUARANTINE):
        said = ring.store.read(key)
        found[key.removeprefix(QUARANTINE)] = bytes(said).decode() if said is not None else ""
    return found


def readers_of(ring: Ring) -> dict[str, dict[str, Any]]:
    """What each living reader says of itself."""
    return {key.removeprefix(READERS): content_of(ring.store.record(key)) for key in ring.store.keys(READERS)}
