"""Store leases in DynamoDB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from botocore.exceptions import ClientError

from baton.contract.jobs.job import Progress
from functions.domain import table_keys
from functions.domain.errors import FenceBroken, StorageUnavailable
from functions.domain.jobs.lease_expiry import ReclaimWatermark
from functions.domain.jobs.lease_fence import REPROOF_WINDOW_S, Fence
from functions.domain.records import Lease
from functions.storage.dynamodb.items.attribute_values import Item, number
from functions.storage.dynamodb.items.lease_conditions import fence_condition, from_item
from functions.storage.dynamodb.reads import get_item, get_items, query
from functions.storage.failures import error_code, failures_translated
from functions.storage.tables import HEARTBEATS

MAX_COLLISIONS = 5
"""Tries of a heartbeat that collides with transactions on its row; then the worker receives `unavailable`."""


class DynamoLeaseStore:
    """LeaseStore over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = HEARTBEATS.name(prefix)

    def heartbeat(self, fence: Fence, progress: Progress | None, phase: str | None) -> Lease:
        condition, values = fence_condition(fence, reproof_window_s=REPROOF_WINDOW_S)
        values |= {":now": number(fence.now), ":bucket": number(table_keys.due_bucket(fence.job_id, fence.now))}
        sets = ["expires_at = :now + duration_s", "due_at = :bucket + duration_s"]
        if progress is not None:
            sets.append("progress = :progress")
            values[":progress"] = {"S": progress.model_dump_json(exclude_none=True, exclude_defaults=True)}
        if phase is not None:
            sets.append("phase = :phase")
            values[":phase"] = {"S": phase}
        request = {
            "TableName": self._table,
            "Key": {"pk": {"S": fence.job_id}},
            "UpdateExpression": "SET " + ", ".join(sets),
            "ConditionExpression": condition,
            "ExpressionAttributeValues": values,
            "ReturnValues": "ALL_NEW",
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }
        for _ in range(MAX_COLLISIONS):
            try:
                with failures_translated():
                    return from_item(self._client.update_item(**request)["Attributes"])
            except ClientError as error:
                if error_code(error) == "ConditionalCheckFailedException":
                    found = error.response.get("Item")
                    raise FenceBroken(from_item(found) if found else None) from error
                if error_code(error) != "TransactionConflictException":
                    raise
        raise StorageUnavailable(f"the lease of job {fence.job_id} is being changed all the time")

    def get(self, job_id: str) -> Lease | None:
        item = self._item(job_id)
        return from_item(item) if item else None

    def get_many(self, job_ids: Sequence[str], *, consistent: bool = False) -> dict[str, Lease]:
        wanted = [{"pk": {"S": job_id}} for job_id in dict.fromkeys(job_ids)]
        leases = [from_item(item) for item in get_items(self._client, self._table, wanted, consistent=consistent)]
        return {lease.job_id: lease for lease in leases}

    def due_pages(self, now: int, *, size: int) -> Iterator[list[str]]:
        last: Item | None = None
        while True:
            items = query(
                self._client,
                self._table,
                size,
                last,
                IndexName="due",
                KeyConditionExpression="due_pk = :due AND due_at <= :now",
                ExpressionAttributeValues={":due": {"S": table_keys.DUE}, ":now": number(now)},
            )
            if items:
                yield [item["pk"]["S"] for item in items]
            if len(items) < size:
                return
            # The index projects keys only, therefore its last item is the start key of the next page.
            last = items[-1]

    def reclaim_watermark(self) -> ReclaimWatermark | None:
        item = self._item(table_keys.WATCH)
        return ReclaimWatermark(seen_at=int(item["seen_at"]["N"]), since=int(item["since"]["N"])) if item else None

    def save_reclaim_watermark(self, watch: ReclaimWatermark, *, seen: ReclaimWatermark | None) -> bool:
        request: dict[str, Any] = {"ConditionExpression": "attribute_not_exists(pk)"}
        if seen is not None:
            request = {
                "ConditionExpression": "seen_at = :seen_at AND since = :since",
                "ExpressionAttributeValues": {":seen_at": number(seen.seen_at), ":since": number(seen.since)},
            }
        try:
            with failures_translated():
                self._client.put_item(
                    TableName=self._table,
                    Item={
                        "pk": {"S": table_keys.WATCH},
                        "seen_at": number(watch.seen_at),
                        "since": number(watch.since),
                    },
                    **request,
                )
        except ClientError as error:
            if error_code(error) in ("ConditionalCheckFailedException", "TransactionConflictException"):
                return False
            raise
        return True

    def _item(self, pk: str) -> Item | None:
        return get_item(self._client, self._table, {"pk": {"S": pk}})
