"""Jobs and their history as DynamoDB items: what conditions and indexes need at top level, the rest in `doc`."""

from __future__ import annotations

from collections.abc import Callable

from functions.domain.change import Change, Forget
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
from functions.storage import keys
from functions.storage.documents import dump, load
from functions.storage.items import Item, number

SortKey = Callable[[int], str]

_BESIDE = frozenset(("protected_until",))
"""Of a checkpoint: changed by itself, so not part of the document."""


def job(record: Job) -> Item:
    """META: in the index `ready` only while claimable, in `timers` only while something is due at some time."""
    item: Item = {
        "pk": {"S": keys.job_pk(record.id)},
        "sk": {"S": keys.META},
        "rev": number(record.rev),
        "tenant": {"S": record.tenant},
        "state_pk": {"S": keys.state_pk(record.tenant, record.state)},
        "created_sk": {"S": keys.created_sk(record.created_at, record.id)},
        "doc": {"S": dump(record)},
    }
    if record.claimable:
        item["ready_pk"] = {"S": keys.ready_pk(record.tenant, record.queue, record.shard)}
        item["ready_sk"] = {"S": record.ready_rank}
    if record.timer_at is not None:
        item["timer_pk"] = {"S": keys.TIMER}
        item["timer_at"] = number(record.timer_at)
    elif record.retention_at is not None:
        item["timer_pk"] = {"S": keys.RETENTION}
        item["timer_at"] = number(record.retention_at)
    return item


def put_job(change: Change, table: str) -> Item:
    """The write of META: only if nobody wrote since the job was read; a new job only if there is none."""
    action = put(table, job(change.job))
    if change.seen_rev is None:
        action["Put"]["ConditionExpression"] = "attribute_not_exists(pk)"
    else:
        action["Put"]["ConditionExpression"] = "rev = :seen"
        action["Put"]["ExpressionAttributeValues"] = {":seen": number(change.seen_rev)}
    return action


def put(table: str, item: Item) -> Item:
    """A Put as an action of a transaction."""
    return {"Put": {"TableName": table, "Item": item}}


def attempt(job_id: str, record: Attempt) -> Item:
    """ATTEMPT#epoch."""
    return _item(job_id, keys.attempt_sk(record.epoch), dump(record))


def event(job: Job, record: Event) -> Item:
    """EVENT#seq. What is beside the document is for whoever reads the table's stream; no index has the item."""
    item = _item(job.id, keys.event_sk(record.seq), dump(record)) | {"tenant": {"S": job.tenant}}
    return item | {"webhook": {"S": job.spec.webhook}} if job.spec.webhook else item


def checkpoint(job_id: str, record: CheckpointRecord) -> Item:
    """CHECKPOINT#step, with what its deletion depends on at top level."""
    return _item(job_id, keys.checkpoint_sk(record.step), dump(record, without=_BESIDE)) | {
        "epoch": number(record.epoch),
        "committed_at": number(record.committed_at),
        "damaged": {"BOOL": record.damaged},
        "pinned": {"BOOL": record.pinned},
        "protected_until": number(record.protected_until),
    }


def rules(job_id: str, record: RulesRecord) -> Item:
    """RULES#revision."""
    return _item(job_id, keys.rules_sk(record.revision), dump(record))


def command(job_id: str, record: CommandRecord) -> Item:
    """COMMAND#seq."""
    return _item(job_id, keys.command_sk(record.seq), dump(record))


def control(job_id: str, record: ControlRecord) -> Item:
    """CONTROL."""
    return _item(job_id, keys.CONTROL, dump(record))


def standing(job_id: str, record: StandingRecord) -> Item:
    """STANDING: in the index `timers` while somebody is to look at it."""
    item = _item(job_id, keys.STANDING, dump(record)) | {"version": number(record.version)}
    if record.next_at is not None:
        item |= {"timer_pk": {"S": keys.RULES_DUE}, "timer_at": number(record.next_at)}
    return item


def member(tenant: str, group: str, job_id: str, record: MemberRecord) -> Item:
    """GROUP#tenant#group: a job of it, taken away by the broom some time after its end."""
    return {
        "pk": {"S": keys.group_pk(tenant, group)},
        "sk": {"S": job_id},
        "doc": {"S": dump(record)},
        "ttl": number(record.expires_at),
    }


def put_standing(table: str, job_id: str, record: StandingRecord) -> Item:
    """Its write as an action of a transaction: only in place of the version before."""
    return _next_version(put(table, standing(job_id, record)), record.version)


def scaling_key(tenant: str, group: str) -> Item:
    """Where it is stored what rules have decided on a group."""
    return {"pk": {"S": keys.scaling_pk(tenant, group)}, "sk": {"S": keys.SCALING}}


def put_scaling(table: str, record: ScalingRecord) -> Item:
    """Its write as an action of a transaction: only in place of the version before."""
    item = scaling_key(record.tenant, record.group) | {
        "doc": {"S": dump(record)},
        "version": number(record.version),
        "ttl": number(record.expires_at),
    }
    return _next_version(put(table, item), record.version)


def _next_version(action: Item, version: int) -> Item:
    if version == 1:
        action["Put"]["ConditionExpression"] = "attribute_not_exists(pk)"
    else:
        action["Put"]["ConditionExpression"] = "version = :seen"
        action["Put"]["ExpressionAttributeValues"] = {":seen": number(version - 1)}
    return action


def drop_command(table: str, job_id: str, seq: int) -> Item:
    """The deletion of a command as an action of a transaction."""
    key = {"pk": {"S": keys.job_pk(job_id)}, "sk": {"S": keys.command_sk(seq)}}
    return {"Delete": {"TableName": table, "Key": key}}


def forget(table: str, job_id: str, one: Forget) -> Item:
    """The deletion of a record as an action of a transaction: of this one, and only while nobody reads it."""
    record = one.record
    return {
        "Delete": {
            "TableName": table,
            "Key": {"pk": {"S": keys.job_pk(job_id)}, "sk": {"S": keys.checkpoint_sk(record.step)}},
            "ConditionExpression": (
                "attribute_not_exists(pk) OR (epoch = :epoch AND committed_at = :committed_at"
                " AND damaged = :damaged AND pinned = :pinned AND protected_until <= :now)"
            ),
            "ExpressionAttributeValues": {
                ":epoch": number(record.epoch),
                ":committed_at": number(record.committed_at),
                ":damaged": {"BOOL": record.damaged},
                ":pinned": {"BOOL": record.pinned},
                ":now": number(one.now),
            },
        }
    }


def checkpoint_of(item: Item) -> CheckpointRecord:
    """The inverse of `checkpoint`."""
    record = load(CheckpointRecord, item["doc"]["S"])
    return record.model_copy(update={"protected_until": int(item["protected_until"]["N"])})


def _item(job_id: str, sk: str, document: str) -> Item:
    return {"pk": {"S": keys.job_pk(job_id)}, "sk": {"S": sk}, "doc": {"S": document}}
