"""Maintain a ring: publish, collect garbage and measure the flow, in any process of the ring.

One maintainer works at a time and renews a lease; after its lease has expired, another process takes over. Two
concurrent maintainers are safe: every write is a compare-and-swap.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpu_client.ring.core.back_pressure import RingFlow
from gpu_client.ring.core.garbage_collector import GarbageCollector, sum_reads
from gpu_client.ring.core.liveness import LeaseHandle, LeaseWatch, SilenceNotes
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.core.storage_quota import StoragePressure, measure_storage, read_pressure
from gpu_client.ring.format.manifest import ObjectId, RingManifest, SampleClaim
from gpu_client.ring.format.records import PUBLISHER, decode_record
from gpu_client.ring.settings import RingSettings

logger = logging.getLogger("baton.ring")

TAKEN_OVER_AFTER_S = 1.0
"""Minimum seconds without a renewal before a takeover; at least four turn intervals."""
_LOG_AGAIN_S = 60.0
"""Interval, in seconds, at which a repeated failure is logged again."""
COLLECTIONS_IN_A_LEASE = 6


class Maintainer:
    """Maintainer of a ring: `turn` does one round, `start` runs rounds in a thread until `close`."""

    def __init__(self, ring: Ring, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: name of this maintainer in the lease record."""
        self._ring = ring
        self._name = name
        self._clock = clock
        self._watch = LeaseWatch(clock)
        self._collector = GarbageCollector(ring, self._watch)
        self._silence_notes = SilenceNotes(ring.store, self._watch)
        self._saved_publisher_at = -float("inf")
        self._lease: LeaseHandle | None = None
        self._collected_at = -float("inf")
        self._published_at = clock()
        self.interval_s = choose_turn_interval_s(ring.settings)
        """Seconds between two turns."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._turned = threading.Condition()
        self.turns = 0
        """Number of updates of `flow`."""
        self.flow = RingFlow()
        """Newest known flow, measured by this or another maintainer."""
        self._measured = 0
        """Number of measurements by all maintainers of the ring."""
        self.trouble = ""
        """Text of the last turn's or collection's failure; "" after a success."""
        self._uncollected: Exception | None = None
        """Failure of the last collection, or None."""
        self._left: frozenset[ObjectId] | None = None
        """Unlisted objects of the newest collection, until the count of orphans."""
        self._unclaimed: frozenset[ObjectId] | None = None
        """Unclaimed objects of the collection before the newest."""
        self._logged_at = -float("inf")

    @property
    def flow_known(self) -> bool:
        """Return True after any maintainer has measured the flow."""
        return self._measured > 0

    def turn(self) -> bool:
        """Do one round if this maintainer holds the lease. Returns False if another maintainer does.

        While another maintainer collects garbage, this one publishes. The method raises failures of publication at once
        and failures of collection at the end, because many processes wait for the flow and no process waits for the
        deletion.
        """
        ring = self._ring
        after_s = max(TAKEN_OVER_AFTER_S, 4 * self.interval_s)
        if self._lease is None or self._lease.lost:
            self._uncollected = None
            record = ring.store.record(PUBLISHER)
            self._adopt_flow(decode_record(record))
            busy = bool(decode_record(record).get("busy"))
            if busy:
                after_s += 2 * ring.settings.lease_s
            unchanged_s = self._watch.unchanged_s(PUBLISHER, record) if record is not None else math.inf
            if unchanged_s <= after_s:
                if busy and unchanged_s > 0:
                    self._save_publisher_silence(unchanged_s)
                    self._publish_while_collecting()
                return False
            # The first collection may take long, therefore the earlier flow stays in force until the first measurement.
            self._lease = LeaseHandle(ring.store, PUBLISHER, {"holder": self._name, **self._flow_record()}, record)
            if self._lease.lost:
                return False
            # A publisher saves its notes before its record stops being busy. Therefore the notes of a publisher that is
            # not busy are at least as old as the record's silence.
            self._silence_notes.load(plus_s=unchanged_s if record is not None and not busy else 0.0)
        manifest = self._publish_if_due() or ring.newest()
        due = self._clock() - self._collected_at >= ring.settings.lease_s / COLLECTIONS_IN_A_LEASE
        pressure = read_pressure(ring)
        collecting = due or pressure.high
        if collecting:
            # Collection may take longer than the takeover time. `busy` prevents concurrent collections, while other
            # processes publish.
            self._lease.renew(busy=True)
            self._collect(pressure)
        flow = self.measure_flow(manifest)
        self._lease.renew(**flow.content(), measured=self._measured + 1, busy=False)
        self._set_flow(flow, self._measured + 1)
        if collecting and self._uncollected is not None:
            raise self._uncollected
        return True

    def _save_publisher_silence(self, unchanged_s: float) -> None:
        """Save, at intervals, the silence of the collecting process.

        This process may die before detecting the death of the collecting process; the next one continues from the note.
        """
        every_s = self._ring.settings.lease_s / COLLECTIONS_IN_A_LEASE
        if unchanged_s >= every_s and self._clock() - self._saved_publisher_at >= every_s:
            self._silence_notes.save_publisher()
            self._saved_publisher_at = self._clock()

    def _publish_while_collecting(self) -> None:
        """Publish while another process collects or has died during a collection.

        The other process keeps the collection and the lease record, so that its death can be detected.
        """
        manifest = self._publish_if_due() or self._ring.newest()
        self._set_flow(self.measure_flow(manifest), self._measured)

    def _publish_if_due(self) -> RingManifest | None:
        """Publish if the interval has passed."""
        interval_s = self._ring.settings.publish_interval_s
        now = self._clock()
        if self.interval_s < interval_s and now - self._published_at < interval_s - self.interval_s / 2:
            return None
        published = self._ring.publish()
        self._published_at = now
        return published

    def _collect(self, pressure: StoragePressure) -> None:
        fenced, self._uncollected = 0, None
        try:
            found = self._collector.collect()
            fenced, self._left = found.fenced, found.left
            measure_storage(self._ring)
            if found.replaced and pressure.wanted:
                # While all writers wait, no new manifest appears, and the retention would keep the replaced objects
                # forever. Therefore the maintainer publishes the newest manifest again.
                self._ring.republish()
            self._silence_notes.save()
        except Exception as error:  # noqa: BLE001 - raised after the flow is updated
            self._uncollected = error
        # The next turn publishes the ends of fenced writers and can then delete their garbage, therefore the next
        # collection is due at once.
        self._collected_at = -float("inf") if fenced else self._clock()

    def publish_from(self, samples: int) -> None:
        """Publish, without the lease, if at least `samples` samples wait. The next turn handles a failure."""
        try:
            found = self._ring.publish_from(samples)
        except Exception as error:  # noqa: BLE001 - the samples stay claimed
            self._log_failure(error)
            return
        with self._turned:
            newest = found.newest
            flow = self.flow._replace(inserted=newest.inserted, finished=found.waiting, readable=len(newest))
            self._set_flow(flow, self._measured)

    def measure_flow(self, manifest: RingManifest) -> RingFlow:
        """Measure the flow of the ring."""
        claims = self._ring.claims()
        finished = manifest.finished(claims)
        problem = sum_reads(self._ring)
        orphans = self._count_orphans(claims)
        return RingFlow(
            manifest.inserted, finished, problem.read, len(manifest), problem.wanted, problem.starved, orphans
        )

    def _count_orphans(self, claims: Iterable[SampleClaim]) -> int:
        """Count orphans of the newest collection, without another listing. `claims`: listed after the collection."""
        if self._left is None:
            return self.flow.orphans
        # A living writer soon claims its objects, therefore only objects left by two collections are orphans.
        unclaimed = self._left - {claim.object for claim in claims}
        before, self._unclaimed, self._left = self._unclaimed, unclaimed, None
        return min(len(unclaimed), self.flow.orphans) if before is None else len(unclaimed & before)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="ring-keeper", daemon=True)
        self._thread.start()

    def wait_turn(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for a newer `flow`."""
        with self._turned:
            before = self.turns
            self._turned.wait_for(lambda: self.turns > before, timeout_s)

    def close(self) -> None:
        """End the thread and release the lease."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._lease is not None:
            try:
                if not self._lease.lost:
                    self._silence_notes.save()
            finally:
                self._lease.release()

    def __enter__(self) -> Maintainer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self.interval_s):
            try:
                self.turn()
                if self._uncollected is None:
                    self.trouble = ""
            except Exception as error:  # noqa: BLE001 - the ring would stand still without maintenance
                self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"
        if problem != self.trouble or self._clock() - self._logged_at > _LOG_AGAIN_S:
            logger.warning("the ring cannot be maintained now: %s", problem, exc_info=not isinstance(error, OSError))
            self._logged_at = self._clock()
        self.trouble = problem

    def _adopt_flow(self, content: Mapping[str, Any]) -> None:
        """Adopt a new measurement from the record, because writers count their samples since the newest measurement."""
        measured = content.get("measured")
        if isinstance(measured, int) and measured != self._measured:
            self._set_flow(RingFlow.of_content(content), measured)

    def _flow_record(self) -> dict[str, Any]:
        return {**self.flow.content(), "measured": self._measured} if self._measured else {}

    def _set_flow(self, flow: RingFlow, measured: int) -> None:
        with self._turned:
            self.flow, self._measured = flow, measured
            self.turns += 1
            self._turned.notify_all()


def choose_turn_interval_s(settings: RingSettings) -> float:
    """Choose the seconds between two turns, an integral part of `publish_interval_s`.

    Writers publish and replace samples between scheduled publications, therefore collections are as frequent.
    """
    interval_s = settings.publish_interval_s
    if settings.publish_every_samples is None:
        return interval_s
    return interval_s / math.ceil(interval_s * COLLECTIONS_IN_A_LEASE / settings.lease_s)
