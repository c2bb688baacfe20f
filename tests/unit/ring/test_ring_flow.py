"""How often samples are read: writers and readers of any speed, with one number to keep to or with a pair."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_client.ring.flow import Flow, read_wait, write_wait
from gpu_client.ring.settings import RingSettings

CAP, BATCH = 20, 4


def reuse(settings: RingSettings, speed: float) -> float:
    """How often each sample was read in the mean, where a writer is ready to make `speed` packs a batch."""
    inserted = finished = read = 0
    credit = 0.0
    for _ in range(10_000):
        credit += speed
        while credit >= 1:
            credit -= 1
            if not write_wait(Flow(inserted, finished, read, min(inserted, CAP)), settings, BATCH):
                finished += settings.pack
        if settings.mode == "rolling" or finished >= CAP:
            inserted, finished = inserted + finished, 0
        if not read_wait(Flow(inserted, finished, read, min(inserted, CAP)), settings, BATCH):
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
    assert write_wait(Flow(inserted=100, read=100, readable=20), settings, 4).endswith("; 2 times each is wanted")
    assert "not more than 8 times" in read_wait(Flow(inserted=1, read=8, readable=20), settings, 1)


def test_a_smallest_number_of_none_lets_writers_go_on() -> None:
    settings = RingSettings(cap=CAP, samples_per_insert=(0, 2))
    assert write_wait(Flow(inserted=10**6, read=0, readable=20), settings, 4) == ""
    assert read_wait(Flow(inserted=1, read=2, readable=20), settings, 1) != ""


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
