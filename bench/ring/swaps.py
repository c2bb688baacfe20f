"""Swaps while writers and publishers are killed (target 3), and the stored objects meanwhile (target 8)."""

from __future__ import annotations

import random
import time
from collections import deque
from pathlib import Path

from bench.harness.figures import Figure
from bench.ring import roles
from bench.ring.population import CONTEXT, Counters, begun, population
from gpu_client.ring.core.garbage_collector import UNFINISHED_S
from gpu_client.ring.core.ring import Ring, make_ring
from gpu_client.ring.errors import ManifestMissing
from gpu_client.ring.format.manifest import ObjectId, Slot
from gpu_client.ring.format.records import PINS, READERS, SAMPLES, decode_record
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings

SWAPS = 10_000
WRITERS, READERS_THERE = 8, 4
KILL_EVERY_S = 2.0
WRITES_EVERY_S, READS_EVERY_S, DIES_EVERY_S = 0.02, 0.05, 0.05
"""Each writer, each reader, and publishers, at most: two processors are to be left time for swaps."""
STEPS = 12
"""More operations than a publication has; those behind its end are not reached, which is told."""
ORPHANS = 4
TIMEOUT_S = 1200.0
MORE_S = 60.0
"""For so long it goes on where publishers have not died at each of their operations: some come in few publications."""


def swaps(scratch: Path, *, wanted: int) -> list[Figure]:
    """Run swaps; count readers' errors, lost samples, and the operations at which publishers died."""
    place = str(scratch / "swaps")
    ring = make_ring(place, RingSettings(cap=32, publish_interval_s=0.01, retain=100, lease_s=3.0, max_ahead=400))
    written, read = Counters(roles.WRITES, WRITERS), Counters(roles.READS, READERS_THERE)
    stop = CONTEXT.Event()
    chance, kills, died_in = random.Random(3), 0, set[tuple[int, bool]]()
    writing = [(place, number, written, WRITES_EVERY_S) for number in range(WRITERS)]
    reading = [(place, number, read, READS_EVERY_S, stop) for number in range(READERS_THERE)]
    began_at = killed_at = time.monotonic()
    with (
        population(roles.write_for_ever, writing) as writers,
        population(roles.read_for_ever, reading) as readers,
        population(roles.publish_for_ever, [(place, 0.002, stop)]) as publishers,
    ):
        deaths = [(step, behind) for step in range(STEPS) for behind in (False, True)]
        enough_at: float | None = None
        while enough_at is None or (_unreached(died_in) and time.monotonic() - enough_at < MORE_S):
            if enough_at is None and ring.pointer()[0] >= wanted:
                enough_at = time.monotonic()
            if time.monotonic() - began_at > TIMEOUT_S:
                raise TimeoutError(f"{ring.pointer()[0]} swaps of {wanted} after {TIMEOUT_S:g} s")
            time.sleep(DIES_EVERY_S)
            if enough_at is not None:
                deaths = _unreached(died_in) or deaths
            step, behind = deaths[0]
            deaths = deaths[1:] + deaths[:1]
            reached = CONTEXT.Event()
            dying = begun(roles.publish_and_die, place, step, behind, reached)
            dying.join(30)
            if reached.is_set():
                died_in.add((step, behind))
            if time.monotonic() - killed_at >= KILL_EVERY_S:
                killed_at = time.monotonic()
                victim = chance.randrange(WRITERS)
                writers[victim].kill()
                writers[victim].join()
                kills += 1
                writers[victim] = begun(roles.write_for_ever, *writing[victim])
        took_s = time.monotonic() - began_at
        stop.set()
        for process in (*readers, *publishers):
            process.join(30)
    while ring.publish(at_once=True) is not None:
        pass
    newest = ring.newest()
    # Each kill may cost the sample that is being put, and leave one that was claimed and not counted by its writer.
    lost = max(written.total("put") - newest.inserted, newest.inserted - written.total("put") - kills - WRITERS, 0)
    wrong = {name: read.total(name) for name in ("errors", "retries", "missing", "doubled", "backwards")}
    details = {
        "swaps": newest.number,
        "retain": ring.settings.retain,
        "seconds": round(took_s, 1),
        "writers": WRITERS,
        "writers_killed": kills,
        "writers_taken_for_dead": written.total("fenced"),
        "readers": READERS_THERE,
        "publishers_killed_in": sorted(f"{step} {'behind' if behind else 'before'}" for step, behind in died_in),
        "put": written.total("put"),
        "inserted": newest.inserted,
        "manifests_read": read.total("manifests"),
        "samples_read": read.total("samples"),
        **wrong,
    }
    return [
        Figure(
            name=f"{wanted} swaps: errors, retries and duplicates",
            unit="",
            rounds=[sum(wrong.values())],
            at_most=0,
            counted=True,
            details=details,
        ),
        Figure(name="  samples lost that were put", unit="", rounds=[lost], at_most=0, counted=True),
        Figure(
            name="  operations of a publication where it was not killed",
            unit="",
            rounds=[len(_unreached(died_in))],
            at_most=0,
            counted=True,
        ),
    ]


def _unreached(died_in: set[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """List operations at which no publisher died, before or after."""
    last = max((step for step, _ in died_in), default=STEPS)
    return [(step, behind) for step in range(last) for behind in (False, True) if (step, behind) not in died_in]


class Stored:
    """Stored objects of a ring, and the ones it must keep: of retained or pinned manifests, and in flight."""

    def __init__(self, ring: Ring, lags_s: float) -> None:
        """Watch a ring; `lags_s`: unneeded objects older than this should be gone."""
        self._ring, self._lags_s = ring, lags_s
        self._needed: deque[tuple[float, set[ObjectId]]] = deque()
        self.worst = 0.0
        self.most = 0

    def sample_store(self, in_flight: int) -> None:
        """Sample the store; `in_flight`: samples being put. Keeps the worst ratio."""
        ring, now = self._ring, time.monotonic()
        number, _ = ring.pointer()
        wanted = set(range(max(number - ring.settings.retain + 1, 1), number + 1))
        for prefix in (READERS, PINS):
            for key in ring.store.keys(prefix):
                wanted |= set(decode_record(ring.store.record(key)).get("manifests", ()))
        needed = {claim.object for claim in ring.claims()}
        for one in wanted:
            needed |= {slot.object for slot in _slots(ring, one)}
        self._needed.append((now, needed))
        while self._needed[0][0] < now - self._lags_s:
            self._needed.popleft()
        there = ring.store.keys(SAMPLES)
        allowed = len(set().union(*(one for _, one in self._needed))) + in_flight
        self.most = max(self.most, len(there))
        self.worst = max(self.worst, len(there) / allowed)


def _slots(ring: Ring, number: int) -> tuple[Slot, ...]:
    try:
        return ring.manifest(number).slots
    except ManifestMissing:
        return ()


def storage(scratch: Path, *, rounds: int, lasts_s: float) -> list[Figure]:
    """Measure stored objects under load, with writers that leave orphans."""
    worst, gone_after, most = [], [], []
    for number in range(rounds):
        settings = RingSettings(cap=40, publish_interval_s=0.1, retain=3, lease_s=2.0)
        ring = make_ring(str(scratch / f"storage-{number}"), settings)
        stored = Stored(ring, settings.lease_s)
        counters = Counters(roles.WRITES, 3)
        place = str(scratch / f"storage-{number}")
        with (
            RingWriter(ring, "stays"),
            population(roles.write_for_ever, [(place, one, counters, 0.01) for one in range(3)]),
        ):
            names = [f"orphan-{one}" for one in range(ORPHANS)]
            with population(roles.leave_an_orphan, [(place, name) for name in names]) as dying:
                for process in dying:
                    process.join(30)
            died_at = time.monotonic()
            orphans = {ObjectId(name, 1, 3).key for name in names}
            if not orphans <= set(ring.store.keys(SAMPLES)):
                raise RuntimeError("the writers that were to leave something behind have not")
            left = {}
            while (waits := orphans - left.keys()) or time.monotonic() < died_at + lasts_s:
                stored.sample_store(in_flight=3 + len(waits))
                there = set(ring.store.keys(SAMPLES))
                left |= {key: time.monotonic() - died_at for key in waits if key not in there}
                if time.monotonic() - died_at > UNFINISHED_S:
                    raise TimeoutError(f"what dead writers have left is still there: {sorted(waits)}")
                time.sleep(0.05)
        worst.append(stored.worst)
        most.append(stored.most)
        gone_after.append(max(left.values()) / settings.lease_s)
    details = {"cap": 40, "retain": 3, "objects_at_most": max(most)}
    return [
        Figure(
            name="stored, of what is retained and in flight",
            unit="",
            rounds=worst,
            at_most=1.0,
            counted=True,
            details=details,
        ),
        Figure(
            name="orphans of the killed gone, after lease periods",
            unit="",
            rounds=gone_after,
            at_most=2.0,
            counted=True,
        ),
    ]
