"""Test when a training with slow rounds receives advice, and that the advised settings are sufficient."""

from __future__ import annotations

import re

import pytest

from baton.contract.elastic.round_advice import GOOD_SHARE, MIN_ROUNDS, advise_rounds
from baton.contract.elastic.world import NodeProgram, RoundReport


def advised(
    reduce_s: float, *, inner_s: float = 60.0, count: int = 5, codec: str = "int8", overlap: bool = False
) -> str:
    program = NodeProgram(
        torch="2.13.0",
        engine="wire",
        codec=codec,
        parameters=10**9,
        model_sha256="9f" * 32,
        settings={"overlap": overlap},
    )
    round_s = max(inner_s, reduce_s) if overlap else inner_s + reduce_s
    rounds = [
        RoundReport(
            round=number, epoch=1, contributors=2, round_s=round_s, reduce_s=reduce_s, sent_bytes=int(reduce_s * 1e6)
        )
        for number in range(count)
    ]
    return advise_rounds(rounds, program)


@pytest.mark.parametrize("reduce_s", [20.0, 60.0, 600.0])
def test_the_advised_steps_lead_to_a_short_reduce(reduce_s: float) -> None:
    text = advised(reduce_s)
    found = re.search(r"(\d+) times the inner_steps", text)
    assert found is not None
    assert reduce_s / (reduce_s + 60 * int(found[1])) <= GOOD_SHARE + 0.001
    assert "at 8 Mbit/s" in text and "codec int4" in text and "fragments=4" in text


def test_fast_or_few_rounds_receive_no_advice() -> None:
    assert advised(5.0) == advised(600.0, count=MIN_ROUNDS - 1) == advise_rounds([], None) == ""


def test_an_overlapped_reduce_may_take_nearly_the_whole_round() -> None:
    assert advised(50.0, overlap=True) == ""
    assert advised(90.0, overlap=True, codec="int4").endswith("Remedies: 2 times the inner_steps.")
