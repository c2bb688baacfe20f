"""Test batch plans: no sample twice, no mixed manifests, the same samples after a resume."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_client.ring.format.manifest import ObjectId, RingManifest, Slot
from gpu_client.ring.reading.batch_plan import BatchPlan, BatchShape, ManifestDecision, Policy


def manifest(number: int, first: int, count: int) -> RingManifest:
    slots = tuple(Slot(ObjectId("w", 1, one + 1), 0, one, one * 1000) for one in range(first, first + count))
    return RingManifest(number, slots, first + count, {}, 0)


def go_on(plan: BatchPlan, manifests: list[RingManifest], batches: int) -> list[list[int]]:
    """Return the samples of the next `batches` global batches; decision k takes manifest k, or the last one."""
    found: list[list[int]] = []
    current = manifests[min(plan.decided, len(manifests)) - 1] if plan.decision else None
    while len(found) < batches:
        if plan.wants_decision(current):
            following = manifests[min(plan.decided, len(manifests) - 1)]
            plan.decide(ManifestDecision(following.number, 10**6), following, current)
            current = following
        assert current is not None
        batch = plan.next_batch(current)
        assert batch
        found.append([slot.inserted for slot in batch])
    return found


def test_a_pass_has_every_sample_once() -> None:
    plan = BatchPlan(BatchShape(2, world_size=2, seed=1))
    batches = go_on(plan, [manifest(1, 0, 12)], 6)
    first, second = batches[:3], batches[3:]
    assert sorted([*chain.from_iterable(first)]) == sorted([*chain.from_iterable(second)]) == list(range(12))
    assert first != second
    assert [slot.inserted for slot in plan.share(manifest(1, 0, 4).slots, 1)] == [2, 3]


def test_ranks_share_a_batch_without_duplicates() -> None:
    shape = BatchShape(3, world_size=4)
    plan, there = BatchPlan(shape), manifest(1, 0, 24)
    plan.decide(ManifestDecision(1, 0), there, None)
    batch = plan.next_batch(there)
    shares = [plan.share(batch, rank) for rank in range(4)]
    assert [len(one) for one in shares] == [3, 3, 3, 3]
    assert len({slot for share in shares for slot in share}) == 12


@pytest.mark.parametrize("policy", ["latest", "pass", 3])
def test_a_batch_is_of_one_manifest(policy: Policy) -> None:
    manifests = [manifest(number, number * 5, 10) for number in range(1, 9)]
    for batch in go_on(BatchPlan(BatchShape(2, policy=policy)), manifests, 15):
        assert any(set(batch) <= {slot.inserted for slot in one.slots} for one in manifests)


def test_policies_look_for_the_newest_when_they_say() -> None:
    manifests = [manifest(number, number, 8) for number in range(1, 50)]
    decided: dict[Any, int] = {}
    for policy in ("latest", "pass", 3):
        plan = BatchPlan(BatchShape(2, policy=policy))  # type: ignore[arg-type]
        go_on(plan, manifests, 12)
        decided[policy] = plan.decided
    assert decided == {"latest": 12, "pass": 3, 3: 4}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(["latest", "pass", 1, 2, 5]),
    st.integers(1, 3),
    st.none() | st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 6), st.integers(6, 12)), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_who_is_resumed_gets_what_the_uninterrupted_one_gets(
    policy: Policy, size: int, max_uses: int | None, moves: list[tuple[int, int]], cut: int
) -> None:
    manifests, first, end = [], 0, 0
    for number, (further, count) in enumerate(moves, 1):
        first += further
        end = max(end, first + count)  # what has been replaced does not come back
        manifests.append(manifest(number, first, end - first))
    fresh = manifest(len(manifests) + 1, first + 100, 400)
    manifests.append(fresh)
    shape = BatchShape(size, seed=3, policy=policy, max_uses=max_uses)

    def steps(plan: BatchPlan, count: int) -> list[list[int]]:
        found: list[list[int]] = []
        current = next((one for one in manifests if plan.decision and one.number == plan.decision.number), None)
        while len(found) < count:
            batch = [] if plan.wants_decision(current) or current is None else plan.next_batch(current)
            if batch:
                found.append([slot.inserted for slot in batch])
                continue
            following = manifests[min(plan.decided, len(manifests) - 1)]
            plan.decide(ManifestDecision(following.number, 10**6), following, current)
            current = following
            if not plan.can_fill_batch(current, 10**6, None) and current is fresh:
                return found
        return found

    whole = BatchPlan(shape)
    expected = steps(whole, 16)
    interrupted = BatchPlan(shape)
    before = steps(interrupted, cut)
    resumed = BatchPlan(shape)
    resumed.load_state_dict(interrupted.state_dict())
    assert before + steps(resumed, 16 - cut) == expected
    assert resumed.batch == whole.batch
    if max_uses is not None:
        assert max(Counter([*chain.from_iterable(expected)]).values(), default=0) <= max_uses


def test_what_is_too_old_at_the_decision_is_left_out() -> None:
    there = manifest(1, 0, 10)
    plan = BatchPlan(BatchShape(1, max_age_s=4.0))
    plan.decide(ManifestDecision(1, 9000), there, None)
    assert sorted([*chain.from_iterable(go_on_same(plan, there, 5))]) == [5, 6, 7, 8, 9]
    assert plan.wants_decision(there)


def go_on_same(plan: BatchPlan, there: RingManifest, batches: int) -> list[list[int]]:
    return [[slot.inserted for slot in plan.next_batch(there)] for _ in range(batches)]


def test_a_damaged_state_is_refused() -> None:
    state = BatchPlan(BatchShape(1)).state_dict()
    for wrong in ({**state, "version": 2}, {}, {**state, "uses": 3}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            BatchPlan(BatchShape(1)).load_state_dict(wrong)
