"""What writers leave behind that die between storing a sample and claiming it."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_client.ring.keeper import Keeper
from gpu_client.ring.manifest import INBOX, SAMPLES
from gpu_client.ring.ring import Ring
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store_memory import MemoryStore
from gpu_client.ring.writer import RingWriter
from tests.unit.ring.ring_kit import Clock

LEASE_S, TURN_S = 12.0, 0.25


@pytest.mark.parametrize("mode", ["rolling", "generation"])
@pytest.mark.parametrize("dies_after_renewal_s", [0.0, 1.0, 2.1, 3.9])
@pytest.mark.parametrize("looked_before_s", [0.0, 0.7, 1.9])
def test_they_are_gone_within_two_lease_periods(mode: str, dies_after_renewal_s: float, looked_before_s: float) -> None:
    clock, store = Clock(), MemoryStore()
    settings = RingSettings.model_validate({"cap": 4, "mode": mode, "lease_s": LEASE_S, "publish_interval_s": TURN_S})
    ring = Ring.make(store, settings, clock=clock)
    keeper = Keeper(ring, "k", clock=clock)
    writer = RingWriter(ring, "dies", keeper=keeper, threads=False, clock=clock, pause=clock.go_on)
    # In a generation that waits for more, what has begun behind its claims waits with them.
    for _ in range(4):
        writer.put(np.zeros(2))
    keeper.turn()
    clock.go_on(looked_before_s)
    writer.renew()
    for _ in range(int(dies_after_renewal_s / TURN_S)):
        clock.go_on(TURN_S)
        keeper.turn()
    orphan = f"{SAMPLES}dies/00000001-0000000005"
    store.create(orphan, [])
    died_at = clock()
    while store.read(orphan) is not None:
        assert clock() - died_at <= 2 * LEASE_S
        clock.go_on(TURN_S)
        keeper.turn()
    # Only the silent are taken for dead: one lease is not enough.
    assert clock() - died_at + dies_after_renewal_s > LEASE_S


def test_who_renews_as_it_should_is_never_taken_for_dead() -> None:
    clock, store = Clock(), MemoryStore()
    ring = Ring.make(store, RingSettings(cap=4, lease_s=LEASE_S), clock=clock)
    keeper = Keeper(ring, "k", clock=clock)
    writer = RingWriter(ring, "lives", keeper=keeper, threads=False, clock=clock, pause=clock.go_on)
    # Three times in a lease, and twice in a row it could not.
    for _ in range(20):
        for _ in range(int(LEASE_S / TURN_S)):
            clock.go_on(TURN_S)
            keeper.turn()
        writer.renew()
    writer.put(np.zeros(2))
    keeper.turn()
    assert len(ring.newest()) == 1


def test_the_end_of_a_dead_writer_is_said_once_however_long_a_generation_takes() -> None:
    clock, store = Clock(), MemoryStore()
    ring = Ring.make(store, RingSettings(cap=4, mode="generation", lease_s=LEASE_S), clock=clock)
    keeper = Keeper(ring, "k", clock=clock)
    writer = RingWriter(ring, "dies", keeper=keeper, threads=False, clock=clock, pause=clock.go_on)
    writer.put(np.zeros(2))
    for _ in range(int(600 / TURN_S)):
        clock.go_on(TURN_S)
        keeper.turn()
    assert len(store.keys(INBOX)) <= 3, "its beginning, its sample, its end"
