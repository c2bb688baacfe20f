"""Members decide alike from the statuses that all of them have exchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.elastic.data import MAX_LEASES, DataProgress
from gpu_client.elastic.parameters import MAX_BUCKETS
from gpu_client.elastic.rounds.member_status import AttemptStatus, MemberStatus
from gpu_client.elastic.rounds.round_decisions import (
    MAX_GRACE_S,
    MIN_GRACE_S,
    Abandon,
    CatchUp,
    Conclude,
    Decision,
    Dismiss,
    GiveUp,
    Hurry,
    Reduce,
    Reform,
    Wait,
    choose_reference,
    choose_repairs,
    compute_grace_s,
    decide,
    normalize_weights,
)

A, B, C = "0.1.0000000a", "1.1.0000000b", "2.1.0000000c"
IDLE = MemberStatus(A, 4, 99, synced_epoch=7, grace_s=5.0, step_s=2.0)


def ready(tokens: int = 8, for_s: float = 0.0, **more: object) -> dict[str, object]:
    return {"ready": True, "weight": tokens, "ready_for_s": for_s, **more}


def members(*changes: dict[str, object]) -> list[MemberStatus]:
    return [replace(IDLE, node=node, **change) for node, change in zip((A, B, C), changes, strict=False)]


def attempt(
    *tags: int, epoch: int = 6, nodes: tuple[str, ...] = (A, B, C), weights: dict[str, int] | None = None
) -> dict[str, object]:
    return {"attempt": AttemptStatus(5, epoch, nodes, {A: 8, B: 8, C: 8} if weights is None else weights, tags)}


ALL = Reduce(5, {A: 8, B: 8, C: 8}, (A, B, C))


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        # Rounds begin when all are ready, or when more than half have been patient for 5 s, and then for 1 s + 2 steps.
        (members({}, {}, {}), Wait()),
        (members(ready(), ready(), {}), Wait()),
        (members(ready(), ready(), ready()), ALL),
        (members(ready(for_s=9), ready(for_s=4.9), {}), Wait()),
        (members(ready(for_s=99), {}, {}), Wait()),
        (members(ready(for_s=9), ready(for_s=5), {}), Hurry()),
        (members(ready(for_s=10), ready(for_s=10), {}), Reduce(5, {A: 8, B: 8}, (A, B, C))),
        (members(ready(), ready(0), ready(3)), Reduce(5, {A: 8, C: 3}, (A, B, C))),
        (members(ready(0), ready(0), ready(0)), Dismiss()),
        (members(ready(0, 99), ready(0, 99), {}), Hurry()),
        (members(ready(leaving=True), {}, {}), Hurry()),
        (members(ready(for_s=99, leaving=True), {}, {}), Hurry()),
        (members(ready(leaving=True, leaving_for_s=4.9), {}, {}), Hurry()),
        (members(ready(leaving=True, leaving_for_s=5), {}, {"step_s": 60.0}), Reduce(5, {A: 8}, (A, B, C))),
        (members({"leaving": True}, {}, {}), Wait()),
        (members({"leaving": True}, {"leaving": True}, {"leaving": True}), Wait()),
        (members({"leaving": True}, ready(), ready()), Reduce(5, {B: 8, C: 8}, (A, B, C))),
        (members({"idle": True}, ready(), ready()), Reduce(5, {B: 8, C: 8}, (A, B, C))),
        (members({"idle": True}, {"idle": True}, {"idle": True}), Wait()),
        # A newer epoch ends the group between rounds.
        (members({"next_epoch": 8}, ready(), ready()), Reform(8)),
        (members({"next_epoch": 7}, {}, {}), Wait()),
        # One state first.
        (members({}, {"state_hash": 98}, {}), CatchUp(A)),
        (members({"round": 3}, {}, {}), CatchUp(B)),
        (members({}, {"complete": False}, {"next_epoch": 8}), CatchUp(A)),
        # An unfinished round: concluded if all participants hold all averages, because one may have committed.
        (members(attempt(6, 6), attempt(6, 6), attempt(6, 6)), Conclude((A, B, C))),
        (members(attempt(6, 6), attempt(6, 6), {}), Abandon()),
        (members(attempt(6, 6, nodes=(A, B)), attempt(6, 6, nodes=(A, B)), {}), Conclude((A, B))),
        (members(attempt(6, 6), attempt(6, 0), attempt(6, 6)), replace(ALL, kept=(0,))),
        (members(attempt(6, 7, epoch=7), attempt(6, 6), attempt(6, 6)), replace(ALL, kept=(0,))),
        (members(attempt(0, 0), attempt(0, 0)), Reduce(5, {A: 8, B: 8}, (A, B))),
        (members(attempt(0, 0, weights={C: 8}), attempt(6, 0, weights={C: 8})), Abandon()),
        (members(attempt(6, 6, weights={C: 8}), attempt(6, 6, weights={C: 8})), Conclude((A, B))),
    ],
)  # fmt: skip
def test_decisions(statuses: list[MemberStatus], expected: Decision) -> None:
    assert decide(statuses, 7) == expected
    assert decide([MemberStatus.decode(one.encode()) for one in statuses], 7) == expected


def test_members_that_all_miss_parts_of_the_state_give_up() -> None:
    assert decide(members({"complete": False}, {"complete": False, "round": 5}), 7) == GiveUp()
    assert decide(members({"complete": False}, {}), 7) == CatchUp(B)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (({"round": 9, "synced_epoch": 0}, {"round": 5}, {}), B),
        (({"round": 3}, {"round": 4}, {"round": 4}), B),
        (({"round": 9, "complete": False}, {}, {}), B),
        (({"synced_epoch": 8, "complete": False}, {"round": 9}, {}), A),
    ],
)
def test_the_reference_is_the_newest_state_of_a_member_in_step(
    changes: tuple[dict[str, object], ...], expected: str
) -> None:
    assert choose_reference(members(*changes)).node == expected


@given(st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 10**12), min_size=1))
def test_weights_sum_to_one(weights: dict[str, int]) -> None:
    shares = normalize_weights(weights, [A, B, C])
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    assert [share > 0 for share in shares] == [node in weights for node in (A, B, C)]


def test_the_grace_follows_the_lags_of_past_rounds_within_bounds() -> None:
    assert compute_grace_s([]) == MAX_GRACE_S
    assert compute_grace_s([0.0] * 9) == MIN_GRACE_S
    assert compute_grace_s([2.0, 3.0, 4.0, 3.0, 900.0]) == pytest.approx(3 + 4 * 1)
    assert compute_grace_s([1.0, 500.0, 900.0]) == MAX_GRACE_S


def test_the_most_frequent_bytes_win_a_repair() -> None:
    assert choose_repairs({A: [1, 2, 3], B: [1, 5, 4], C: [1, 5, 3]}) == {1: B, 2: A}
    assert choose_repairs({A: [1], B: [2]}) == {0: A}


def test_a_status_of_the_greatest_world_fits_into_one_exchange() -> None:
    nodes = tuple(f"{seat}.999999999.{seat:08x}" for seat in range(64))
    tags = tuple(1 + bucket % 3 for bucket in range(MAX_BUCKETS))
    begun = AttemptStatus(10**9, 10**9, nodes, dict.fromkeys(nodes, 10**13), tags)
    status = replace(IDLE, attempt=begun, done=2**64 - 1, hashes=(2**64 - 1,) * MAX_BUCKETS)
    assert MemberStatus.decode(status.encode()) == status
    assert len(status.encode()) <= 64 * 1024


def test_a_status_bears_the_data_of_a_delta() -> None:
    spread = DataProgress(finished=[[10**12 - 2 * one, 10**12 - 2 * one + 1] for one in range(MAX_LEASES, 0, -1)])
    status = replace(IDLE, ready=True, data=spread)
    assert MemberStatus.decode(status.encode()) == status
    assert len(status.encode()) < 8 * 1024


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"{}", b'{"attempt": 3}', IDLE.encode()[:-1] + b', "other": 1}'])
def test_other_payloads_are_no_status(payload: bytes) -> None:
    with pytest.raises(ValueError):
        MemberStatus.decode(payload)


@pytest.mark.parametrize(
    "change",
    [
        {"round": "x"},
        {"round": -1},
        {"weight": -1},
        {"weight": 10**16},
        {"ready_for_s": None},
        {"done": [1]},
        {"node": 7},
        {"attempt": {"round": 5, "epoch": 7, "members": [A, 1], "weights": {A: 1}, "tags": [1, {}]}},
        {"attempt": {"round": 5, "epoch": 7, "members": [A], "weights": {A: "x"}, "tags": [1, {}]}},
        {"attempt": {"round": 5, "epoch": 7, "members": [A], "weights": {A: -4}, "tags": [1, {"7": "1"}]}},
    ],
)
def test_a_status_with_other_values_is_no_status(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no status of a member"):
        MemberStatus.decode(json.dumps({**json.loads(IDLE.encode()), **change}).encode())


def test_a_deep_payload_is_no_status() -> None:
    with pytest.raises(ValueError, match="no status of a member"):
        MemberStatus.decode(b"[" * 60_000)
