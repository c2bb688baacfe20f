"""The work that any process may do for a ring: publishing what waits, removing what is not needed, telling who waits.

One of them does it at a time, as long as it keeps saying so; where it falls silent, another takes over. Two at once do
no harm: everything is decided by the store.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpu_client.ring.core.garbage_collector import Collector, readers_say
from gpu_client.ring.core.liveness import Held, Observations, Watch
from gpu_client.ring.core.rate_limiter import Flow
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.core.storage_quota import Pressure, measure, pressure_of
from gpu_client.ring.format.manifest import Claim, Manifest, ObjectId
from gpu_client.ring.format.records import PUBLISHER, content_of
from gpu_client.ring.settings import RingSettings

logger = logging.getLogger("baton.ring")

TAKEN_OVER_AFTER_S = 1.0
"""At least; and four times the interval in which a publisher looks for something to do."""
_TOLD_AGAIN_S = 60.0
"""The same trouble is not logged more often."""
COLLECTIONS_IN_A_LEASE = 6


class Keeper:
    """`turn` is one look at the ring; `start` does it in a thread until `close`."""

    def __init__(self, ring: Ring, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: tells it from others, in the record."""
        self._ring = ring
        self._name = name
        self._clock = clock
        self._watch = Watch(clock)
        self._collector = Collector(ring, self._watch)
        self._observations = Observations(ring.store, self._watch)
        self._noted_publisher_at = -float("inf")
        self._held: Held | None = None
        self._collected_at = -float("inf")
        self._published_at = clock()
        self.interval_s = turned_every_s(ring.settings)
        """Between two turns."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._turned = threading.Condition()
        self.turns = 0
        """How often `flow` was told anew."""
        self.flow = Flow()
        """As the one who does the work has told it last."""
        self._measured = 0
        """How often it was measured by then, by all who have done the work one after the other."""
        self.trouble = ""
        """Why the last turn, or the last collection, failed; empty if it did not."""
        self._uncollected: Exception | None = None
        """Why the last collection failed."""
        self._left: frozenset[ObjectId] | None = None
        """What the newest collection has left, until it was counted which of it are orphans."""
        self._unclaimed: frozenset[ObjectId] | None = None
        """Of what the collection before has left, what nobody had claimed."""
        self._complained_at = -float("inf")

    @property
    def knows(self) -> bool:
        """Whether all of `flow` was measured, by anybody."""
        return self._measured > 0

    def turn(self) -> bool:
        """Do the work if it is this one's to do; False if it is another's, but for publishing while that one collects.

        What publishing raises is raised at once. What collecting raises is raised last: nobody waits for what is not
        removed, but many for the flow.
        """
        ring = self._ring
        after_s = max(TAKEN_OVER_AFTER_S, 4 * self.interval_s)
        if self._held is None or self._held.lost:
            self._uncollected = None
            record = ring.store.record(PUBLISHER)
            self._hear(content_of(record))
            busy = bool(content_of(record).get("busy"))
            if busy:
                after_s += 2 * ring.settings.lease_s
            unchanged_s = self._watch.unchanged_s(PUBLISHER, record) if record is not None else math.inf
            if unchanged_s <= after_s:
                if busy and unchanged_s > 0:
                    self._note_publisher(unchanged_s)
                    self._publish_beside()
                return False
            # Until it has measured, what was told before holds: its first collection may take long.
            self._held = Held(ring.store, PUBLISHER, {"holder": self._name, **self._known()}, record)
            if self._held.lost:
                return False
            # The last one noted what it saw before it said that it was not busy any more, if that is the last it said.
            self._observations.recall(plus_s=unchanged_s if record is not None and not busy else 0.0)
        manifest = self._due() or ring.newest()
        due = self._clock() - self._collected_at >= ring.settings.lease_s / COLLECTIONS_IN_A_LEASE
        pressure = pressure_of(ring)
        collecting = due or pressure.high
        if collecting:
            # It may take longer than another waits: nobody is to begin the same beside it, but others publish.
            self._held.renew(busy=True)
            self._collect(pressure)
        flow = self.measured(manifest)
        self._held.renew(**flow.content(), measured=self._measured + 1, busy=False)
        self._noted(flow, self._measured + 1)
        if collecting and self._uncollected is not None:
            raise self._uncollected
        return True

    def _note_publisher(self, unchanged_s: float) -> None:
        """Note now and then for how long the one that collects has not been heard of: this process may die, too, before
        it can tell that the other has died in it."""
        every_s = self._ring.settings.lease_s / COLLECTIONS_IN_A_LEASE
        if unchanged_s >= every_s and self._clock() - self._noted_publisher_at >= every_s:
            self._observations.note_publisher()
            self._noted_publisher_at = self._clock()

    def _publish_beside(self) -> None:
        """Another has been collecting since an earlier turn of this one, or has died in it: what waits does not wait
        for that, for anybody may publish. Only collecting is left to it; and the record, so that it can be told when
        it has died."""
        manifest = self._due() or self._ring.newest()
        self._noted(self.measured(manifest), self._measured)

    def _due(self) -> Manifest | None:
        """Publish, if it is time."""
        interval_s = self._ring.settings.publish_interval_s
        now = self._clock()
        if self.interval_s < interval_s and now - self._published_at < interval_s - self.interval_s / 2:
            return None
        published = self._ring.publish()
        self._published_at = now
        return published

    def _collect(self, pressure: Pressure) -> None:
        fenced, self._uncollected = 0, None
        try:
            found = self._collector.collect()
            fenced, self._left = found.fenced, found.left
            measure(self._ring)
            if found.replaced and pressure.wanted:
                # Where all writers wait nothing new is published: what was replaced would be retained for ever.
                self._ring.turn_over()
            self._observations.note()
        except Exception as error:  # noqa: BLE001 - raised behind the flow
            self._uncollected = error
        # What the dead have left can go as soon as it is published that they are: in the next turn.
        self._collected_at = -float("inf") if fenced else self._clock()

    def publish_from(self, samples: int) -> None:
        """Publish if so many samples wait, whoever does the rest of the work. What fails is left to the next turn."""
        try:
            found = self._ring.publish_from(samples)
        except Exception as error:  # noqa: BLE001 - what was put stays put
            self._complain(error)
            return
        with self._turned:
            newest = found.newest
            told = self.flow._replace(inserted=newest.inserted, finished=found.waiting, readable=len(newest))
            self._noted(told, self._measured)

    def measured(self, manifest: Manifest) -> Flow:
        """Counted anew."""
        claims = self._ring.claims()
        finished = manifest.finished(claims)
        said = readers_say(self._ring)
        orphans = self._orphans(claims)
        return Flow(manifest.inserted, finished, said.read, len(manifest), said.wanted, said.starved, orphans)

    def _orphans(self, claims: Iterable[Claim]) -> int:
        """As of the newest collection: nothing is listed for it. `claims`: listed behind that one."""
        if self._left is None:
            return self.flow.orphans
        # What a living writer has stored is claimed in a moment: only what stays so for two collections is left behind.
        unclaimed = self._left - {claim.object for claim in claims}
        before, self._unclaimed, self._left = self._unclaimed, unclaimed, None
        return min(len(unclaimed), self.flow.orphans) if before is None else len(unclaimed & before)

    def start(self) -> None:
        """Begin the thread."""
        self._thread = threading.Thread(target=self._run, name="ring-keeper", daemon=True)
        self._thread.start()

    def wait_turn(self, timeout_s: float) -> None:
        """Until there is a newer `flow`."""
        with self._turned:
            before = self.turns
            self._turned.wait_for(lambda: self.turns > before, timeout_s)

    def close(self) -> None:
        """End the thread, and leave the work to others at once."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._held is not None:
            try:
                if not self._held.lost:
                    self._observations.note()
            finally:
                self._held.release()

    def __enter__(self) -> Keeper:
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
            except Exception as error:  # noqa: BLE001 - a ring that nobody looks after stands still
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}"
        if said != self.trouble or self._clock() - self._complained_at > _TOLD_AGAIN_S:
            logger.warning("the ring cannot be looked after now: %s", said, exc_info=not isinstance(error, OSError))
            self._complained_at = self._clock()
        self.trouble = said

    def _hear(self, content: Mapping[str, Any]) -> None:
        """What the record says, if it is news: a writer counts what it has put since the newest measurement."""
        measured = content.get("measured")
        if isinstance(measured, int) and measured != self._measured:
            self._noted(Flow.of_content(content), measured)

    def _known(self) -> dict[str, Any]:
        return {**self.flow.content(), "measured": self._measured} if self._measured else {}

    def _noted(self, flow: Flow, measured: int) -> None:
        with self._turned:
            self.flow, self._measured = flow, measured
            self.turns += 1
            self._turned.notify_all()


def turned_every_s(settings: RingSettings) -> float:
    """A whole part of `publish_interval_s`: where writers publish in between, what they replace is to go in between."""
    interval_s = settings.publish_interval_s
    if settings.publish_every_samples is None:
        return interval_s
    return interval_s / math.ceil(interval_s * COLLECTIONS_IN_A_LEASE / settings.lease_s)
