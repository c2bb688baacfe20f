"""Keys sort as they must, and leases move in their index seldom."""

from __future__ import annotations

import itertools

from functions.domain import table_keys
from functions.domain.record_base import TableRecord
from functions.domain.records import Attempt, CheckpointRecord, Event
from functions.domain.worlds.data_pool import DataRecord
from functions.domain.worlds.world_record import WorldRecord, WorldTensors


def test_numbers_in_sort_keys_sort_as_numbers() -> None:
    steps = [0, 9, 10, 99, 10**12]
    for kind, numbers in ((CheckpointRecord, steps), (Attempt, [1, 2, 10, 10**9]), (Event, [1, 2, 10, 10**9])):
        found = [kind.key("j", number) for number in numbers]
        assert sorted(found) == found
    created = [table_keys.created_sk(created_at, "j") for created_at in (9, 10, 10**10)]
    assert sorted(created) == created


def test_kinds_below_a_job_do_not_overlap() -> None:
    kinds = [kind for kind in TableRecord.__subclasses__() if kind.PARTITION == TableRecord.PARTITION]
    assert {DataRecord, WorldRecord, WorldTensors} < set(kinds) and len(kinds) == 11
    ranges = [(kind.key("j", 0), kind.key("j", 10**kind.DIGITS - 1)) for kind in kinds]
    for (low, high), (other_low, other_high) in itertools.combinations(ranges, 2):
        assert high < other_low or other_high < low


def test_a_due_bucket_is_never_late_and_seldom_new() -> None:
    for job_id in ("a", "b", "0f3c"):
        buckets = [table_keys.due_bucket(job_id, now) for now in range(10_000, 46_000, 12)]
        assert all(
            now - table_keys.DUE_BUCKET_S < bucket <= now
            for now, bucket in zip(range(10_000, 46_000, 12), buckets, strict=True)
        )
        assert buckets == sorted(buckets)
        assert len(set(buckets)) in (10, 11)


def test_the_buckets_of_different_jobs_begin_at_different_seconds() -> None:
    starts = {table_keys.due_bucket(f"job-{n}", 10**9) % table_keys.DUE_BUCKET_S for n in range(300)}
    assert len(starts) > 150
