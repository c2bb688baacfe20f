"""The ledger of the elastic bench finds each violation in traces, and none in right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.elastic.facts import FACTS
from bench.elastic.nodes.trace_ledger import Delta, TraceLedger

ROOT = Path(__file__).resolve().parents[3]


def trace(node: str, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"at": 0.0, "kind": "born", "node": node}, *lines]


def reduce(number: int, delta: int | None, epoch: int = 1) -> dict[str, Any]:
    return {"at": float(number), "kind": "reduce", "epoch": epoch, "round": number, "delta": delta}


def commit(number: int, weights: dict[str, int], state: str = "s", epoch: int = 1) -> dict[str, Any]:
    return {
        "at": number + 0.5,
        "kind": "commit",
        "round": number,
        "epoch": epoch,
        "hash": f"{state}{number}",
        "sha256": None,
        "tags": [epoch, epoch],
        "tries": {str(epoch): weights},
    }


def test_right_traces_have_no_problem() -> None:
    both = {"a": 3, "b": 2}
    ended = [{"at": 9.0, "kind": "step"}] * 4 + [{"at": 9.0, "kind": "end", "pending": 1}]
    ledger = TraceLedger(
        {
            "0-1": trace("a", reduce(1, 0), commit(1, both), *ended),
            "1-1": trace("b", reduce(1, 0), commit(1, both), reduce(2, 1), commit(2, {"b": 1})),
        }
    )
    assert ledger.problems() == []
    assert ledger.counted == {Delta("a", 0): 3, Delta("b", 0): 2, Delta("b", 1): 1}
    assert ledger.tokens == {1: 5, 2: 1}
    assert ledger.lost_steps == {"0-1": 0}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([reduce(1, 0), commit(1, {"a": 1}), commit(1, {"a": 1}, "t")], "round 1 has the states"),
        ([reduce(1, 0), commit(1, {"a": 1}), reduce(2, 0), commit(2, {"a": 1})], "counts in bucket 0 of the rounds"),
        ([reduce(1, None), commit(1, {"a": 1})], "without a delta"),
        ([{"at": 1.0, "kind": "step"}, {"at": 2.0, "kind": "end", "pending": 0}], "lost 1 steps"),
    ],
)
def test_each_violation_is_found(lines: list[dict[str, Any]], problem: str) -> None:
    (first, *_) = TraceLedger({"0-1": trace("a", *lines)}).problems()
    assert problem in first


def test_the_pace_counts_whole_rounds() -> None:
    rounds = range(1, 7)
    lines = [line for number in rounds for line in (reduce(number, number), commit(number, {"a": 10 * number}))]
    ledger = TraceLedger({"0-1": trace("a", *lines)})
    # The rounds 2 to 5 end in this time; the tokens of round 2 were trained before.
    assert ledger.seconds_per_token(1.6, 6.4) == 3.0 / (30 + 40 + 50)


@pytest.mark.parametrize("test", [test for tests in FACTS.values() for test in tests])
def test_facts_name_tests_that_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
