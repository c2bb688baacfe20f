"""Test the garbage of writers that die between storing and claiming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.records import INBOX, SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock
from tests.unit.ring.generating_kit import Scene as Generating
from tests.unit.ring.generating_kit import Told, one

LEASE_S, TURN_S = 12.0, 0.25


@pytest.mark.parametrize("mode", ["rolling", "generation"])
@pytest.mark.parametrize("dies_after_renewal_s", [0.0, 1.0, 2.1, 3.9])
@pytest.mark.parametrize("looked_before_s", [0.0, 0.7, 1.9])
def test_they_are_gone_within_two_lease_periods(mode: str, dies_after_renewal_s: float, looked_before_s: float) -> None:
    clock, store = Clock(), MemoryStore()
    settings = RingSettings.model_validate({"cap": 4, "mode": mode, "lease_s": LEASE_S, "publish_interval_s": TURN_S})
    ring = Ring.make(store, settings, clock=clock)
    keeper = Maintainer(ring, "k", clock=clock)
    writer = RingWriter(ring, "dies", maintainer=keeper, threads=False, clock=clock, pause=clock.advance)
    # In a generation that waits for more, what has begun behind its claims waits with them.
    for _ in range(4):
        writer.put(np.zeros(2))
    keeper.turn()
    clock.advance(looked_before_s)
    writer.renew()
    for _ in range(int(dies_after_renewal_s / TURN_S)):
        clock.advance(TURN_S)
        keeper.turn()
    orphan = f"{SAMPLES}dies/00000001-0000000005"
    store.create(orphan, [])
    died_at = clock()
    while store.read(orphan) is not None:
        assert clock() - died_at <= 2 * LEASE_S
        clock.advance(TURN_S)
        keeper.turn()
    # Only the silent are taken for dead: one lease is not enough.
    assert clock() - died_at + dies_after_renewal_s > LEASE_S


def test_who_renews_as_it_should_is_never_taken_for_dead() -> None:
    clock, store = Clock(), MemoryStore()
    ring = Ring.make(store, RingSettings(cap=4, lease_s=LEASE_S), clock=clock)
    keeper = Maintainer(ring, "k", clock=clock)
    writer = RingWriter(ring, "lives", maintainer=keeper, threads=False, clock=clock, pause=clock.advance)
    # Three times in a lease, and twice in a row it could not.
    for _ in range(20):
        for _ in range(int(LEASE_S / TURN_S)):
            clock.advance(TURN_S)
            keeper.turn()
        writer.renew()
    writer.put(np.zeros(2))
    keeper.turn()
    assert len(ring.newest()) == 1


def test_the_end_of_a_dead_writer_is_said_once_however_long_a_generation_takes() -> None:
    clock, store = Clock(), MemoryStore()
    ring = Ring.make(store, RingSettings(cap=4, mode="generation", lease_s=LEASE_S), clock=clock)
    keeper = Maintainer(ring, "k", clock=clock)
    writer = RingWriter(ring, "dies", maintainer=keeper, threads=False, clock=clock, pause=clock.advance)
    writer.put(np.zeros(2))
    for _ in range(int(600 / TURN_S)):
        clock.advance(TURN_S)
        keeper.turn()
    assert len(store.keys(INBOX)) <= 3, "its beginning, its sample, its end"


class Leaves:
    """A ring without threads, and a generator that stores objects which it never claims."""

    def __init__(self, **settings: Any) -> None:
        self.clock, self.store = Clock(), MemoryStore()
        self.ring = Ring.make(self.store, RingSettings(cap=8, lease_s=LEASE_S, **settings), clock=self.clock)

    def keeper(self, name: str = "k") -> Maintainer:
        return Maintainer(self.ring, name, clock=self.clock)

    def writer(self, name: str, keeper: Maintainer) -> RingWriter:
        return RingWriter(self.ring, name, maintainer=keeper, threads=False, clock=self.clock, pause=self.clock.advance)

    def leave(self, name: str, *numbers: int) -> None:
        for number in numbers:
            self.store.create(f"{SAMPLES}{name}/00000001-{number:010d}", [])

    def stored(self, name: str) -> int:
        return len(self.store.keys(f"{SAMPLES}{name}/"))

    def turns_for(self, seconds: float, keeper: Maintainer) -> None:
        for _ in range(int(seconds / TURN_S)):
            self.clock.advance(TURN_S)
            keeper.turn()


def test_their_number_is_told_and_falls_to_0_when_they_are_removed() -> None:
    scene = Leaves()
    keeper = scene.keeper()
    scene.writer("dies", keeper).put(np.zeros(2))
    keeper.turn()
    assert keeper.flow.orphans == 0
    scene.leave("dies", 2, 3)
    scene.turns_for(LEASE_S / 2, keeper)
    assert (keeper.flow.orphans, scene.stored("dies")) == (2, 3)
    scene.turns_for(2 * LEASE_S, keeper)
    assert (keeper.flow.orphans, scene.stored("dies")) == (0, 1)


@pytest.mark.parametrize("mode", ["rolling", "generation"])
def test_what_waits_or_is_just_being_claimed_is_none(mode: Any) -> None:
    scene = Leaves(mode=mode)
    keeper = scene.keeper()
    writer = scene.writer("lives", keeper)
    for number in (1, 2, 3):
        writer.put(np.zeros(2))
        scene.leave("lives", number + 1)  # it is about to be claimed
        scene.clock.advance(LEASE_S / 6)
        writer.renew()
        keeper.turn()
        assert keeper.flow.orphans == 0
        scene.store.delete([f"{SAMPLES}lives/00000001-{number + 1:010d}"])
    scene.turns_for(LEASE_S, keeper)
    assert keeper.flow.orphans == 0


def test_who_takes_the_work_over_tells_them_on_and_lists_nothing_more_for_it() -> None:
    scene = Leaves()
    first, second = scene.keeper("first"), scene.keeper("second")
    scene.writer("dies", first)
    scene.leave("dies", 1, 2)
    scene.turns_for(LEASE_S / 2, first)
    assert first.flow.orphans == 2
    assert not second.turn()
    assert second.flow.orphans == 2, "who only hears of it knows it too"
    first.close()
    assert second.turn()
    assert second.flow.orphans == 2
    listed: list[str] = []
    keys = scene.store.keys
    scene.store.keys = lambda prefix: (listed.append(prefix), keys(prefix))[1]  # type: ignore[method-assign, func-returns-value]
    second.turn()
    assert SAMPLES not in listed, "only a collection looks at what is stored"


def test_they_go_out_with_a_generator_s_progress() -> None:
    scene = Generating(lease_s=LEASE_S)
    keeper = Maintainer(scene.ring, "other", clock=scene.clock)
    dies = RingWriter(
        scene.ring, "dies", maintainer=keeper, threads=False, clock=scene.clock, pause=scene.clock.advance
    )
    assert dies.put_samples == 0
    scene.store.create(f"{SAMPLES}dies/00000001-0000000001", [])
    told = Told()

    def look(seed: int) -> Any:
        scene.clock.advance(1.0)
        generation._writer.renew()
        generation._maintainer.turn()
        return one(seed)

    generation = scene.generation(look, told, count=40, name="w")
    generation.run()
    found = [metrics["ring.orphans"] for _, _, metrics in told.reports if "ring.orphans" in metrics]
    assert max(found) == 1
    assert found[-1] == 0
    assert scene.store.keys(f"{SAMPLES}dies/") == []
