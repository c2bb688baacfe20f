"""Events of fleets on the bus and at webhooks: in order for each fleet, once for each id, only where they are named."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from baton.contract.admin.webhooks import DeliveryView
from baton.contract.fleets.events import FleetEventType, PublishedFleetEvent
from baton.contract.fleets.fleet import MachineState
from baton.contract.jobs.history import EventType
from functions.domain.webhooks import Webhook
from functions.fleet.records import FleetEvent
from functions.publishing.entries import entry_of, sort_by_seq
from functions.publishing.outbox import publish
from functions.storage.dynamodb.items import fleet_items
from functions.storage.stream import transition_of
from functions.webhooks.event_queue import QueuedEvent, Subscribers
from tests.kits.api.fakes import FakeLine
from tests.kits.api.stream_records import AT, TENANT, FakeBus, FakeDeadLetters, as_record, no_wait, stream_record
from tests.kits.clouds.store_sets import memory_cloud

WRITTEN_NS = 1_790_000_000_123_456_789


def records(*types: str, fleet: str = "nights") -> list[dict[str, Any]]:
    """Build the stream records of the events of one write, in the wrong order."""
    events = [FleetEvent(at=AT, type=one, machine="dep-nights-1", reason="why", usd=0.25) for one in types]
    puts = fleet_items.put_events("fleet", TENANT, fleet, events, WRITTEN_NS)
    return [as_record(one["Put"]["Item"], name="INSERT", number=str(at)) for at, one in reversed(list(enumerate(puts)))]


def test_every_state_of_a_machine_has_its_type() -> None:
    of_machines = {one for one in FleetEventType if one.startswith("machine.")}
    assert {f"machine.{state}" for state in MachineState} == of_machines - {
        FleetEventType.MACHINE_REALLOCATED,
        FleetEventType.MACHINE_OVERDUE,
    }


def test_a_change_of_a_machine_reaches_the_bus_as_stored() -> None:
    bus = FakeBus()
    assert publish(records("machine.gone"), bus, FakeDeadLetters(), no_wait) == {"batchItemFailures": []}
    (entry,) = bus.accepted
    assert (entry.type, entry.at, entry.tenant) == ("machine.gone", AT, TENANT)
    assert json.loads(entry.detail) == {
        "schema_version": 1,
        "id": f"fleet/nights#{WRITTEN_NS}00",
        "type": "machine.gone",
        "tenant": TENANT,
        "fleet": "nights",
        "machine": "dep-nights-1",
        "at": AT,
        "reason": "why",
        "usd": 0.25,
    }


def test_the_events_of_one_fleet_stay_in_order_and_go_one_by_one() -> None:
    bus = FakeBus()
    mixed = [
        *records("machine.registered", "machine.ready"),
        *records("budget.warning", fleet="days"),
        stream_record(1),
    ]
    publish(mixed, bus, FakeDeadLetters(), no_wait)
    types = [entry.type for entry in bus.accepted]
    assert types.index("machine.registered") < types.index("machine.ready")
    assert {"budget.warning", "job.started"} < set(types)
    for request in bus.requests:
        assert len({entry.job_id for entry in request}) == len(request)


def test_an_event_of_an_unknown_type_becomes_a_dead_letter_and_delays_none() -> None:
    bus, letters = FakeBus(), FakeDeadLetters()
    publish([*records("machine.melted"), *records("machine.gone", fleet="days")], bus, letters, no_wait)
    assert [entry.type for entry in bus.accepted] == ["machine.gone"]
    ((sort_key, why),) = letters.letters
    assert sort_key.startswith("EVENT#") and "melted" in why


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"types": ["machine.gone", "job.completed"]}, True),
        ({"types": []}, False),
        ({"types": ["job.completed"]}, False),
        ({"types": ["machine.gone"], "every_job": False}, False),
    ],
)
def test_a_webhook_receives_events_of_fleets_whose_types_it_names(changes: dict[str, Any], wanted: bool) -> None:
    hooks, line = memory_cloud().webhooks, FakeLine()
    hooks.put(Webhook(id="9f2c41d07be83a5610cd", tenant=TENANT, url="https://a", secret="s", created_at=AT, **changes))
    entries = [entry_of(transition_of(one), place) for place, one in enumerate(records("machine.gone"))]
    Subscribers(hooks, line, lambda: 0.0).enqueue(sort_by_seq(entries))
    assert [(event.type, event.subject) for _, event, _ in line.waiting] == [("machine.gone", "fleet/nights")] * wanted


def test_a_queued_event_of_a_fleet_comes_back_as_it_was() -> None:
    event = PublishedFleetEvent(
        id="fleet/nights#17", type=FleetEventType.MACHINE_LOST, tenant=TENANT, fleet="nights", at=AT
    )
    queued = QueuedEvent(TENANT, "9f2c41d07be83a5610cd", event)
    assert QueuedEvent.from_json(queued.as_json()) == queued
    assert (event.subject, event.seq) == ("fleet/nights", 17)
    assert set(get_args(DeliveryView.model_fields["type"].annotation)) == {EventType, FleetEventType}
