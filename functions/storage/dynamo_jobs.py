"""Jobs, attempts, events and checkpoints in DynamoDB."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from botocore.exceptions import ClientError

from baton.contract.jobs import JobState
from baton.contract.steering import MAX_COMMANDS
from functions.domain.change import Change, NoteLease
from functions.domain.errors import FenceBroken, StorageUnavailable, WriteConflict
from functions.domain.ports import MAX_MEMBERS, Page
from functions.domain.records import (
    Attempt,
    CheckpointRecord,
    CommandRecord,
    ControlRecord,
    Event,
    Job,
    MemberRecord,
    RulesRecord,
    StandingRecord,
)
from functions.domain.scale_records import ScalingRecord
from functions.domain.stored import Record
from functions.storage import job_items, keys, lease_items
from functions.storage.documents import load
from functions.storage.failures import RETRYABLE_CODES, error_code, failures_translated
from functions.storage.items import Item, number
from functions.storage.paging import (
    PagedList,
    attempts_list,
    checkpoints_list,
    events_list,
    jobs_list,
    page,
    ready_list,
    rules_list,
)
from functions.storage.reads import get_item, get_items, query
from functions.storage.tables import HEARTBEATS, JOBS

R = TypeVar("R", bound=Record)


class DynamoJobStore:
    """JobStore over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = JOBS.name(prefix)
        self._leases_table = HEARTBEATS.name(prefix)

    def get(self, job_id: str) -> Job | None:
        item = self._item(job_id, keys.META)
        return load(Job, item["doc"]["S"]) if item else None

    def get_many(self, job_ids: Sequence[str]) -> list[Job]:
        wanted = list(dict.fromkeys(job_ids))
        items = get_items(self._client, self._table, [_key(job_id, keys.META) for job_id in wanted])
        found = {keys.job_id_of(item["pk"]["S"]): load(Job, item["doc"]["S"]) for item in items}
        return [found[job_id] for job_id in wanted if job_id in found]

    def apply(self, change: Change) -> None:
        actions: list[Item] = [job_items.put_job(change, self._table)]
        actions += [job_items.put(self._table, job_items.event(change.job, event)) for event in change.events]
        if change.attempt is not None:
            actions.append(job_items.put(self._table, job_items.attempt(change.job.id, change.attempt)))
        if change.checkpoint is not None:
            actions.append(job_items.put(self._table, job_items.checkpoint(change.job.id, change.checkpoint)))
        actions += [job_items.forget(self._table, change.job.id, one) for one in change.forgotten]
        if change.rules is not None:
            actions.append(job_items.put(self._table, job_items.rules(change.job.id, change.rules)))
        actions += [job_items.put(self._table, job_items.command(change.job.id, one)) for one in change.commands]
        actions += [job_items.drop_command(self._table, change.job.id, seq) for seq in change.dropped_commands]
        if change.control is not None:
            actions.append(job_items.put(self._table, job_items.control(change.job.id, change.control)))
        if change.standing is not None:
            actions.append(job_items.put_standing(self._table, change.job.id, change.standing))
        actions += [job_items.put_scaling(self._table, one) for one in change.scalings]
        if change.lease is not None:
            actions.append(lease_items.transact_item(change.lease, change, self._leases_table))
        self._transact(actions, leased=change.lease is not None)

    def _transact(self, actions: list[Item], *, leased: bool) -> None:
        try:
            with failures_translated():
                # The token makes the SDK's own repeat of a request whose answer was lost harmless.
                self._client.transact_write_items(TransactItems=actions, ClientRequestToken=str(uuid.uuid4()))
        except ClientError as error:
            if error_code(error) != "TransactionCanceledException":
                raise
            _raise_canceled(error, leased=leased)

    def ready(self, tenant: str, queue: str, shard: int, *, limit: int, cursor: str | None = None) -> Page[Job]:
        listed = ready_list(tenant, queue, shard)
        position = listed.position(cursor)
        partition = keys.ready_pk(tenant, queue, shard)
        start: Item | None = None
        if position is not None:
            rank, job_id = str(position[0]), str(position[1])
            start = {"ready_pk": {"S": partition}, "ready_sk": {"S": rank}, **_key(job_id, keys.META)}
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
        # No sort key of the index says it, and one that did would cost two writes a claim. The index holds nothing but
        # claimable jobs, and a job's last change is what made it claimable.
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
    ) -> Page[Job]:
        listed = jobs_list(tenant, state, newest_first=newest_first)
        position = listed.position(cursor)
        index, attribute, partition = (
            ("by_tenant", "tenant", tenant) if state is None else ("by_state", "state_pk", keys.state_pk(tenant, state))
        )
        start: Item | None = None
        if position is not None:
            created_at, job_id = int(position[0]), str(position[1])
            start = {
                attribute: {"S": partition},
                "created_sk": {"S": keys.created_sk(created_at, job_id)},
                **_key(job_id, keys.META),
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
        jobs = self.get_many([keys.job_id_of(item["pk"]["S"]) for item in places.items])
        # The index may be behind: a job that has left the state meanwhile is not in this list any more.
        return Page([job for job in jobs if state is None or job.state is state], places.cursor)

    def due_timers(self, now: int, *, limit: int) -> list[str]:
        return self._due(keys.TIMER, now, limit)

    def due_retentions(self, now: int, *, limit: int) -> list[str]:
        return self._due(keys.RETENTION, now, limit)

    def due_rules(self, now: int, *, limit: int) -> list[str]:
        return self._due(keys.RULES_DUE, now, limit)

    def _due(self, partition: str, now: int, limit: int) -> list[str]:
        items = query(
            self._client,
            self._table,
            limit,
            IndexName="timers",
            KeyConditionExpression="timer_pk = :timer AND timer_at <= :now",
            ExpressionAttributeValues={":timer": {"S": partition}, ":now": number(now)},
        )
        return [keys.job_id_of(item["pk"]["S"]) for item in items]

    def attempt(self, job_id: str, epoch: int) -> Attempt | None:
        item = self._item(job_id, keys.attempt_sk(epoch))
        return load(Attempt, item["doc"]["S"]) if item else None

    def attempts(self, job_id: str, *, limit: int, cursor: str | None = None) -> Page[Attempt]:
        listed = attempts_list(job_id)
        items = self._history(job_id, keys.attempt_sk, listed, highest=keys.MAX_EPOCH, limit=limit, cursor=cursor)
        found = [load(Attempt, item["doc"]["S"]) for item in items]
        return page(found, limit, listed, lambda attempt: (attempt.epoch,))

    def events(self, job_id: str, *, limit: int, cursor: str | None = None) -> Page[Event]:
        listed = events_list(job_id)
        items = self._history(job_id, keys.event_sk, listed, highest=keys.MAX_SEQ, limit=limit, cursor=cursor)
        found = [load(Event, item["doc"]["S"]) for item in items]
        return page(found, limit, listed, lambda event: (event.seq,))

    def checkpoint(self, job_id: str, step: int) -> CheckpointRecord | None:
        item = self._item(job_id, keys.checkpoint_sk(step))
        return job_items.checkpoint_of(item) if item else None

    def checkpoints(
        self, job_id: str, *, limit: int, cursor: str | None = None, up_to_step: int | None = None
    ) -> Page[CheckpointRecord]:
        listed = checkpoints_list(job_id, up_to_step)
        highest = keys.MAX_STEP if up_to_step is None else up_to_step
        items = self._history(
            job_id, keys.checkpoint_sk, listed, highest=highest, limit=limit, cursor=cursor, newest_first=True
        )
        return page([job_items.checkpoint_of(item) for item in items], limit, listed, lambda record: (record.step,))

    def rules(self, job_id: str, revision: int) -> RulesRecord | None:
        item = self._item(job_id, keys.rules_sk(revision))
        return load(RulesRecord, item["doc"]["S"]) if item else None

    def rules_history(self, job_id: str, *, limit: int, cursor: str | None = None) -> Page[RulesRecord]:
        listed = rules_list(job_id)
        items = self._history(
            job_id, keys.rules_sk, listed, highest=keys.MAX_REVISION, limit=limit, cursor=cursor, newest_first=True
        )
        found = [load(RulesRecord, item["doc"]["S"]) for item in items]
        return page(found, limit, listed, lambda record: (record.revision,))

    def commands(self, job_id: str, *, after: int = 0) -> list[CommandRecord]:
        items = self._between(job_id, keys.command_sk, after + 1, keys.MAX_COMMAND, limit=MAX_COMMANDS)
        return [load(CommandRecord, item["doc"]["S"]) for item in items]

    def control(self, job_id: str) -> ControlRecord | None:
        item = self._item(job_id, keys.CONTROL)
        return load(ControlRecord, item["doc"]["S"]) if item else None

    def note(self, job_id: str, control: ControlRecord, lease: NoteLease) -> None:
        put = job_items.put(self._table, job_items.control(job_id, control))
        self._transact([put, lease_items.note(lease, self._leases_table)], leased=True)

    def standing(self, job_id: str) -> StandingRecord | None:
        item = self._item(job_id, keys.STANDING)
        return load(StandingRecord, item["doc"]["S"]) if item else None

    def stand(self, job_id: str, standing: StandingRecord) -> None:
        put = job_items.put_standing(self._table, job_id, standing)["Put"]
        try:
            with failures_translated():
                self._client.put_item(**put)
        except ClientError as error:
            if error_code(error) in ("ConditionalCheckFailedException", "TransactionConflictException"):
                raise WriteConflict from error
            raise

    def members(self, tenant: str, group: str) -> dict[str, MemberRecord]:
        # Not strongly consistent, at half the price: who comes a moment too late is seen by the next look.
        items = query(
            self._client,
            self._table,
            MAX_MEMBERS,
            KeyConditionExpression="pk = :group",
            ExpressionAttributeValues={":group": {"S": keys.group_pk(tenant, group)}},
        )
        return {item["sk"]["S"]: load(MemberRecord, item["doc"]["S"]) for item in items}

    def join(self, tenant: str, group: str, job_id: str, member: MemberRecord) -> None:
        with failures_translated():
            self._client.put_item(TableName=self._table, Item=job_items.member(tenant, group, job_id, member))

    def scaling(self, tenant: str, group: str) -> ScalingRecord | None:
        item = get_item(self._client, self._table, job_items.scaling_key(tenant, group))
        return load(ScalingRecord, item["doc"]["S"]) if item else None

    def protect_checkpoint(self, job_id: str, step: int, until: int) -> CheckpointRecord | None:
        try:
            with failures_translated():
                answer = self._client.update_item(
                    TableName=self._table,
                    Key=_key(job_id, keys.checkpoint_sk(step)),
                    UpdateExpression="SET protected_until = :until",
                    ConditionExpression="protected_until < :until",
                    ExpressionAttributeValues={":until": number(until)},
                    ReturnValues="ALL_NEW",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                )
        except ClientError as error:
            _raise_unless_condition_failed(error)
            found = error.response.get("Item")
            return job_items.checkpoint_of(found) if found else None
        return job_items.checkpoint_of(answer["Attributes"])

    def _item(self, job_id: str, sk: str) -> Item | None:
        return get_item(self._client, self._table, _key(job_id, sk))

    def _history(
        self,
        job_id: str,
        sk_of: job_items.SortKey,
        listed: PagedList,
        *,
        highest: int,
        limit: int,
        cursor: str | None,
        newest_first: bool = False,
    ) -> list[Item]:
        """Items of one kind below a job, one more than `limit`, behind the cursor."""
        position = listed.position(cursor)
        lowest = 0
        if position is not None:
            # The range itself begins behind the cursor, so that no cursor can lie outside of it.
            number_before = int(position[0])
            lowest, highest = (0, min(number_before - 1, highest)) if newest_first else (number_before + 1, highest)
        if lowest > highest:
            return []
        return self._between(job_id, sk_of, lowest, highest, limit=limit + 1, newest_first=newest_first)

    def _between(
        self,
        job_id: str,
        sk_of: job_items.SortKey,
        lowest: int,
        highest: int,
        *,
        limit: int,
        newest_first: bool = False,
    ) -> list[Item]:
        return query(
            self._client,
            self._table,
            limit,
            ConsistentRead=True,
            ScanIndexForward=not newest_first,
            KeyConditionExpression="pk = :pk AND sk BETWEEN :lowest AND :highest",
            ExpressionAttributeValues={
                ":pk": {"S": keys.job_pk(job_id)},
                ":lowest": {"S": sk_of(lowest)},
                ":highest": {"S": sk_of(highest)},
            },
        )


def _key(job_id: str, sk: str) -> Item:
    return {"pk": {"S": keys.job_pk(job_id)}, "sk": {"S": sk}}


def _created(item: Item) -> tuple[int, str]:
    created_at, _, job_id = item["created_sk"]["S"].partition("#")
    return int(created_at), job_id


def _raise_unless_condition_failed(error: ClientError) -> None:
    if error_code(error) == "TransactionConflictException":
        raise StorageUnavailable("the checkpoint is being changed at this moment") from error
    if error_code(error) != "ConditionalCheckFailedException":
        raise error


def _raise_canceled(error: ClientError, *, leased: bool) -> NoReturn:
    """Say why a transaction was canceled: the job's item comes first, the lease last, records in between."""
    reasons = error.response.get("CancellationReasons") or []
    codes = [str(reason.get("Code", "None")) for reason in reasons]
    if "TransactionConflict" in codes or (codes and codes[0] == "ConditionalCheckFailed"):
        raise WriteConflict from error
    if leased and codes and codes[-1] == "ConditionalCheckFailed":
        found = reasons[-1].get("Item")
        raise FenceBroken(lease_items.from_item(found) if found else None) from error
    if "ConditionalCheckFailed" in codes:
        raise WriteConflict from error
    passing = RETRYABLE_CODES.intersection(codes)
    if passing:
        raise StorageUnavailable(f"TransactWriteItems: {', '.join(sorted(passing))}") from error
    raise error
