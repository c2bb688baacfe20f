"""The outbox: publish the events in the tables of jobs and fleets on the event bus, in order, at least once.

One transaction stores a transition and its event, so the outbox publishes the events of all transitions and no others.
Lambda repeats the records from the first failed record on, until all are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from functions.domain.errors import StorageUnavailable
from functions.publishing.entries import Entry, entry_of, group_into_requests, sort_by_seq
from functions.storage.stream import UnreadableRecordError, is_transition, transition_of

logger = logging.getLogger("baton.publishing")

Record = Mapping[str, Any]
"""Record of the stream, in the form that Lambda passes to the handler."""

WAITS_S = (0.2, 0.8)
"""Seconds before the second and third try; later tries are left to Lambda, which waits longer."""

PERMANENT_REFUSALS = frozenset(("InvalidArgument", "MalformedDetail", "RedactionFailure"))
"""Codes of PutEvents that repeat for the same entry. Every other code is transient or a fault of the deployment."""


class EventBus(Protocol):
    """Event bus, which accepts at most MAX_ENTRIES events of MAX_REQUEST_BYTES together."""

    def put(self, entries: Sequence[Entry]) -> list[str | None]:
        """Return None for each accepted entry, the code of the refusal for each other. Raises StorageUnavailable."""


class DeadLetters(Protocol):
    """Store of unpublishable records, which a person inspects."""

    def put(self, keys: Mapping[str, str], why: str) -> None:
        """Store the keys of an item, which stays in the jobs table, and the reason. Raises StorageUnavailable."""


def publish(
    records: Sequence[Record],
    bus: EventBus,
    dead_letters: DeadLetters,
    wait: Callable[[float], object],
    notify: Callable[[Sequence[Entry]], object] = lambda _entries: None,
) -> dict[str, Any]:
    """Publish the transitions among the records, and return the first failure in the form that Lambda expects.

    `notify` receives the events that the bus has accepted, in order per job, and may raise StorageUnavailable.

    A record that can never be published becomes a dead letter and does not delay others. A transient refusal ends the
    batch: no later record is published before a repeat. A fault of the deployment (no such bus, no permission) raises.
    """
    transitions = [record for record in records if is_transition(record)]
    unpublishable: dict[int, str] = {}
    entries = []
    for place, record in enumerate(transitions):
        try:
            entries.append(entry_of(transition_of(record), place))
        except (UnreadableRecordError, ValueError) as error:
            unpublishable[place] = str(error)
    pending = {entry.place for entry in entries}
    for request in group_into_requests(sort_by_seq(entries)):
        refused = _put(request, bus, wait)
        unpublishable |= {p: f"the bus refuses it: {code}" for p, code in refused.items() if code in PERMANENT_REFUSALS}
        transient = {place: code for place, code in refused.items() if code not in PERMANENT_REFUSALS}
        try:
            notify([entry for entry in request if entry.place not in refused])
        except StorageUnavailable as error:
            transient |= dict.fromkeys((entry.place for entry in request), str(error))
        pending -= {entry.place for entry in request} - transient.keys()
        if transient:
            logger.warning("events are not accepted", extra={"code": transient[min(transient)]})
            break
    done = _bury(transitions[: min(pending, default=len(transitions))], unpublishable, dead_letters)
    failed = transitions[done : done + 1]
    return {"batchItemFailures": [{"itemIdentifier": _sequence_number(record)} for record in failed]}


def _put(request: Sequence[Entry], bus: EventBus, wait: Callable[[float], object]) -> dict[int, str]:
    """Put the entries, and repeat the transient refusals; return the code of the last refusal by place."""
    pending, refused = request, dict[int, str]()
    for wait_s in (0.0, *WAITS_S):
        if wait_s:
            wait(wait_s)
        try:
            codes = bus.put(pending)
        except StorageUnavailable as error:
            codes = [str(error) or "unavailable"] * len(pending)
        refused |= {entry.place: code for entry, code in zip(pending, codes, strict=True) if code is not None}
        accepted = {entry.place for entry, code in zip(pending, codes, strict=True) if code is None}
        refused = {place: code for place, code in refused.items() if place not in accepted}
        pending = [entry for entry in pending if refused.get(entry.place) not in (None, *PERMANENT_REFUSALS)]
        if not pending:
            break
    return refused


def _bury(transitions: Sequence[Record], unpublishable: Mapping[int, str], dead_letters: DeadLetters) -> int:
    """Store the unpublishable records as dead letters; return the place of the first failure, else the record count."""
    for place, record in enumerate(transitions):
        if place not in unpublishable:
            continue
        logger.error("a transition cannot be published", extra={"why": unpublishable[place], "keys": _keys_of(record)})
        try:
            dead_letters.put(_keys_of(record), unpublishable[place])
        except StorageUnavailable:
            logger.exception("a dead letter could not be stored")
            return place
    return len(transitions)


def _sequence_number(record: Record) -> str:
    return str(record["dynamodb"]["SequenceNumber"])


def _keys_of(record: Record) -> dict[str, str]:
    """Return the keys of the item in the jobs table."""
    return {name: str(value.get("S")) for name, value in record["dynamodb"]["Keys"].items()}
