"""Requests of a commit and its retention to DynamoDB and S3, counted at the clients on the emulated cloud."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from blake3 import blake3

from functions.local.emulator import Emulator
from tests.conformance.store_kit import counted_requests
from tests.kits.api.harness import Api, Held, emulated_api

pytestmark = pytest.mark.emulator
CALL = Counter({"BatchGetItem": 1})
"""Requests of every commit call beside the reads of key, job and lease: one read of the packs."""


@pytest.fixture(scope="module")
def api(emulator: Emulator) -> Api:
    return emulated_api(emulator)


def requests_of(api: Api, held: Held, manifest: dict[str, Any]) -> tuple[Counter[str], dict[str, Any]]:
    """Send one call of a commit; return its requests and its answer."""
    jobs, objects = api.context.jobs, api.context.objects
    with counted_requests(jobs._client) as dynamodb, counted_requests(objects._client) as s3:  # type: ignore[attr-defined]
        answer = held.post(f"/job/{held.id}/checkpoints", manifest).ok()
    sent = Counter(dynamodb) + Counter(s3)
    assert sent.pop("GetItem") == 3, "key, job, lease"
    return sent, answer


def test_a_commit_costs_what_it_must(api: Api) -> None:
    api.submit(queue="cost", policy={"retention": {"keep_last": 1}})
    held = api.claim(queue="cost")
    files = {"a": b"a1", "b": b"b1", "frozen": b"frozen"}
    held.commit(1, files).ok()
    manifest = held.manifest(2, {**files, "a": b"a2", "b": b"b2"})
    first, answer = requests_of(api, held, manifest)
    # The commit reads no pack that the job holds already, and writes one object, the manifest.
    assert first == CALL + Counter({"HeadObject": 3, "PutObject": 1})
    for item in answer["missing"]:
        data = {blake3(data).hexdigest(): data for data in (b"a2", b"b2")}[item["blake3"]]
        assert api.send("PUT", item["url"], item["headers"], data).status == 200
    second, answer = requests_of(api, held, manifest)
    assert answer["committed"] is True
    commit = CALL + Counter({"HeadObject": 3, "Query": 1, "UpdateItem": 2, "TransactWriteItems": 1})
    # One checkpoint goes with the same transaction, and two packs behind it. That its manifest names the third pack
    # shows that nobody is about to let go of that one.
    retention = Counter({"GetObject": 1, "BatchGetItem": 1, "UpdateItem": 2, "DeleteObjects": 2})
    assert second == commit + retention
