"""Test `publish_every_samples`: new samples become readable by their number or after the interval."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from gpu_client.ring.core.maintenance import COLLECTIONS_IN_A_LEASE, Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.records import INBOX, SAMPLES, SETTINGS, encode_checksummed
from gpu_client.ring.generating.generation_loop import RingMetrics
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock
from tests.unit.ring.ring_scene import Scene

EVERY, INTERVAL_S = 3, 10.0


class Closing:
    """A keeper's closing event that advances the test's clock in each wait, and is set after `until_s`."""

    def __init__(self, clock: Clock, until_s: float) -> None:
        self.clock, self.until_s = clock, until_s

    def wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        return self.clock() > self.until_s


def look_for(keeper: Maintainer, clock: Clock, seconds: float) -> None:
    """Run the keeper's loop in this thread for `seconds` of the test's clock."""
    keeper._closing = Closing(clock, clock() + seconds)  # type: ignore[assignment]
    keeper._run()


def test_so_many_are_readable_at_once_and_fewer_after_the_interval() -> None:
    scene = Scene(cap=100, publish_every_samples=EVERY, publish_interval_s=INTERVAL_S)
    writer = scene.writer()
    found = []
    for number in range(8):
        writer.put(np.array([number]))
        found.append(scene.ring.newest().inserted)
    assert found == [0, 0, 3, 3, 3, 6, 6, 6]
    began_at = scene.clock()
    look_for(scene.keeper, scene.clock, INTERVAL_S - 0.1)
    assert scene.ring.newest().inserted == 6, "two are fewer, and have not waited for so long"
    scene.clock.now = began_at
    look_for(scene.keeper, scene.clock, INTERVAL_S)
    assert scene.ring.newest().inserted == 8
    assert scene.values() == [[number] for number in range(8)]


def test_who_is_overtaken_publishes_all_the_same() -> None:
    scene = Scene(cap=100, publish_every_samples=2, publish_interval_s=INTERVAL_S)
    writer = scene.writer()
    swap, lost = scene.store.swap, []

    def overtaken(key: str, data: bytes, seen: str | None) -> str | None:
        if key == "pointer" and len(lost) < 3:
            lost.append(key)
            return None
        return swap(key, data, seen)

    scene.store.swap = overtaken  # type: ignore[method-assign]
    for number in range(2):
        writer.put(np.array([number]))
    assert (len(lost), scene.ring.newest().inserted) == (3, 2)


@pytest.mark.parametrize("lease_s", [0.6, 6.0, 7.3, 60.0])
def test_what_is_replaced_goes_however_long_the_interval_is(lease_s: float) -> None:
    """Replaced samples are deleted within a lease, although the ring publishes only once an hour."""
    scene = Scene(cap=4, retain=2, publish_every_samples=2, publish_interval_s=3600, lease_s=lease_s)
    writer = scene.writer()
    for _ in range(10):
        for number in range(20):
            writer.put(np.array([number]))
        writer.renew()
        look_for(scene.keeper, scene.clock, 2 * lease_s / COLLECTIONS_IN_A_LEASE)
        assert len(scene.store.keys(SAMPLES)) <= 4 + 2
    assert scene.ring.newest().inserted == 200


def test_nothing_is_said_of_what_nobody_has_measured_yet() -> None:
    scene = Scene(cap=4, publish_every_samples=1, publish_interval_s=INTERVAL_S)
    scene.writer().put(np.array([1]))
    standing = RingMetrics(4, scene.clock)
    assert (scene.keeper.flow.inserted, standing.measure(scene.keeper, 0.0)) == (1, {})
    scene.keeper.turn()
    assert standing.measure(scene.keeper, 0.0) == {"ring.orphans": 0, "ring.fill": 25.0, "data.reuse": 0.0}


def test_whose_samples_they_are_does_not_matter() -> None:
    scene = Scene(cap=100, publish_every_samples=EVERY, publish_interval_s=INTERVAL_S)
    writers = [scene.writer(name) for name in ("a", "b", "c", "d")]
    for number, writer in enumerate(writers):
        assert scene.ring.newest().inserted == (3 if number == 3 else 0)
        writer.put(np.array([number]))
    assert scene.ring.newest().inserted == 3


def test_a_pack_counts_with_all_that_is_in_it() -> None:
    scene = Scene(cap=100, publish_every_samples=EVERY, pack=4)
    writer = scene.writer()
    for number in range(7):
        writer.put(np.array([number]))
    assert scene.ring.newest().inserted == 4
    writer.flush()
    assert scene.ring.newest().inserted == 7


def test_nobody_waits_for_room_that_there_is() -> None:
    """A writer has room as soon as another process publishes, though the keeper measures the flow rarely."""
    scene = Scene(cap=4, max_ahead=4, publish_every_samples=2, publish_interval_s=3600)
    writers = [scene.writer("a"), scene.writer("b")]
    scene.keeper.turn()
    for number in range(40):
        writers[number % 2].put(np.array([number]))
    assert scene.ring.newest().inserted == 40
    assert [writer.waited_s for writer in writers] == [0.0, 0.0]


def test_writers_keep_to_how_often_samples_are_read() -> None:
    scene = Scene(cap=1000, publish_every_samples=EVERY, samples_per_insert=1, publish_interval_s=INTERVAL_S)
    writer = scene.writer(patience_s=1.0)
    scene.keeper.turn()
    with pytest.raises(Exception, match="1 times each is wanted"):
        for number in range(1000):
            writer.put(np.array([number]))
    assert 256 < writer.put_samples < 256 + 2 * EVERY


@pytest.mark.parametrize("fails", ["once", "for long"])
def test_what_cannot_be_published_now_stays_put(fails: str) -> None:
    scene = Scene(cap=100, publish_every_samples=1, publish_interval_s=INTERVAL_S)
    writer = scene.writer()
    create = scene.store.create
    broken = True

    def failing(key: str, pieces: Sequence[memoryview]) -> bool:
        nonlocal broken
        if broken and key.startswith("manifests/"):
            broken = fails != "once"
            raise OSError("no route")
        return create(key, pieces)

    scene.store.create = failing  # type: ignore[method-assign]
    for number in range(3):
        writer.put(np.array([number]))
    assert writer.put_samples == 3
    assert scene.ring.newest().inserted == (3 if fails == "once" else 0)
    assert "no route" in scene.keeper.trouble
    broken = False
    scene.clock.advance(INTERVAL_S)
    scene.keeper.turn()
    assert scene.values() == [[0], [1], [2]]


def test_without_the_setting_nobody_looks() -> None:
    scene = Scene(cap=100)
    writer = scene.writer()
    listed: list[str] = []
    keys = scene.store.keys

    def noted(prefix: str) -> list[str]:
        listed.append(prefix)
        return keys(prefix)

    scene.store.keys = noted  # type: ignore[method-assign]
    writer.put(np.array([1]))
    assert INBOX not in listed
    assert scene.ring.newest().inserted == 0


def test_it_is_part_of_the_ring_and_rings_without_it_are_opened() -> None:
    store = MemoryStore()
    Ring.make(store, RingSettings(cap=8, publish_every_samples=4))
    assert Ring.open(store).settings.publish_every_samples == 4
    # A document of a release without this setting.
    older = RingSettings(cap=8).model_dump(mode="json")
    del older["publish_every_samples"]
    before = MemoryStore()
    before.create(SETTINGS, [memoryview(encode_checksummed(older))])
    assert Ring.open(before).settings == RingSettings(cap=8) == Ring.make(before, RingSettings(cap=8)).settings
    # And what does not have it can be opened by who does not know of it.
    plain = MemoryStore()
    Ring.make(plain, RingSettings(cap=8))
    found = plain.read(SETTINGS)
    assert found is not None
    assert "publish_every_samples" not in json.loads(bytes(found))


def test_it_is_given_as_text_like_the_others() -> None:
    given = {"cap": "8", "publish_every_samples": "4", "publish_interval_s": "2"}
    assert RingSettings.model_validate_strings(given).publish_every_samples == 4
