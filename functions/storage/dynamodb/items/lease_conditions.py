"""Convert leases to DynamoDB items and back, and fences and guards to conditions.

An absent attribute means None; an absent `closed` means a live attempt.
"""

from __future__ import annotations

from baton.contract.jobs.job import Progress
from baton.contract.worker.control import Directive
from functions.domain import table_keys
from functions.domain.jobs.lease_fence import LEASE_RETENTION_S, REPROOF_WINDOW_S, REVOKED, Fence
from functions.domain.jobs.transaction import CloseLease, LeaseGuard, LeaseWrite, OpenLease, ReopenLease
from functions.domain.records import Claimant, Lease
from functions.storage.dynamodb.items.attribute_values import Item, attribute, number

_TEXTS = ("token_sha256", "ring_token_sha256", "machine_id", "phase")
_COUNTS = ("rules_revision", "commands_seq", "rules_in_force", "rules_rejected")
"""Number attributes that a row omits while they are 0."""


def to_item(lease: Lease) -> Item:
    """Return the row of a new lease. `due_pk` and `due_at` add the row to the index `due` of open leases."""
    opened_at = lease.expires_at - lease.duration_s
    item: Item = {
        "pk": {"S": lease.job_id},
        "tenant": {"S": lease.tenant},
        "epoch": number(lease.epoch),
        "expires_at": number(lease.expires_at),
        "duration_s": number(lease.duration_s),
        "heartbeat_interval_s": number(lease.heartbeat_interval_s),
        "directive": {"S": lease.directive.value},
        "directive_reason": {"S": lease.directive_reason},
        "due_pk": {"S": table_keys.DUE},
        "due_at": number(table_keys.due_bucket(lease.job_id, opened_at) + lease.duration_s),
    }
    for name in _TEXTS:
        if (value := getattr(lease, name)) is not None:
            item[name] = {"S": value}
    if lease.claimant is not None:
        item["claimant_key"] = {"S": lease.claimant.key_id}
        item["claimant_address"] = {"S": lease.claimant.source_address}
        item["progress_by"] = number(lease.claimant.progress_by)
    if lease.rings:
        item["rings"] = {"S": ",".join(lease.rings)}
    if lease.watched:
        item["watched"] = {"BOOL": True}
    for name in _COUNTS:
        if value := getattr(lease, name):
            item[name] = number(value)
    if lease.stop_at is not None:
        item["stop_at"] = number(lease.stop_at)
    if lease.progress is not None:
        item["progress"] = {"S": lease.progress.model_dump_json(exclude_none=True, exclude_defaults=True)}
    return item


def from_item(item: Item) -> Lease:
    """Decode the lease in a row."""
    progress = _text(item, "progress")
    return Lease.model_validate(
        {
            "job_id": item["pk"]["S"],
            "tenant": item["tenant"]["S"],
            "epoch": int(item["epoch"]["N"]),
            "token_sha256": _text(item, "token_sha256"),
            "ring_token_sha256": _text(item, "ring_token_sha256"),
            "rings": _rings_of(item),
            "machine_id": _text(item, "machine_id"),
            "claimant": _claimant_of(item),
            "expires_at": int(item["expires_at"]["N"]),
            "duration_s": int(item["duration_s"]["N"]),
            "heartbeat_interval_s": int(item["heartbeat_interval_s"]["N"]),
            "stop_at": int(item["stop_at"]["N"]) if "stop_at" in item else None,
            "directive": Directive(_text(item, "directive") or Directive.CONTINUE),
            "directive_reason": _text(item, "directive_reason") or "",
            "progress": Progress.model_validate_json(progress) if progress else None,
            "phase": _text(item, "phase"),
            "closed": _text(item, "closed") or "",
            "watched": item.get("watched", {}).get("BOOL", False),
            **{name: int(item[name]["N"]) for name in _COUNTS if name in item},
        }
    )


def fence_condition(fence: Fence, *, reproof_window_s: int = 0) -> tuple[str, Item]:
    """Return `Fence.admits` as a condition expression and its values. The condition is false without a row."""
    values: Item = {
        ":tenant": {"S": fence.tenant},
        ":proved_after": number(fence.now - reproof_window_s),
    }
    terms = ["tenant = :tenant", "attribute_not_exists(closed)", "expires_at > :proved_after"]
    if fence.epoch is not None:
        terms.append("epoch = :epoch")
        values[":epoch"] = number(fence.epoch)
    if fence.token_sha256 is not None:
        terms.append("token_sha256 = :token")
        values[":token"] = {"S": fence.token_sha256}
    else:
        terms.append("attribute_not_exists(token_sha256)")
        terms.append(_original_condition(fence, values))
    return " AND ".join(terms), values


def _original_condition(fence: Fence, values: Item) -> str:
    """Return the terms of `Fence.admits` for a client without a lease token; adds their values to `values`."""
    ways = []
    if fence.machine_id is not None:
        ways.append("machine_id = :machine")
        values[":machine"] = {"S": fence.machine_id}
    if None not in (fence.key_id, fence.source_address) and (fence.heartbeat or fence.epoch is not None):
        claimed = "claimant_key = :claimant_key AND claimant_address = :claimant_address"
        if fence.machine_id is not None or not fence.heartbeat:
            claimed = f"attribute_not_exists(machine_id) AND {claimed}"
        ways.append(claimed)
        values[":claimant_key"] = {"S": fence.key_id}
        values[":claimant_address"] = {"S": fence.source_address}
    # A condition that no row satisfies: every row has its key.
    condition = " OR ".join(ways) or "attribute_not_exists(pk)"
    if len(ways) > 1:
        # AND binds tighter than OR. DynamoDB refuses redundant parentheses.
        condition = f"({condition})"
    if fence.heartbeat:
        condition += " AND (attribute_not_exists(progress_by) OR progress_by > :beat_at)"
        values[":beat_at"] = number(fence.now)
    return condition


def guard_condition(guard: LeaseGuard) -> tuple[str, Item]:
    """Return `LeaseGuard.admits` as a condition expression and its values."""
    terms: list[str] = []
    values: Item = {}
    if guard.epoch is not None:
        terms.append("epoch = :of")
        values[":of"] = number(guard.epoch)
    if guard.fence is not None:
        condition, more = _recovery_condition(guard.fence) if guard.recovers else fence_condition(guard.fence)
        terms.append(condition)
        values |= more
    if guard.live:
        terms.append("attribute_not_exists(closed)")
    if guard.expired_at is not None:
        terms.append("expires_at <= :expired_at")
        values[":expired_at"] = number(guard.expired_at)
    condition = " AND ".join(terms)
    return f"attribute_not_exists(pk) OR {condition}" if guard.or_absent else condition, values


def _recovery_condition(fence: Fence) -> tuple[str, Item]:
    """Return `Fence.recovers` as a condition expression and its values."""
    terms = ["tenant = :tenant", "closed = :revoked", "expires_at > :proved_after"]
    values: Item = {
        ":tenant": {"S": fence.tenant},
        ":revoked": {"S": REVOKED},
        ":proved_after": number(fence.now - REPROOF_WINDOW_S),
    }
    if fence.epoch is not None:
        terms.append("epoch = :epoch")
        values[":epoch"] = number(fence.epoch)
    if fence.token_sha256 is not None:
        terms.append("token_sha256 = :token")
        values[":token"] = {"S": fence.token_sha256}
    else:
        terms += [
            "attribute_not_exists(token_sha256)",
            "machine_id = :machine",
            "(attribute_not_exists(progress_by) OR progress_by > :now)",
        ]
        values |= {":machine": {"S": fence.machine_id or ""}, ":now": number(fence.now)}
    return " AND ".join(terms), values


def action(write: LeaseWrite, table: str) -> Item:
    """Return a lease write as an action of a transaction. A failed condition returns the stored row."""
    if isinstance(write, OpenLease):
        return {
            "Put": {
                "TableName": table,
                "Item": to_item(write.lease),
                "ConditionExpression": "attribute_not_exists(pk) OR epoch < :epoch",
                "ExpressionAttributeValues": {":epoch": number(write.lease.epoch)},
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            }
        }
    condition, values = guard_condition(write.guard)
    request: Item = {
        "TableName": table,
        "Key": {"pk": {"S": write.job_id}},
        "ConditionExpression": condition,
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }
    sets = [f"{name} = :{name}" for name in write.values if name != "closed"]
    values |= {f":{name}": attribute(value) for name, value in write.values.items() if name != "closed"}
    removes: list[str] = []
    match write:
        case CloseLease():
            sets += ["closed = :closed", "#ttl = :ttl"]
            removes = ["due_pk", "due_at"]
            values |= {":closed": {"S": write.closed}, ":ttl": number(write.now + LEASE_RETENTION_S)}
            if write.guard.or_absent:
                # The write succeeds without a row, therefore it sets every attribute that `from_item` requires.
                sets += ["epoch = :of", "tenant = if_not_exists(tenant, :owner)"]
                sets += [f"{name} = if_not_exists({name}, :zero)" for name in ("duration_s", "heartbeat_interval_s")]
                sets.append("expires_at = if_not_exists(expires_at, :now)")
                values |= {":owner": {"S": write.tenant}, ":now": number(write.now), ":zero": number(0)}
        case ReopenLease(fence=fence):
            sets += ["due_pk = :due", "due_at = :due_at"]
            removes = ["closed", "#ttl"]
            due_at = table_keys.due_bucket(write.job_id, fence.now) + write.duration_s
            values |= {":due": {"S": table_keys.DUE}, ":due_at": number(due_at)}
    request["ExpressionAttributeValues"] = values
    if not sets:
        return {"ConditionCheck": request}
    request["UpdateExpression"] = "SET " + ", ".join(sets) + (f" REMOVE {', '.join(removes)}" if removes else "")
    if removes:
        request["ExpressionAttributeNames"] = {"#ttl": "ttl"}
    return {"Update": request}


def _claimant_of(item: Item) -> Claimant | None:
    """Return the original client that a row names; None for a lease with a token."""
    if "claimant_key" not in item:
        return None
    return Claimant(
        key_id=item["claimant_key"]["S"],
        source_address=item["claimant_address"]["S"],
        progress_by=int(item["progress_by"]["N"]),
    )


def _rings_of(item: Item) -> list[str]:
    """Return the rings in a row."""
    return item["rings"]["S"].split(",") if "rings" in item else []


def _text(item: Item, name: str) -> str | None:
    return str(item[name]["S"]) if name in item else None
