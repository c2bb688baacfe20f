"""Test watchers that are replaced within a lease: the dead are detected, and only they."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from gpu_client.ring.core.liveness import DEAD_AFTER_LEASES
from gpu_client.ring.core.maintenance import COLLECTIONS_IN_A_LEASE, TAKEN_OVER_AFTER_S, Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.records import PUBLISHER, WRITERS, decode_record
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from gpu_client.ring.tools.status import read_status
from tests.kits.clock import Clock

LEASE_S, TURN_S = 12.0, 0.25
SLOW_S = 1.3 * LEASE_S
"""Between two signs of life of a writer that is slow and lives: less than after what it is taken for dead."""


class Succession:
    """A ring whose publisher is replaced by the next, and some writers."""

    def __init__(self) -> None:
        self.clock, self.store = Clock(), MemoryStore()
        self.ring = Ring.make(self.store, RingSettings(cap=8, lease_s=LEASE_S), clock=self.clock)
        self.keepers = 0
        self.living: list[RingWriter] = []
        self.renewed_at: dict[str, float] = {}

    def writer(self, name: str) -> RingWriter:
        writer = RingWriter(
            self.ring, name, maintainer=Maintainer(self.ring, name, clock=self.clock), threads=False, clock=self.clock
        )
        writer.put(np.zeros(2))
        return writer

    def keeper(self) -> Maintainer:
        self.keepers += 1
        return Maintainer(self.ring, f"k{self.keepers}", clock=self.clock)

    def turn(self, keeper: Maintainer) -> bool:
        self.clock.advance(TURN_S)
        for writer in self.living:
            if self.clock() - self.renewed_at.get(writer.name, 0.0) >= SLOW_S:
                writer.renew()
                self.renewed_at[writer.name] = self.clock()
        return keeper.turn()

    def follow(
        self, lives_s: float, lasts_s: float, left: Callable[[], bool], end: Callable[[Maintainer], object]
    ) -> float:
        """Replace publishers every `lives_s` until nothing is left; the seconds that took."""
        began_at = self.clock()
        while left():
            keeper, born_at = self.keeper(), self.clock()
            while left() and self.clock() - born_at < lives_s:
                self.turn(keeper)
                assert self.clock() - began_at <= lasts_s, self.store.keys(WRITERS)
            end(keeper)
        return self.clock() - began_at


def killed(_: Maintainer) -> None:
    """Leaves everything as it is."""


@pytest.mark.parametrize("end", [killed, Maintainer.close])
@pytest.mark.parametrize("lives_s", [0.2 * LEASE_S, 0.5 * LEASE_S, 0.9 * LEASE_S])
def test_dead_writers_are_marked_and_their_records_removed(lives_s: float, end: Callable[[Maintainer], object]) -> None:
    scene = Succession()
    for number in range(12):
        scene.writer(f"dead-{number}")
    slow = scene.writer("slow")
    scene.living = [slow]
    # A publisher's seconds after its last look and before its successor begins do not count.
    counted_s = lives_s - LEASE_S / COLLECTIONS_IN_A_LEASE - TURN_S
    counted_s = max(counted_s, TAKEN_OVER_AFTER_S)
    lasts_s = math.ceil(DEAD_AFTER_LEASES * LEASE_S / counted_s + 1) * lives_s + 2 * TURN_S
    took_s = scene.follow(lives_s, lasts_s, lambda: len(scene.store.keys(WRITERS)) > 1, end)
    assert took_s > DEAD_AFTER_LEASES * LEASE_S, "nobody is taken for dead earlier"
    assert scene.store.keys(WRITERS) == ["writers/slow"]
    until = scene.clock() + 10 * LEASE_S
    scene.follow(lives_s, math.inf, lambda: scene.clock() < until, end)
    slow.put(np.ones(2))
    assert not decode_record(scene.store.record("writers/slow")).get("dead")


def test_a_publisher_that_died_while_it_collected_is_followed_though_those_who_wait_die_too() -> None:
    scene = Succession()
    scene.writer("dead")
    first = scene.keeper()
    assert scene.turn(first)
    assert first._lease is not None
    first._lease.renew(busy=True)
    scene.follow(0.8 * LEASE_S, 6 * LEASE_S, lambda: bool(scene.store.keys(WRITERS)), killed)
    assert decode_record(scene.store.record(PUBLISHER))["holder"] != "k1"


def test_a_note_of_a_watcher_that_was_stopped_for_long_shortens_no_life() -> None:
    scene = Succession()
    writer = scene.writer("lives")
    stopped, other = scene.keeper(), scene.keeper()
    for _ in range(int(LEASE_S / TURN_S)):
        scene.turn(stopped)
    writer.renew()
    for _ in range(int(3 * LEASE_S / TURN_S)):
        scene.turn(other)
        if scene.clock() % LEASE_S < TURN_S:
            writer.renew()
    stopped._silence_notes.save()
    third = scene.keeper()
    for _ in range(int(LEASE_S / TURN_S)):
        scene.turn(third)
    writer.put(np.ones(2))
    assert not decode_record(scene.store.record("writers/lives")).get("dead")


def test_status_tells_who_is_silent_before_it_is_taken_for_dead() -> None:
    scene = Succession()
    scene.writer("silent")
    scene.living = [scene.writer("slow")]
    keeper = scene.keeper()
    for _ in range(int(1.4 * LEASE_S / TURN_S)):
        scene.turn(keeper)
    rows = {row.name: row for row in read_status(scene.ring).writers}
    assert rows["silent"].silent_s > LEASE_S
    assert rows["slow"].silent_s == 0
    assert rows["silent"].alive
