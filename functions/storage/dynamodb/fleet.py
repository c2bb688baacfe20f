"""Store fleets, their machines and their money in DynamoDB."""

from __future__ import annotations

import logging
import math
import secrets
import string
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from functions.domain import table_keys
from functions.domain.errors import StorageUnavailable, WriteConflict
from functions.domain.record_base import Record
from functions.fleet.clock import ClockAnchor
from functions.fleet.ledger import DeploymentLedger, Ledger
from functions.fleet.records import FleetEvent, Machine, OrphanMachine, Quarantine, Reputation, StoredFleet
from functions.fleet.store import DamagedRecord, FenceLost
from functions.storage.dynamodb.items import fleet_items
from functions.storage.dynamodb.items.attribute_values import Item, number
from functions.storage.dynamodb.items.documents import load
from functions.storage.dynamodb.items.job_items import key_item
from functions.storage.dynamodb.reads import get_item, query
from functions.storage.failures import RETRYABLE_CODES, error_code, failures_translated
from functions.storage.tables import FLEET

logger = logging.getLogger("baton.fleet")

R = TypeVar("R", bound=Record)

REFUSALS = ("ConditionalCheckFailedException", "TransactionConflictException")
"""Codes of a single write whose condition failed, or that met a transaction on its item."""


class DynamoFleetStore:
    """FleetStore over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = FLEET.name(prefix)
        self._deployment: str | None = None

    def deployment(self) -> str:
        if self._deployment is None:
            # A letter first: some providers accept names of machines in this form only.
            letters, rest = string.ascii_lowercase, string.ascii_lowercase + string.digits
            made = secrets.choice(letters) + "".join(secrets.choice(rest) for _ in range(7))
            self._deployment = str(self._stored_once("DEPLOYMENT", {"S": made})["S"])
        return self._deployment

    def clock_anchor(self) -> ClockAnchor | None:
        return self._read(ClockAnchor, key_item(fleet_items.CLOCK))

    def put_clock_anchor(self, anchor: ClockAnchor) -> None:
        self._write([fleet_items.put_clock_anchor(self._table, anchor)])

    def acquire(self, holder: str, now: int, duration_s: int) -> int | None:
        found = self._updated(
            fleet_items.FENCE,
            # The SDK repeats a request whose answer was lost; the repetition finds its own holder.
            "attribute_not_exists(pk) OR lease_until <= :now OR holder = :holder",
            "SET fence = if_not_exists(fence, :zero) + :one, holder = :holder, lease_until = :until",
            {
                ":now": number(now),
                ":holder": {"S": holder},
                ":zero": number(0),
                ":one": number(1),
                ":until": number(now + duration_s),
            },
        )
        return int(found["fence"]["N"]) if found else None

    def release(self, fence: int, *, finished_at: int | None = None) -> None:
        values, update = {":fence": number(fence), ":zero": number(0)}, "SET lease_until = :zero"
        if finished_at is not None:
            values, update = {**values, ":at": number(finished_at)}, f"{update}, finished_at = :at"
        self._updated(fleet_items.FENCE, "fence = :fence", update, values)

    def last_tick(self) -> int | None:
        item = get_item(self._client, self._table, key_item(fleet_items.FENCE))
        return int(item["finished_at"]["N"]) if item and "finished_at" in item else None

    def any_fleet(self) -> bool:
        # An unfenced hint: a fleet that the answer misses begins with the next tick.
        return bool(self._items(table_keys.FLEETS, "", 1, ConsistentRead=False))

    def fleets(self, tenant: str | None = None, *, damaged: list[DamagedRecord] | None = None) -> Sequence[StoredFleet]:
        prefix = "" if tenant is None else table_keys.fleet_sk(tenant, "")
        found: list[StoredFleet] = []
        for item in self._items(table_keys.FLEETS, prefix, None):
            owner, _, name = item["sk"]["S"].rpartition("#")
            try:
                with _naming_damage(owner, name):
                    found.append(_load(StoredFleet, item))
            except DamagedRecord as error:
                logger.exception("a fleet is left out")
                if damaged is not None:
                    damaged.append(error)
        return found

    def fleet(self, tenant: str, name: str) -> StoredFleet | None:
        for key in (fleet_items.fleet_key(tenant, name), fleet_items.retired_key(tenant, name)):
            with _naming_damage(tenant, name):
                found = self._read(StoredFleet, key)
            if found is not None:
                return found
        return None

    def put_fleet(self, fleet: StoredFleet) -> None:
        self._write([fleet_items.put_fleet(self._table, fleet)])

    def retire(self, fence: int, fleet: StoredFleet, spending: DeploymentLedger) -> None:
        actions = fleet_items.retire_fleet(self._table, fleet)
        self._write([*actions, fleet_items.put_spending(self._table, spending)], fence=fence)

    def spending(self) -> DeploymentLedger:
        return self._read(DeploymentLedger, key_item(fleet_items.SPENDING)) or DeploymentLedger()

    def machines(self, tenant: str, fleet: str) -> Sequence[Machine]:
        with _naming_damage(tenant, fleet):
            items = self._items(table_keys.fleet_pk(tenant, fleet), table_keys.LIVE_MACHINE, None)
            return [_load(Machine, item) for item in items]

    def holdings(self, tenant: str, fleet: str) -> tuple[Ledger, Sequence[Machine]]:
        with _naming_damage(tenant, fleet):
            items = self._items(table_keys.fleet_pk(tenant, fleet), table_keys.FLEET_HOLDINGS, None)
            stored = [item for item in items if item["sk"]["S"] == table_keys.FLEET_LEDGER]
            ledger = _load(Ledger, stored[0]) if stored else Ledger()
            return ledger, [_load(Machine, item) for item in items[len(stored) :]]

    def machine(self, tenant: str, fleet: str, token: str) -> Machine | None:
        return self._read(Machine, fleet_items.live_key(tenant, fleet, token))

    def ended(self, tenant: str, fleet: str, *, limit: int, since: int = 0) -> Sequence[Machine]:
        items = self._since(tenant, fleet, table_keys.ENDED_MACHINE, since, limit, ScanIndexForward=False)
        return [_load(Machine, item) for item in items]

    def ledger(self, tenant: str, fleet: str) -> Ledger:
        with _naming_damage(tenant, fleet):
            return self._read(Ledger, fleet_items.ledger_key(tenant, fleet)) or Ledger()

    def write(
        self,
        fence: int,
        tenant: str,
        fleet: str,
        *,
        machine: Machine | None = None,
        ledger: Ledger | None = None,
        spending: DeploymentLedger | None = None,
        events: Sequence[FleetEvent] = (),
    ) -> None:
        actions = [] if machine is None else fleet_items.machine_actions(self._table, machine)
        if ledger is not None:
            actions.append(fleet_items.put_ledger(self._table, tenant, fleet, ledger))
        if spending is not None:
            actions.append(fleet_items.put_spending(self._table, spending))
        actions += fleet_items.put_events(self._table, tenant, fleet, events, time.time_ns())
        self._write(actions, fence=fence)

    def update_machine(self, machine: Machine, events: Sequence[FleetEvent] = ()) -> None:
        told = fleet_items.put_events(
            self._table, machine.tenant, machine.fleet, events, time.time_ns(), by_worker=True
        )
        self._write([*fleet_items.machine_actions(self._table, machine), *told])

    def events(self, tenant: str, fleet: str, *, limit: int) -> Sequence[FleetEvent]:
        return self._newest(FleetEvent, tenant, fleet, table_keys.FLEET_EVENT, limit)

    def history(self, tenant: str, fleet: str, *, since: int, limit: int) -> Sequence[tuple[int, FleetEvent]]:
        items = self._since(tenant, fleet, table_keys.FLEET_EVENT, since, limit)
        return [(table_keys.fleet_event_number(item["sk"]["S"]), _load(FleetEvent, item)) for item in items]

    def allow(self, provider: str, call: str, now: int, interval_s: float) -> bool:
        found = self._updated(
            table_keys.Key(table_keys.provider_call_pk(provider), call),
            "attribute_not_exists(pk) OR allowed_at <= :now",
            "SET allowed_at = :next",
            {":now": number(now), ":next": number(now + math.ceil(interval_s))},
        )
        return found is not None

    def quarantined(self, now: int) -> Mapping[str, Quarantine]:
        stored = self._range(Quarantine, table_keys.QUARANTINES)
        return {one.host: one for one in stored if one.until > now}

    def put_quarantine(self, quarantine: Quarantine) -> None:
        self._write([fleet_items.put_quarantine(self._table, quarantine)])

    def reputations(self) -> Mapping[str, Reputation]:
        return {one.kind: one for one in self._range(Reputation, table_keys.REPUTATIONS)}

    def put_reputation(self, fence: int, reputation: Reputation) -> None:
        self._write([fleet_items.put_reputation(self._table, reputation)], fence=fence)

    def orphans(self) -> Mapping[tuple[str, str], OrphanMachine]:
        return {(one.provider, one.handle): one for one in self._range(OrphanMachine, table_keys.ORPHANS)}

    def put_orphan(self, fence: int, orphan: OrphanMachine) -> None:
        self._write([fleet_items.put_orphan(self._table, orphan)], fence=fence)

    def _stored_once(self, name: str, value: Item) -> Item:
        """Return the value that the first call for `name` stored."""
        with failures_translated():
            answer = self._client.update_item(
                TableName=self._table,
                Key=key_item(table_keys.Key(table_keys.FLEET_CONTROLLER, name)),
                UpdateExpression="SET made = if_not_exists(made, :value)",
                ExpressionAttributeValues={":value": value},
                ReturnValues="ALL_NEW",
            )
        made: Item = answer["Attributes"]["made"]
        return made

    def _updated(self, key: table_keys.Key, condition: str, update: str, values: Item) -> Item | None:
        """Update an item and return the item after the update; None if the condition failed."""
        try:
            with failures_translated():
                answer = self._client.update_item(
                    TableName=self._table,
                    Key=key_item(key),
                    UpdateExpression=update,
                    ConditionExpression=condition,
                    ExpressionAttributeValues=values,
                    ReturnValues="ALL_NEW",
                )
        except ClientError as error:
            if error_code(error) not in REFUSALS:
                raise
            return None
        found: Item = answer["Attributes"]
        return found

    def _read(self, kind: type[R], key: Item) -> R | None:
        item = get_item(self._client, self._table, key)
        return _load(kind, item) if item else None

    def _range(self, kind: type[R], partition: str) -> list[R]:
        """Read the records of a partition. An unreadable one is logged and left out, because it concerns no fleet."""
        found: list[R] = []
        for item in self._items(partition, "", None):
            try:
                found.append(_load(kind, item))
            except (KeyError, ValueError):
                logger.exception("a record is left out", extra={"partition": partition, "sort": item["sk"]["S"]})
        return found

    def _since(self, tenant: str, fleet: str, prefix: str, since: int, limit: int, **request: Any) -> Sequence[Item]:
        """Read the items of a fleet whose sort keys have this prefix and a time from `since` on."""
        return query(
            self._client,
            self._table,
            limit,
            KeyConditionExpression="pk = :pk AND sk BETWEEN :since AND :last",
            ExpressionAttributeValues={
                ":pk": {"S": table_keys.fleet_pk(tenant, fleet)},
                ":since": {"S": f"{prefix}{since:011d}"},
                ":last": {"S": f"{prefix}~"},
            },
            ConsistentRead=True,
            **request,
        )

    def _newest(self, kind: type[R], tenant: str, fleet: str, prefix: str, limit: int) -> list[R]:
        items = self._items(table_keys.fleet_pk(tenant, fleet), prefix, limit, ScanIndexForward=False)
        return [_load(kind, item) for item in items]

    def _items(self, partition: str, prefix: str, limit: int | None, **request: Any) -> Sequence[Item]:
        """Read the items of a partition whose sort keys begin with `prefix`, in order of the sort keys."""
        condition, values = "pk = :pk", {":pk": {"S": partition}}
        if prefix:
            condition, values = f"{condition} AND begins_with(sk, :prefix)", {**values, ":prefix": {"S": prefix}}
        return query(
            self._client,
            self._table,
            limit,
            KeyConditionExpression=condition,
            ExpressionAttributeValues=values,
            **{"ConsistentRead": True, **request},
        )

    def _write(self, actions: Sequence[Item], *, fence: int | None = None) -> None:
        """Write all or nothing. Raises FenceLost, or WriteConflict if another condition failed."""
        try:
            with failures_translated():
                if fence is None and len(actions) == 1:
                    # A single write costs half of a transaction.
                    self._client.put_item(**actions[0]["Put"])
                    return
                checks = [] if fence is None else [fleet_items.fence_check(self._table, fence)]
                # The SDK repeats a request whose answer was lost; the token makes the repetition idempotent.
                self._client.transact_write_items(
                    TransactItems=[*checks, *actions], ClientRequestToken=str(uuid.uuid4())
                )
        except ClientError as error:
            if error_code(error) in REFUSALS:
                raise WriteConflict from error
            if error_code(error) != "TransactionCanceledException":
                raise
            codes = [str(reason.get("Code")) for reason in error.response.get("CancellationReasons", [])]
            if fence is not None and codes[:1] == ["ConditionalCheckFailed"]:
                raise FenceLost from error
            if {"ConditionalCheckFailed", "TransactionConflict"}.intersection(codes):
                raise WriteConflict from error
            if RETRYABLE_CODES.intersection(codes):
                raise StorageUnavailable(f"TransactWriteItems: {', '.join(codes)}") from error
            raise


@contextmanager
def _naming_damage(tenant: str, fleet: str) -> Iterator[None]:
    """Raise DamagedRecord for a record that cannot be decoded. The message names only the type of the error."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise DamagedRecord(tenant, fleet, type(error).__name__) from error


def _load(kind: type[R], item: Item) -> R:
    return load(kind, item["doc"]["S"])
