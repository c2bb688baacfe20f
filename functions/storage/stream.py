"""Read transitions of jobs and fleets from records of their tables' streams, in the form that Lambda passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functions.domain import table_keys
from functions.domain.records import Event
from functions.fleet.records import FleetEvent
from functions.storage.dynamodb.items.documents import load

Filter = Mapping[str, Any]
"""Pattern of an event source mapping."""
FILTER: Filter = {
    "eventName": ["INSERT"],
    "dynamodb": {"Keys": {"sk": {"S": [{"prefix": Event.KIND}]}}},
}
"""`is_transition` as the filter of an event source mapping: Lambda invokes the publisher for transitions only."""

_WRITTEN = ["INSERT", "MODIFY"]
NUDGES: Mapping[str, Sequence[Filter]] = {
    # Only a claimable job has the key of the index `ready`.
    "jobs": [{"eventName": _WRITTEN, "dynamodb": {"NewImage": {"ready_pk": {"S": [{"exists": True}]}}}}],
    "fleet": [
        {"eventName": ["INSERT"], "dynamodb": {"NewImage": {table_keys.FLEET_NUDGE: {"N": ["1"]}}}},
        {"eventName": _WRITTEN, "dynamodb": {"Keys": {"pk": {"S": [table_keys.FLEETS]}}}},
    ],
}
"""Writes after which a tick of the fleets' controller follows at once, by the suffix of their table: a claimable job,
an event that a machine's worker brought about, and a fleet's document."""


class UnreadableRecordError(Exception):
    """A record is no transition of this version; the message names the fault without the record's contents."""


@dataclass(frozen=True)
class Transition:
    """Event of a job as read from the stream."""

    job_id: str
    tenant: str
    event: Event
    webhook: str | None = None
    """Id of the webhook that the job names."""


def is_transition(record: Mapping[str, Any]) -> bool:
    """Return True for a new event; False for other records of jobs, and for removals."""
    sort_key = record.get("dynamodb", {}).get("Keys", {}).get("sk", {}).get("S", "")
    return record.get("eventName") == "INSERT" and sort_key.startswith(Event.KIND)


@dataclass(frozen=True)
class FleetTransition:
    """Event of a fleet as read from the stream. number: rises with each event of the fleet."""

    tenant: str
    fleet: str
    number: int
    event: FleetEvent


def transition_of(record: Mapping[str, Any]) -> Transition | FleetTransition:
    """Read the transition in a stream record that `is_transition` accepts. Raises UnreadableRecordError."""
    try:
        image = record["dynamodb"]["NewImage"]
        of_fleet = table_keys.fleet_of(image["pk"]["S"])
        if of_fleet is not None:
            number = table_keys.fleet_event_number(image["sk"]["S"])
            return FleetTransition(*of_fleet, number, load(FleetEvent, image["doc"]["S"]))
        job_id = table_keys.job_id_of(image["pk"]["S"])
        event = load(Event, image["doc"]["S"])
        tenant = image["tenant"]["S"]
        webhook = image.get("webhook", {}).get("S")
    except KeyError as error:
        raise UnreadableRecordError(f"it has no {error}") from error
    except ValueError as error:
        # The message names the type of the error only, because the text of a validation error quotes the record.
        raise UnreadableRecordError(f"its document is no event: {type(error).__name__}") from error
    return Transition(job_id, tenant, event, webhook)
