"""Store the references of jobs to packs in DynamoDB, as items of the jobs table."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from functions.domain.checkpoints.packs import PackSnapshot, PackWrite
from functions.domain.records import PackRecord
from functions.storage.dynamodb.items import pack_items
from functions.storage.dynamodb.items.attribute_values import Item
from functions.storage.dynamodb.reads import get_items
from functions.storage.failures import error_code, failures_translated
from functions.storage.tables import JOBS

WRITES_IN_PARALLEL = 16


class DynamoPackStore:
    """PackStore over a low-level DynamoDB client, which must allow `WRITES_IN_PARALLEL` connections."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = JOBS.name(prefix)

    def get_many(self, tenant: str, digests: Iterable[str], *, consistent: bool = True) -> dict[str, PackRecord]:
        wanted = [pack_items.key(tenant, digest) for digest in dict.fromkeys(digests)]
        items = get_items(self._client, self._table, wanted, consistent=consistent)
        found = [pack_items.from_item(item) for item in items]
        return {record.blake3: record for record in found}

    def add_references(self, tenant: str, job_id: str, sightings: Sequence[PackSnapshot]) -> bool:
        return all(self._updated([pack_items.hold(tenant, job_id, one, _version()) for one in sightings]))

    def remove_references(self, tenant: str, job_id: str, writes: Sequence[PackWrite]) -> set[str]:
        done = self._updated([pack_items.remove_reference(tenant, job_id, write, _version()) for write in writes])
        return {write.pack.blake3 for write, well in zip(writes, done, strict=True) if not well}

    def mark_suspect(self, tenant: str, job_id: str, digests: Iterable[str]) -> None:
        request: Item = {
            "UpdateExpression": "SET doubted = :true",
            "ConditionExpression": "contains(jobs, :job)",
            "ExpressionAttributeValues": {":true": {"BOOL": True}, ":job": {"S": job_id}},
        }
        self._updated([{"Key": pack_items.key(tenant, digest), **request} for digest in digests])

    def _updated(self, requests: Sequence[Item]) -> list[bool]:
        return _in_parallel([partial(self._update, request) for request in requests])

    def _update(self, request: Item) -> bool:
        """Send one UpdateItem; return False if its condition failed."""
        try:
            with failures_translated():
                self._client.update_item(TableName=self._table, **request)
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            return False
        return True


def _version() -> str:
    """Return a new, unique version."""
    return secrets.token_urlsafe(12)


def _in_parallel(calls: Sequence[Callable[[], bool]]) -> list[bool]:
    """Run all calls and return their answers; after the end of all calls raise the first error."""
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(min(len(calls), WRITES_IN_PARALLEL)) as pool:
        return list(pool.map(lambda call: call(), calls))
