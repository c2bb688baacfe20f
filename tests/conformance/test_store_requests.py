"""Count the requests of each call of the stores, at the AWS client on the emulated cloud."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.worker.calls import WorkQuery
from functions.api.worker.job_claim import ClaimedJob, claim_next
from functions.domain.errors import StorageUnavailable
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.job_selection import ClaimWindow
from functions.domain.records import Event
from functions.storage.clients import dynamodb_client, s3_client
from functions.storage.dynamodb.jobs import DynamoJobStore
from functions.storage.dynamodb.leases import DynamoLeaseStore
from functions.storage.s3.objects import S3ObjectStore
from tests.conformance.store_kit import NOW, TENANT, claim, counted_requests, progress_at, submission, submit
from tests.kits.api.fakes import SeededRandomness
from tests.kits.clouds.emulator import CREDENTIALS
from tests.kits.clouds.store_sets import Cloud

pytestmark = pytest.mark.emulator


def claim_any(cloud: Cloud, window: ClaimWindow | None = None) -> ClaimedJob | None:
    return claim_next(
        cloud.jobs,
        WorkQuery(machine_id="m-1"),
        tenant=TENANT,
        key_id="k",
        token_sha256="a" * 64,
        tags={},
        shards=1,
        now=NOW,
        random=SeededRandomness(1),
        window=window or ClaimWindow(),
    )


def test_a_heartbeat_is_one_update(ministack: Cloud) -> None:
    held = claim(ministack, submit(ministack))
    with counted_requests(ministack.dynamodb) as sent:
        ministack.leases.heartbeat(held.fence(), progress_at(5), "training")
    assert sent == ["UpdateItem"]


@pytest.mark.parametrize("backlog", [1, 50])
def test_an_uncontended_claim_is_one_query_and_one_transaction(ministack: Cloud, backlog: int) -> None:
    for _ in range(backlog):
        submit(ministack)
    with counted_requests(ministack.dynamodb) as sent:
        claimed = claim_any(ministack)
    assert claimed is not None
    assert sent == ["Query", "TransactWriteItems"]


def test_asking_for_work_in_vain_costs_two_queries_however_many_leases_live(ministack: Cloud) -> None:
    claim(ministack, submit(ministack))
    with counted_requests(ministack.dynamodb) as sent:
        assert claim_any(ministack) is None
    assert sent == ["Query", "Query"]


def test_every_change_is_one_transaction(ministack: Cloud) -> None:
    held = claim(ministack, submit(ministack))
    with counted_requests(ministack.dynamodb) as sent:
        ministack.jobs.apply(rules.complete(held.job, held.attempt, held.fence(), artifacts=[], progress=None, now=NOW))
    assert sent == ["TransactWriteItems"]


def test_redeeming_is_one_delete(ministack: Cloud) -> None:
    with counted_requests(ministack.dynamodb) as sent:
        ministack.tokens.redeem("unknown", NOW)
    assert sent == ["DeleteItem"]


def test_objects_are_listed_and_deleted_by_the_thousand(ministack: Cloud) -> None:
    """S3 takes no more in one request: it cuts a list off there, and refuses to delete."""
    names = [f"blobs/{number:04}" for number in range(2001)]
    for number in (0, 999, 1000, 1999, 2000):
        ministack.objects.create(TENANT, CHECKPOINTS_BUCKET, names[number], b"x")
    with counted_requests(ministack.s3) as sent:
        ministack.objects.delete_many(TENANT, CHECKPOINTS_BUCKET, names)
    assert sent == ["DeleteObjects"] * 3
    assert not ministack.objects.list(TENANT, CHECKPOINTS_BUCKET, "blobs/", limit=10).items

    for name in names[:1003]:
        ministack.objects.create(TENANT, CHECKPOINTS_BUCKET, name, b"x")
    with counted_requests(ministack.s3) as sent:
        page = ministack.objects.list(TENANT, CHECKPOINTS_BUCKET, "blobs/", limit=1002)
    assert sent == ["ListObjectsV2"] * 2
    assert [item.key for item in page.items] == names[:1002] and page.cursor is not None
    rest = ministack.objects.list(TENANT, CHECKPOINTS_BUCKET, "blobs/", limit=1002, cursor=page.cursor)
    assert [item.key for item in rest.items] == names[1002:1003] and rest.cursor is None


class LostAnswers:
    """Lets a request through and then loses its answer, the first `times`."""

    def __init__(self, client: Any, operation: str, times: int) -> None:
        self._client, self._left = client, times
        self.sent = 0
        client.meta.events.register_first(f"before-send.*.{operation}", self)

    def __call__(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse | None:
        from botocore.httpsession import URLLib3Session

        self.sent += 1
        if self._left == 0:
            return None
        self._left -= 1
        answer = URLLib3Session().send(request)
        answer.content  # noqa: B018 - read it, then lose it
        return AWSResponse(request.url, 500, {}, _Nothing())


class _Nothing:
    def stream(self, *_: Any, **__: Any) -> list[bytes]:
        return [b""]


def own_clients(cloud: Cloud) -> tuple[Any, Any]:
    endpoint = cloud.dynamodb.meta.endpoint_url
    return dynamodb_client(endpoint, **CREDENTIALS), s3_client(endpoint, **CREDENTIALS)


def test_a_change_whose_answer_was_lost_is_no_conflict(ministack: Cloud) -> None:
    client, _ = own_clients(ministack)
    jobs = DynamoJobStore(client, ministack.prefix)
    lost = LostAnswers(client, "TransactWriteItems", times=1)
    change = submission()
    jobs.apply(change)
    assert lost.sent == 2
    assert jobs.get(change.job.id) == change.job
    assert len(jobs.history(Event, change.job.id, limit=9).items) == 1


def test_a_heartbeat_whose_answer_was_lost_is_repeated(ministack: Cloud) -> None:
    held = claim(ministack, submit(ministack))
    client, _ = own_clients(ministack)
    lost = LostAnswers(client, "UpdateItem", times=2)
    lease = DynamoLeaseStore(client, ministack.prefix).heartbeat(held.fence(NOW + 7), None, None)
    assert lost.sent == 3
    assert lease == ministack.leases.get(held.job.id)
    assert lease.expires_at == NOW + 7 + lease.duration_s


def test_a_store_that_keeps_failing_is_unavailable(ministack: Cloud) -> None:
    dynamodb, s3 = own_clients(ministack)
    for client, operation in ((dynamodb, "*"), (s3, "*")):
        LostAnswers(client, operation, times=1000)
    jobs, leases = DynamoJobStore(dynamodb, ministack.prefix), DynamoLeaseStore(dynamodb, ministack.prefix)
    objects = S3ObjectStore(s3, s3, ministack.buckets)
    held = claim(ministack, submit(ministack))
    calls: list[Callable[[], object]] = [
        lambda: jobs.get(held.job.id),
        lambda: jobs.get_many([held.job.id]),
        lambda: jobs.apply(submission()),
        lambda: jobs.ready(TENANT, "default", 0, limit=1),
        lambda: leases.heartbeat(held.fence(), None, None),
        lambda: objects.head(TENANT, "training-data", "k"),
        lambda: objects.read(TENANT, "training-data", "k"),
        lambda: objects.create(TENANT, "training-data", str(uuid.uuid4()), b""),
        lambda: objects.list(TENANT, "training-data", "", limit=1),
        lambda: objects.delete_many(TENANT, "training-data", ["k"]),
    ]
    for call in calls:
        with pytest.raises(StorageUnavailable):
            call()


def test_a_store_that_cannot_be_reached_is_unavailable() -> None:
    nowhere = "http://127.0.0.1:9"
    jobs = DynamoJobStore(dynamodb_client(nowhere, **CREDENTIALS), "p-")
    s3 = s3_client(nowhere, **CREDENTIALS)
    objects = S3ObjectStore(s3, s3, {"training-data": "b"})
    with pytest.raises(StorageUnavailable):
        jobs.get("j")
    with pytest.raises(StorageUnavailable):
        objects.head(TENANT, "training-data", "k")
