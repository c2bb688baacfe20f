"""Convert records of fleets to items of the fleet table, and conditional writes to actions of TransactWriteItems."""

from __future__ import annotations

from collections.abc import Sequence

from functions.domain import table_keys
from functions.domain.record_base import Record
from functions.domain.table_keys import Key
from functions.fleet.clock import ClockAnchor
from functions.fleet.ledger import DeploymentLedger, Ledger
from functions.fleet.machine_states import NUDGING
from functions.fleet.records import FleetEvent, Machine, OrphanMachine, Quarantine, Reputation, StoredFleet
from functions.storage.dynamodb.items.attribute_values import Item, number
from functions.storage.dynamodb.items.documents import dump
from functions.storage.dynamodb.items.job_items import key_item

EVENT_RETENTION_S = 90 * 86_400
ORPHAN_RETENTION_S = 30 * 86_400
QUARANTINE_RETENTION_S = 7 * 86_400
"""TTL of a quarantine after its end: a host that fails again in this time is avoided for longer."""

NUDGING_EVENTS = frozenset(f"machine.{state}" for state in NUDGING)

CLOCK = Key(table_keys.FLEET_CONTROLLER, "CLOCK")
FENCE = Key(table_keys.FLEET_CONTROLLER, "FENCE")
SPENDING = Key(table_keys.FLEET_CONTROLLER, "SPENDING")


def fleet_key(tenant: str, name: str) -> Item:
    """Return the key of a fleet."""
    return key_item(Key(table_keys.FLEETS, table_keys.fleet_sk(tenant, name)))


def retired_key(tenant: str, name: str) -> Item:
    """Return the key of a fleet whose job has ended."""
    return key_item(Key(table_keys.fleet_pk(tenant, name), table_keys.RETIRED_FLEET))


def ledger_key(tenant: str, fleet: str) -> Item:
    """Return the key of a fleet's ledger."""
    return key_item(Key(table_keys.fleet_pk(tenant, fleet), table_keys.FLEET_LEDGER))


def live_key(tenant: str, fleet: str, machine_id: str) -> Item:
    """Return the key of a machine that the tick watches."""
    return key_item(Key(table_keys.fleet_pk(tenant, fleet), f"{table_keys.LIVE_MACHINE}{machine_id}"))


def fence_check(table: str, fence: int) -> Item:
    """Return the action that cancels a transaction once another controller has acquired the fence."""
    return {
        "ConditionCheck": {
            "TableName": table,
            "Key": key_item(FENCE),
            "ConditionExpression": "fence = :fence",
            "ExpressionAttributeValues": {":fence": number(fence)},
        }
    }


def put_clock_anchor(table: str, anchor: ClockAnchor) -> Item:
    """Return the Put of the anchor of the fleets' clock."""
    return _put(table, _item(key_item(CLOCK), anchor))


def put_fleet(table: str, fleet: StoredFleet) -> Item:
    """Return the Put of a fleet in place of its version before."""
    return _put_version(table, fleet_key(fleet.tenant, fleet.spec.name), fleet, fleet.version)


def retire_fleet(table: str, fleet: StoredFleet) -> list[Item]:
    """Return the writes that take a fleet out of the partition of all fleets, in place of its version before."""
    live = fleet_key(fleet.tenant, fleet.spec.name)
    return [
        _put(table, _item(retired_key(fleet.tenant, fleet.spec.name), fleet, version=fleet.version)),
        {"Delete": {"TableName": table, "Key": live, **_version_before(fleet.version)}},
    ]


def put_spending(table: str, spending: DeploymentLedger) -> Item:
    """Return the Put of the money that all fleets spent, in place of its version before."""
    return _put_version(table, key_item(SPENDING), spending, spending.version)


def put_ledger(table: str, tenant: str, fleet: str, ledger: Ledger) -> Item:
    """Return the Put of a ledger in place of its version before."""
    return _put_version(table, ledger_key(tenant, fleet), ledger, ledger.version)


def machine_actions(table: str, machine: Machine) -> list[Item]:
    """Return the writes of a machine in place of its version before.

    A machine that the tick no longer watches moves out of the range of the watched machines, so that the tick's query
    reads watched machines only.
    """
    live = live_key(machine.tenant, machine.fleet, machine.id)
    if machine.watched:
        return [_put_version(table, live, machine, machine.version)]
    sort = table_keys.ended_machine_sk(machine.since, machine.id)
    ended = key_item(Key(table_keys.fleet_pk(machine.tenant, machine.fleet), sort))
    return [
        _put(table, _item(ended, machine)),
        {"Delete": {"TableName": table, "Key": live, **_version_before(machine.version)}},
    ]


def put_events(
    table: str, tenant: str, fleet: str, events: Sequence[FleetEvent], written_ns: int, *, by_worker: bool = False
) -> list[Item]:
    """Return the Puts of events in their order. by_worker: mark those after which a tick follows at once."""
    partition = table_keys.fleet_pk(tenant, fleet)
    return [
        _put(
            table,
            _item(
                key_item(Key(partition, table_keys.fleet_event_sk(event.at, written_ns, place))),
                event,
                ttl=event.at + EVENT_RETENTION_S,
                **({table_keys.FLEET_NUDGE: 1} if by_worker and event.type in NUDGING_EVENTS else {}),
            ),
        )
        for place, event in enumerate(events)
    ]


def put_quarantine(table: str, quarantine: Quarantine) -> Item:
    """Return the Put of a quarantine in place of an earlier one."""
    key = key_item(Key(table_keys.QUARANTINES, quarantine.host))
    return _put(table, _item(key, quarantine, ttl=quarantine.until + QUARANTINE_RETENTION_S))


def put_reputation(table: str, reputation: Reputation) -> Item:
    """Return the Put of a history in place of an earlier one."""
    return _put(table, _item(key_item(Key(table_keys.REPUTATIONS, reputation.kind)), reputation))


def put_orphan(table: str, orphan: OrphanMachine) -> Item:
    """Return the Put of an orphan in place of an earlier sighting."""
    key = key_item(Key(table_keys.ORPHANS, f"{orphan.provider}#{orphan.handle}"))
    return _put(table, _item(key, orphan, ttl=orphan.last_seen_at + ORPHAN_RETENTION_S))


def _item(key: Item, record: Record, **attributes: int) -> Item:
    beside = {name: number(value) for name, value in attributes.items()}
    return {**key, **beside, "doc": {"S": dump(record)}}


def _put(table: str, item: Item) -> Item:
    return {"Put": {"TableName": table, "Item": item}}


def _put_version(table: str, key: Item, record: Record, version: int) -> Item:
    item = _item(key, record, version=version)
    return {"Put": {"TableName": table, "Item": item, **_version_before(version)}}


def _version_before(version: int) -> Item:
    """Return the condition that the stored item has the version before `version`; 1 requires a missing item."""
    if version == 1:
        return {"ConditionExpression": "attribute_not_exists(pk)"}
    return {
        "ConditionExpression": "version = :before",
        "ExpressionAttributeValues": {":before": number(version - 1)},
    }
