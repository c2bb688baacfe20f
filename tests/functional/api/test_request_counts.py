"""AWS requests of the frequent calls, counted at the client, with the dispatcher on the emulated cloud.

The counts are exact, so they are tests; times are measured by `make bench` and never here.
"""

from __future__ import annotations

import pytest

from bench.api.request_counts import claim_requests, commit_cost, heartbeat_requests
from bench.harness.plane import Plane
from functions.domain.records import CheckpointRecord
from functions.local.emulator import Emulator
from tests.kits.clouds.emulator import unique

pytestmark = pytest.mark.emulator


@pytest.fixture(scope="module")
def plane(emulator: Emulator) -> Plane:
    """A deployment of this module's own."""
    return Plane(emulator.endpoint_url, f"{unique('counts')}-")


def test_a_heartbeat_is_exactly_one_update(plane: Plane) -> None:
    assert heartbeat_requests(plane) == {"dynamodb.UpdateItem": 1}


def test_an_undisturbed_claim_is_one_query_and_one_write(plane: Plane) -> None:
    assert claim_requests(plane) == {"dynamodb.Query": 1, "dynamodb.TransactWriteItems": 1}


def test_an_undisturbed_claim_costs_the_same_with_more_jobs_waiting(plane: Plane) -> None:
    plane.fill(60)
    assert claim_requests(plane) == {"dynamodb.Query": 1, "dynamodb.TransactWriteItems": 1}


def test_a_checkpoint_takes_two_calls_besides_its_pack_and_one_transaction(plane: Plane) -> None:
    cost = commit_cost(plane)
    assert (cost.api_calls, cost.packs) == (2, 1), "small files lie in one pack"
    assert cost.requests["dynamodb.TransactWriteItems"] == 1
    assert cost.requests["dynamodb.UpdateItem"] == 1, "the job holds the pack"
    # The pack and the manifest are looked at by either call; nothing searches the table or the bucket.
    assert cost.requests["dynamodb.BatchGetItem"] == 2 and cost.requests["s3.HeadObject"] == 2 * 2
    assert cost.requests["s3.PutObject"] == 1, "the manifest"
    assert not {"dynamodb.Scan", "s3.ListObjectsV2"} & set(cost.requests)
    assert [record.step for record in plane.context.jobs.history(CheckpointRecord, cost.job_id, limit=10).items] == [1]


def test_retention_after_a_commit_takes_no_further_call(plane: Plane) -> None:
    before, cost = commit_cost(plane), commit_cost(plane, earlier=4)
    assert cost.api_calls == 2
    # The old checkpoint's record goes with the commit's own transaction. Its pack is read, condemned and deleted, and
    # then its manifest is.
    # Manifests say what it and the two others that stay consist of.
    assert cost.requests - before.requests == {
        "dynamodb.BatchGetItem": 1,
        "dynamodb.UpdateItem": 1,
        "s3.GetObject": 3,
        "s3.DeleteObjects": 2,
    }
    assert [record.step for record in plane.context.jobs.history(CheckpointRecord, cost.job_id, limit=10).items] == [
        5,
        4,
        3,
    ]
