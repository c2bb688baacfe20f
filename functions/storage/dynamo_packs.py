"""Who holds which pack, in DynamoDB: items of the jobs table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from functions.domain.errors import StorageUnavailable
from functions.domain.packs import GONE_KEPT_S, Sighting
from functions.domain.records import PackRecord
from functions.storage import pack_items
from functions.storage.failures import error_code, failures_translated
from functions.storage.items import Item, number
from functions.storage.reads import get_items
from functions.storage.tables import JOBS

WRITES_IN_PARALLEL = 16


class DynamoPackStore:
    """PackStore over a low-level DynamoDB client, which must allow `WRITES_IN_PARALLEL` connections."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = JOBS.name(prefix)

    def get_many(self, tenant: str, digests: Iterable[str]) -> dict[str, PackRecord]:
        wanted = [pack_items.key(tenant, digest) for digest in dict.fromkeys(digests)]
        found = [pack_items.from_item(item) for item in get_items(self._client, self._table, wanted)]
        return {record.blake3: record for record in found}

    def hold(self, tenant: str, job_id: str, sightings: Sequence[Sighting]) -> bool:
        requests = [pack_items.hold(tenant, job_id, sighting) for sighting in sightings]
        return all(_in_parallel([partial(self._update, request, in_conflict=False) for request in requests]))

    def doubt(self, tenant: str, job_id: str, digests: Iterable[str]) -> None:
        self._update_each(
            tenant,
            digests,
            {
                "UpdateExpression": "SET doubted = :true",
                "ConditionExpression": "contains(jobs, :job)",
                "ExpressionAttributeValues": {":true": {"BOOL": True}, ":job": {"S": job_id}},
            },
        )

    def mark_gone(self, tenant: str, digests: Iterable[str], mark: str, now: int) -> None:
        self._update_each(
            tenant,
            digests,
            {
                "UpdateExpression": "SET gone = :true, #ttl = :ttl",
                "ConditionExpression": "condemned_by = :mark",
                "ExpressionAttributeNames": {"#ttl": "ttl"},
                "ExpressionAttributeValues": {
                    ":true": {"BOOL": True},
                    ":ttl": number(now + GONE_KEPT_S),
                    ":mark": {"S": mark},
                },
            },
        )

    def _update_each(self, tenant: str, digests: Iterable[str], request: Item) -> None:
        keys = [pack_items.key(tenant, digest) for digest in digests]
        _in_parallel([partial(self._update, {"Key": key, **request}) for key in keys])

    def _update(self, request: Item, *, in_conflict: bool | None = None) -> bool:
        """False if the condition was not met; `in_conflict` if a transaction was changing the item, None to raise."""
        try:
            with failures_translated():
                self._client.update_item(TableName=self._table, **request)
        except ClientError as error:
            if error_code(error) == "ConditionalCheckFailedException":
                return False
            if error_code(error) != "TransactionConflictException":
                raise
            if in_conflict is None:
                raise StorageUnavailable("a pack is being changed at this moment") from error
            return in_conflict
        return True


def _in_parallel(calls: Sequence[Callable[[], bool]]) -> list[bool]:
    """The answers of all calls; raises what one of them raised, once all have ended."""
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(min(len(calls), WRITES_IN_PARALLEL)) as pool:
        return list(pool.map(lambda call: call(), calls))
