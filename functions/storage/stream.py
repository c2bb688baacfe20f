"""The jobs table's stream as Lambda hands it over: which of its records are a job's transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from functions.domain import table_keys
from functions.domain.records import Event
from functions.storage.dynamodb.items.documents import load

FILTER: Mapping[str, Any] = {
    "eventName": ["INSERT"],
    "dynamodb": {"Keys": {"sk": {"S": [{"prefix": Event.KIND}]}}},
}
"""The same as `is_transition`, for an event source mapping: Lambda invokes nobody for other records."""


class UnreadableRecordError(Exception):
    """A transition that is not stored as this version stores them. The message says what is wrong, never what is in
    it."""


@dataclass(frozen=True)
class Transition:
    """One event of a job, as the stream tells it."""

    job_id: str
    tenant: str
    event: Event
    webhook: str | None = None
    """The one that the job names."""


def is_transition(record: Mapping[str, Any]) -> bool:
    """True for a new line of a job's history; false for jobs, attempts and checkpoints, and for removals."""
    sort_key = record.get("dynamodb", {}).get("Keys", {}).get("sk", {}).get("S", "")
    return record.get("eventName") == "INSERT" and sort_key.startswith(Event.KIND)


def transition_of(record: Mapping[str, Any]) -> Transition:
    """Read the transition in a stream record that `is_transition` accepts. Raises UnreadableRecordError."""
    try:
        image = record["dynamodb"]["NewImage"]
        job_id = table_keys.job_id_of(image["pk"]["S"])
        event = load(Event, image["doc"]["S"])
        tenant = image["tenant"]["S"]
        webhook = image.get("webhook", {}).get("S")
    except KeyError as error:
        raise UnreadableRecordError(f"it has no {error}") from error
    except ValueError as error:
        # Of a validation error only the count: its text repeats what was stored.
        raise UnreadableRecordError(f"its document is no event: {type(error).__name__}") from error
    return Transition(job_id, tenant, event, webhook)
