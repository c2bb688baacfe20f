"""Store jobs, their records, and groups in DynamoDB."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from botocore.exceptions import ClientError

from baton.contract.jobs.job import JobState
from baton.contract.worker.control import MAX_COMMANDS
from functions.domain import table_keys
from functions.domain.errors import FenceBroken, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Delete, Put, PutFleet, Transaction, Write
from functions.domain.ports import MAX_MEMBERS, ResultPage
from functions.domain.record_base import TableRecord
from functions.domain.records import CheckpointRecord, CommandRecord, Job, MemberRecord, ScalingRecord, scaling_owner
from functions.storage.dynamodb.items import job_items, lease_conditions
from functions.storage.dynamodb.items.attribute_values import Item, number
from functions.storage.dynamodb.items.documents import load
from functions.storage.dynamodb.reads import get_item, get_items, query
from functions.storage.failures import RETRYABLE_CODES, error_code, failures_translated
from functions.storage.paging import history_list, jobs_list, page, ready_list
from functions.storage.tables import FLEET, HEARTBEATS, JOBS

R = TypeVar("R", bound=TableRecord)
CONDITION_FAILED = "ConditionalCheckFailed"
LATEST = 10**11
"""Instant after all instants of stored jobs."""


class DynamoJobStore:
    """JobStore over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = JOBS.name(prefix)
        self._leases_table = HEARTBEATS.name(prefix)
        self._fleet_table = FLEET.name(prefix)

    def get(self, job_id: str) -> Job | None:
        return self.read(Job, job_id)

    def get_many(self, job_ids: Sequence[str]) -> list[Job]:
        return self._read_jobs(job_ids, consistent=True)

    def _read_jobs(self, job_ids: Sequence[str], *, consistent: bool) -> list[Job]:
        wanted = list(dict.fromkeys(job_ids))
        keys = [job_items.key_item(Job.key(job_id)) for job_id in wanted]
        items = get_items(self._client, self._table, keys, consistent=consistent)
        found = {table_keys.job_id_of(item["pk"]["S"]): load(Job, item["doc"]["S"]) for item in items}
        return [found[job_id] for job_id in wanted if job_id in found]

    def apply(self, transaction: Transaction) -> None:
        actions = [self._action(write) for write in transaction.writes]
        try:
            with failures_translated():
                # The SDK repeats a request whose answer was lost; the token makes the repetition idempotent.
                self._client.transact_write_items(TransactItems=actions, ClientRequestToken=str(uuid.uuid4()))
        except ClientError as error:
            if error_code(error) != "TransactionCanceledException":
                raise
            _raise_canceled(error, transaction.writes)

    def _action(self, write: Write) -> Item:
        match write:
            case Put():
                return {"Put": job_items.put(write, self._table)}
            case Delete():
                return {"Delete": job_items.delete(write, self._table)}
            case PutFleet():
                return {"Put": job_items.put_fleet(write, self._fleet_table)}
            case _:
                return lease_conditions.action(write, self._leases_table)

    def ready(self, tenant: str, queue: str, shard: int, *, limit: int, cursor: str | None = None) -> ResultPage[Job]:
        listed = ready_list(tenant, queue, shard)
        position = listed.position(cursor)
        partition = table_keys.ready_pk(tenant, queue, shard)
        start: Item | None = None
        if position is not None:
            rank, job_id = str(position[0]), str(position[1])
            start = {"ready_pk": {"S": partition}, "ready_sk": {"S": rank}, **job_items.key_item(Job.key(job_id))}
        items = query(
            self._client,
            self._table,
            limit + 1,
            start,
            IndexName="ready",
            ProjectionExpression="doc",
            KeyConditionExpression="ready_pk = :partition",
            ExpressionAttributeValues={":partition": {"S": partition}},
        )
        jobs = [load(Job, item["doc"]["S"]) for item in items]
        return page(jobs, limit, listed, lambda job: (job.ready_rank, job.id))

    def longest_waiting(self, *, limit: int) -> int | None:
        # A sort key with the instant would cost two more writes per claim, therefore `ready` is scanned for one page.
        # The index contains claimable jobs only, and the last change of such a job made the job claimable.
        with failures_translated():
            answer = self._client.scan(
                TableName=self._table, IndexName="ready", Limit=limit, ProjectionExpression="doc"
            )
        return min((int(json.loads(item["doc"]["S"])["updated_at"]) for item in answer["Items"]), default=None)

    def list_jobs(
        self,
        tenant: str,
        *,
        state: JobState | None,
        limit: int,
        cursor: str | None = None,
        newest_first: bool = False,
        consistent: bool = True,
    ) -> ResultPage[Job]:
        listed = jobs_list(tenant, state, newest_first=newest_first)
        position = listed.position(cursor)
        index, attribute, partition = (
            ("by_tenant", "tenant", tenant)
            if state is None
            else ("by_state", "state_pk", table_keys.state_pk(tenant, state))
        )
        start: Item | None = None
        if position is not None:
            created_at, job_id = int(position[0]), str(position[1])
            start = {
                attribute: {"S": partition},
                "created_sk": {"S": table_keys.created_sk(created_at, job_id)},
                **job_items.key_item(Job.key(job_id)),
            }
        items = query(
            self._client,
            self._table,
            limit + 1,
            start,
            IndexName=index,
            ScanIndexForward=not newest_first,
            KeyConditionExpression=f"{attribute} = :partition",
            ExpressionAttributeValues={":partition": {"S": partition}},
        )
        places = page(items, limit, listed, _created)
        jobs = self._read_jobs([table_keys.job_id_of(item["pk"]["S"]) for item in places.items], consistent=consistent)
        # The index may lag, therefore jobs that have left the state are dropped here.
        return ResultPage([job for job in jobs if state is None or job.state is state], places.cursor)

    def count_jobs(self, tenant: str, state: JobState, *, up_to: int) -> int:
        with failures_translated():
            answer = self._client.query(
                TableName=self._table,
                IndexName="by_state",
                Select="COUNT",
                Limit=up_to,
                KeyConditionExpression="state_pk = :partition",
                ExpressionAttributeValues={":partition": {"S": table_keys.state_pk(tenant, state)}},
            )
        count: int = answer["Count"]
        return count

    def due_timers(self, now: int, *, limit: int) -> list[str]:
        return self._due(table_keys.TIMER, now, limit)

    def due_retentions(self, now: int, *, limit: int) -> list[str]:
        return self._due(table_keys.RETENTION, now, limit)

    def unsettled(self, *, limit: int) -> list[str]:
        return self._due(table_keys.SEATS, LATEST, limit)

    def due_rules(self, now: int, *, limit: int) -> list[str]:
        return self._due(table_keys.RULES_DUE, now, limit)

    def _due(self, partition: str, now: int, limit: int) -> list[str]:
        items = query(
            self._client,
            self._table,
            limit,
            IndexName="timers",
            KeyConditionExpression="timer_pk = :timer AND timer_at <= :now",
            ExpressionAttributeValues={":timer": {"S": partition}, ":now": number(now)},
        )
        return [table_keys.job_id_of(item["pk"]["S"]) for item in items]

    def read(self, kind: type[R], job_id: str, number: int = 0) -> R | None:
        return self._read(kind, kind.key(job_id, number))

    def history(
        self, kind: type[R], job_id: str, *, limit: int, cursor: str | None = None, up_to: int | None = None
    ) -> ResultPage[R]:
        listed = history_list(kind, job_id, up_to)
        position = listed.position(cursor)
        lowest, highest = 0, 10**kind.DIGITS - 1 if up_to is None else up_to
        if position is not None:
            # The range begins after the cursor, because DynamoDB refuses a start key outside the range.
            before = int(position[0])
            lowest, highest = (0, min(before - 1, highest)) if kind.NEWEST_FIRST else (before + 1, highest)
        found = [] if lowest > highest else self._between(kind, job_id, lowest, highest, limit=limit + 1)
        return page(found, limit, listed, lambda record: (getattr(record, str(kind.NUMBER)),))

    def commands(self, job_id: str, *, after: int = 0) -> list[CommandRecord]:
        return self._between(CommandRecord, job_id, after + 1, 10**CommandRecord.DIGITS - 1, limit=MAX_COMMANDS)

    def scaling(self, tenant: str, group: str) -> ScalingRecord | None:
        return self._read(ScalingRecord, ScalingRecord.key(scaling_owner(tenant, group)))

    def put(self, write: Put) -> None:
        try:
            with failures_translated():
                self._client.put_item(**job_items.put(write, self._table))
        except ClientError as error:
            if error_code(error) in ("ConditionalCheckFailedException", "TransactionConflictException"):
                raise WriteConflict from error
            raise

    def members(self, tenant: str, group: str) -> dict[str, MemberRecord]:
        # An eventually consistent read costs half; the next evaluation reads a member that this read misses.
        items = query(
            self._client,
            self._table,
            MAX_MEMBERS,
            KeyConditionExpression="pk = :group",
            ExpressionAttributeValues={":group": {"S": table_keys.group_pk(tenant, group)}},
        )
        return {item["sk"]["S"]: load(MemberRecord, item["doc"]["S"]) for item in items}

    def join(self, tenant: str, group: str, job_id: str, member: MemberRecord) -> None:
        with failures_translated():
            self._client.put_item(TableName=self._table, Item=job_items.member(tenant, group, job_id, member))

    def protect_checkpoint(self, job_id: str, step: int, until: int) -> CheckpointRecord | None:
        try:
            with failures_translated():
                answer = self._client.update_item(
                    TableName=self._table,
                    Key=job_items.key_item(CheckpointRecord.key(job_id, step)),
                    UpdateExpression="SET protected_until = :until",
                    ConditionExpression="protected_until < :until",
                    ExpressionAttributeValues={":until": number(until)},
                    ReturnValues="ALL_NEW",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                )
        except ClientError as error:
            _raise_unless_condition_failed(error)
            found = error.response.get("Item")
            return job_items.record_of(CheckpointRecord, found) if found else None
        return job_items.record_of(CheckpointRecord, answer["Attributes"])

    def _read(self, kind: type[R], key: table_keys.Key) -> R | None:
        item = get_item(self._client, self._table, job_items.key_item(key))
        return job_items.record_of(kind, item) if item else None

    def _between(self, kind: type[R], job_id: str, lowest: int, highest: int, *, limit: int) -> list[R]:
        first, last = kind.key(job_id, lowest), kind.key(job_id, highest)
        items = query(
            self._client,
            self._table,
            limit,
            ConsistentRead=True,
            ScanIndexForward=not kind.NEWEST_FIRST,
            KeyConditionExpression="pk = :pk AND sk BETWEEN :lowest AND :highest",
            ExpressionAttributeValues={
                ":pk": {"S": first.partition},
                ":lowest": {"S": first.sort},
                ":highest": {"S": last.sort},
            },
        )
        return [job_items.record_of(kind, item) for item in items]


def _created(item: Item) -> tuple[int, str]:
    created_at, _, job_id = item["created_sk"]["S"].partition("#")
    return int(created_at), job_id


def _raise_unless_condition_failed(error: ClientError) -> None:
    if error_code(error) == "TransactionConflictException":
        raise StorageUnavailable("the checkpoint is being changed at this moment") from error
    if error_code(error) != "ConditionalCheckFailedException":
        raise error


def _raise_canceled(error: ClientError, writes: Sequence[Write]) -> NoReturn:
    """Raise the error of a canceled transaction: first a conflict on the job, then the lease, then other records."""
    reasons = error.response.get("CancellationReasons") or []
    codes = [str(reason.get("Code", "None")) for reason in reasons]
    if "TransactionConflict" in codes:
        raise WriteConflict from error
    paired = zip(writes, reasons, strict=bool(reasons))
    failed = [(write, reason) for write, reason in paired if reason.get("Code") == CONDITION_FAILED]
    if any(isinstance(write, Put) and isinstance(write.record, Job) for write, _ in failed):
        raise WriteConflict from error
    for write, reason in failed:
        if not isinstance(write, Put | Delete | PutFleet):
            found = reason.get("Item")
            raise FenceBroken(lease_conditions.from_item(found) if found else None) from error
    if failed:
        raise WriteConflict from error
    passing = RETRYABLE_CODES.intersection(codes)
    if passing:
        raise StorageUnavailable(f"TransactWriteItems: {', '.join(sorted(passing))}") from error
    raise error
