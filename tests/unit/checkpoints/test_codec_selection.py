"""Selection of the codec that stores a chunk soonest, for simulated upload speeds and processors."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_client.checkpoints.format.codec_selection import (
    ASSUMED_UPLOAD_BYTES_PER_S,
    CodecChoice,
    CodecRates,
    choose_codec,
    select_samples,
)

RANDOM = np.random.default_rng(0)
NOISE = RANDOM.bytes(48_000)
WEIGHTS = RANDOM.normal(0, 0.02, 12_000).astype(np.float32)
FP32 = WEIGHTS.tobytes()
BF16 = (WEIGHTS.view(np.uint32) >> 16).astype(np.uint16)
NEXT_BF16 = (BF16 + (RANDOM.random(len(BF16)) < 0.064)).astype(np.uint16)
SLOW = CodecRates(upload=10e6, planes=600e6, delta=800e6)
FAST = CodecRates(upload=1e9, planes=600e6, delta=800e6)


def test_noise_stays_as_it_is_on_any_line() -> None:
    for rates in (SLOW, FAST):
        assert choose_codec(NOISE, width=4, base_sample=None, rates=rates) == CodecChoice("raw")


def test_weights_become_planes_on_a_slow_line_only() -> None:
    assert choose_codec(FP32, width=4, base_sample=None, rates=SLOW) == CodecChoice("planes", 4)
    assert choose_codec(FP32, width=4, base_sample=None, rates=FAST) == CodecChoice("raw")


@pytest.mark.parametrize("slower", [2, 10])
def test_a_slow_processor_never_holds_up_the_line(slower: int) -> None:
    rates = CodecRates(upload=100e6, planes=1e9, delta=1e9)
    assert choose_codec(BF16.tobytes(), width=2, base_sample=None, rates=rates).codec == "planes"
    rates = CodecRates(upload=100e6 * slower, planes=500e6, delta=500e6)
    assert choose_codec(BF16.tobytes(), width=2, base_sample=None, rates=rates) == CodecChoice("raw")


def test_a_delta_where_little_changed() -> None:
    choice = choose_codec(NEXT_BF16.tobytes(), width=2, base_sample=BF16.tobytes(), rates=SLOW)
    assert choice == CodecChoice("delta", 2)


def test_no_delta_to_something_else() -> None:
    other = RANDOM.normal(0, 0.02, 12_000).astype(np.float32).tobytes()
    assert choose_codec(FP32, width=4, base_sample=other, rates=SLOW) == CodecChoice("planes", 4)


def test_a_delta_that_is_little_better_is_not_worth_fetching_its_base() -> None:
    changed = WEIGHTS * (1 + RANDOM.normal(0, 1e-2, len(WEIGHTS)).astype(np.float32))
    choice = choose_codec(changed.tobytes(), width=4, base_sample=FP32, rates=SLOW)
    assert choice == CodecChoice("planes", 4)


def test_an_unknown_width_is_found_by_trying() -> None:
    assert choose_codec(FP32, width=None, base_sample=None, rates=SLOW) == CodecChoice("planes", 4)
    assert choose_codec(BF16.tobytes(), width=None, base_sample=None, rates=SLOW) == CodecChoice("planes", 2)
    text = b'{"step": 7, "loss": 0.4} ' * 1000
    assert choose_codec(text, width=None, base_sample=None, rates=SLOW) == CodecChoice("planes", 1)


def test_while_the_speed_is_unknown_nothing_is_encoded() -> None:
    rates = CodecRates.at_speed(None)
    assert rates == CodecRates.at_speed(ASSUMED_UPLOAD_BYTES_PER_S)
    assert not rates.may_pay("planes")
    assert not rates.may_pay("delta")
    assert choose_codec(NEXT_BF16.tobytes(), width=2, base_sample=BF16.tobytes(), rates=rates) == CodecChoice("raw")


@pytest.mark.parametrize(
    ("upload_bytes_per_s", "expected"),
    [(1e6, "planes"), (40e6, "planes"), (100e6, "raw"), (1e9, "raw")],
)
def test_the_faster_the_line_the_less_is_encoded(upload_bytes_per_s: float, expected: str) -> None:
    rates = CodecRates.at_speed(upload_bytes_per_s)
    assert choose_codec(BF16.tobytes(), width=2, base_sample=None, rates=rates).codec == expected


def test_the_line_that_is_too_fast_for_a_codec() -> None:
    assert SLOW.may_pay("planes")
    assert SLOW.may_pay("delta")
    assert not CodecRates(upload=10e9, planes=600e6, delta=800e6).may_pay("planes")
    assert not CodecRates(upload=10e9, planes=600e6, delta=800e6).may_pay("delta")


@pytest.mark.parametrize("size_bytes", [1, 7, 4096, 49_152, 49_153, 1_000_001, 8 * 2**20])
def test_samples_lie_inside_and_do_not_overlap(size_bytes: int) -> None:
    end = 0
    for offset, size in select_samples(size_bytes):
        assert offset >= end
        assert offset % 8 == 0
        end = offset + size
    assert end <= size_bytes
    assert sum(size for _, size in select_samples(size_bytes)) <= 49_152
