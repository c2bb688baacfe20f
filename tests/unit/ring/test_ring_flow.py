"""Test the rate limiter with writers and readers of any speed, for one number and for a pair."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st

from gpu_client.ring.core.back_pressure import RingFlow, reader_wait_reason, writer_wait_reason
from gpu_client.ring.errors import RingError
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.settings import RingSettings
from tests.unit.ring.ring_scene import Scene

CAP, BATCH = 20, 4


def reuse(settings: RingSettings, speed: float) -> float:
    """Return the mean number of reads of a sample, with a writer that is ready to make `speed` packs a batch."""
    inserted = finished = read = 0
    credit = 0.0
    for _ in range(10_000):
        credit += speed
        while credit >= 1:
            credit -= 1
            if not writer_wait_reason(RingFlow(inserted, finished, read, min(inserted, CAP)), settings, BATCH):
                finished += settings.pack
        if settings.mode == "rolling" or finished >= CAP:
            inserted, finished = inserted + finished, 0
        if not reader_wait_reason(RingFlow(inserted, finished, read, min(inserted, CAP)), settings, BATCH):
            read += BATCH
    assert inserted > 300, "both go on"
    return read / inserted


@pytest.mark.parametrize("mode", ["rolling", "generation"])
@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("speed", [0.1, 0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.0])
def test_samples_are_read_as_often_as_is_wanted_whoever_is_faster(
    ratio: float, speed: float, pack: int, mode: Any
) -> None:
    settings = RingSettings(cap=CAP, mode=mode, pack=pack, samples_per_insert=ratio, min_size=5)
    assert reuse(settings, speed) == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("mode", ["rolling", "generation"])
@pytest.mark.parametrize(
    ("speed", "found"),
    [
        pytest.param(0.1, 8.0, id="readers wait at the greater one"),
        pytest.param(1.0, 4.0, id="nobody waits in between"),
        pytest.param(10.0, 2.0, id="writers wait at the smaller one"),
    ],
)
def test_of_a_pair_each_side_keeps_to_its_own(mode: Any, speed: float, found: float) -> None:
    settings = RingSettings(cap=CAP, mode=mode, samples_per_insert=(2, 8), min_size=5)
    assert reuse(settings, speed) == pytest.approx(found, rel=0.05)


def test_what_is_said_has_the_number_that_is_kept_to() -> None:
    settings = RingSettings(cap=CAP, samples_per_insert=(2, 8))
    assert writer_wait_reason(RingFlow(inserted=100, read=100, readable=20), settings, 4).endswith(
        "; 2 times each is wanted"
    )
    assert "not more than 8 times" in reader_wait_reason(RingFlow(inserted=1, read=8, readable=20), settings, 1)


def test_a_smallest_number_of_none_lets_writers_go_on() -> None:
    settings = RingSettings(cap=CAP, samples_per_insert=(0, 2))
    assert writer_wait_reason(RingFlow(inserted=10**6, read=0, readable=20), settings, 4) == ""
    assert reader_wait_reason(RingFlow(inserted=1, read=2, readable=20), settings, 1) != ""


@pytest.mark.parametrize(
    ("given", "kept"),
    [(4, 4.0), ("4", 4.0), ([2, 8], (2.0, 8.0)), ("2,8", (2.0, 8.0)), ("0, 1", (0.0, 1.0)), ("3,3", 3.0), (None, None)],
)
def test_it_is_given_as_a_number_or_a_pair(given: Any, kept: Any) -> None:
    settings = RingSettings(cap=CAP, samples_per_insert=given)
    assert settings.samples_per_insert == kept
    assert RingSettings.model_validate_json(settings.model_dump_json()) == settings
    if isinstance(given, str):
        assert RingSettings.model_validate_strings({"cap": str(CAP), "samples_per_insert": given}) == settings


@pytest.mark.parametrize(
    "given",
    [0, -1, "0,0", "8,2", "1,2,3", "2,", "", [], "many", True, float("nan"), float("inf"), "nan,2", "1,2e6", {}],
)
def test_what_is_neither_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="neither a number nor a pair MIN,MAX") as caught:
        RingSettings(cap=CAP, samples_per_insert=given)
    assert "samples_per_insert" in str(caught.value)


class Sides:
    """Writers and readers of one ring, each of whom does as much as it may whenever it is its turn."""

    def __init__(
        self, settings: RingSettings, batches: list[int], *, told: bool = True, packs: Sequence[int] = ()
    ) -> None:
        """`told`: whether readers have said how much they take at a time; else writers have to allow for it. `packs`:
        how many samples are in each, again and again: by their bytes fewer may fit."""
        self.packs = cycle([min(pack, settings.pack) for pack in packs] or [settings.pack])
        self.pack = next(self.packs)
        self.settings, self.batches = settings, batches
        self.wanted, self.slack = (max(batches), 1) if told else (0, max(batches))
        self.inserted = self.finished = self.read = self.readable = self.made = 0

    def flow(self) -> RingFlow:
        return RingFlow(self.inserted, self.finished, self.read, self.readable, self.wanted)

    def write(self) -> bool:
        """Make one sample; whole packs are finished."""
        if writer_wait_reason(self.flow(), self.settings, self.slack):
            return False
        self.made += 1
        if self.made == self.pack:
            self.finished, self.made = self.finished + self.made, 0
            self.pack = next(self.packs)
        return True

    def publish(self) -> bool:
        settings = self.settings
        if self.finished < (settings.cap if settings.mode == "generation" else 1):
            return False
        taken = min(self.finished, settings.cap)
        self.inserted, self.finished = self.inserted + taken, self.finished - taken
        self.readable = taken if settings.mode == "generation" else min(self.readable + taken, settings.cap)
        return True

    def take(self, batch: int) -> bool:
        if reader_wait_reason(self.flow(), self.settings, batch):
            return False
        self.read += batch
        return True

    def round(self, writes: int, reads: int) -> bool:
        """Let writers and readers take their turns; return whether any of them got on."""
        got_on = False
        for _ in range(writes):
            got_on |= self.write()
        got_on |= self.publish()
        for _ in range(reads):
            for batch in self.batches:
                got_on |= self.take(batch)
        return got_on


@st.composite
def rings(draw: st.DrawFn) -> RingSettings:
    cap = draw(st.integers(1, 400))
    pack = draw(st.integers(1, cap))
    mode = draw(st.sampled_from(["generation", "rolling"]))
    low = draw(st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 20.0)))
    high = draw(st.one_of(st.just(low), st.floats(low, low * 1.1), st.floats(low, 30.0)))
    ratio = (low, max(high, 0.02))
    return RingSettings(
        cap=cap,
        mode=mode,
        pack=pack,
        min_size=draw(st.integers(1, cap)),
        samples_per_insert=ratio,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("told", [True, False], ids=["readers say what they take", "writers assume it"])
@checked(max_examples=150, deadline=None, derandomize=True)
@given(
    settings=rings(),
    parts=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    writes=st.integers(0, 40),
    reads=st.integers(0, 3),
    packs=st.lists(st.integers(1, 400), max_size=5),
)
def test_whatever_the_numbers_are_one_side_can_always_go_on(
    told: bool, settings: RingSettings, parts: list[float], writes: int, reads: int, packs: list[int]
) -> None:
    batches = [max(1, round(part * settings.cap)) for part in parts]
    sides = Sides(settings, batches, told=told, packs=packs)
    low, high = settings.reads_per_insert or (0.0, 0.0)
    unit = settings.cap if settings.mode == "generation" else settings.pack
    for _ in range(40):
        # After a round of any speed, one side at least may go on.
        sides.round(writes, reads)
        assert sides.round(1, 1) or sides.round(settings.pack, 1), vars(sides)
        assert sides.read <= high * sides.inserted, "readers wait"
        put = sides.inserted + sides.finished - settings.pack  # all but the newest pack
        before = settings.min_size + settings.ahead  # put before anything may be read
        assert (put - before) * low - sides.read <= max(batches) + unit * low, "writers wait"


@pytest.mark.parametrize(
    ("cap", "batch", "ratio"),
    [(300, 32, 1.0), (100, 64, 4.0), (1000, 64, 1.0), (1000, 48, 2.0), (1000, 64, (1, 1.02)), (500, 32, (2, 4))],
)
def test_a_batch_that_is_no_part_of_a_generation_stops_nobody(cap: int, batch: int, ratio: Any) -> None:
    settings = RingSettings(cap=cap, mode="generation", samples_per_insert=ratio)
    sides = Sides(settings, [batch])
    while sides.inserted < 40 * cap:
        assert sides.round(1, 1)
    low, high = settings.reads_per_insert or (0.0, 0.0)
    assert low * 0.9 <= sides.read / sides.inserted <= high


@pytest.mark.parametrize("mode", ["rolling", "generation"])
def test_packs_that_no_whole_number_of_fits_keep_nobody_from_reading_all_of_the_ring(mode: Any) -> None:
    """A ring of 100 with packs of 64 makes 100 samples readable; it published one pack, and readers waited forever."""
    scene = Scene(cap=100, mode=mode, pack=64, min_size=65)
    with scene.writer() as writer:
        for number in range(128):
            writer.put(np.array([number]))
        scene.publish()
        assert len(scene.ring.newest()) == 100
    BatchShape(80).require_fits(scene.ring.settings.cap)
    with pytest.raises(RingError, match="more than the ring's 100"):
        BatchShape(101).require_fits(scene.ring.settings.cap)
