"""The outbox: what was written to the jobs table goes onto the event bus, in order per job, at least once.

The event was stored in the transaction that made the transition, so none is published that did not happen and none is
forgotten. Lambda hands records over again, from the one that is named as failed, until they are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from functions.domain.errors import StorageUnavailable
from functions.publishing.entries import Entry, entry_of, in_order, requests
from functions.storage.stream import UnreadableRecordError, is_transition, transition_of

logger = logging.getLogger("baton.publishing")

Record = Mapping[str, Any]
"""One record of the stream, as Lambda hands it over."""

WAITS_S = (0.2, 0.8)
"""Before the second and third try; after that the record is left to Lambda, which waits longer."""

NEVER = frozenset(("InvalidArgument", "MalformedDetail", "RedactionFailure"))
"""Codes of PutEvents that no repeat changes. All others pass, or are faults of the deployment and can be mended."""


class EventBus(Protocol):
    """Takes at most MAX_ENTRIES events of MAX_REQUEST_BYTES together."""

    def put(self, entries: Sequence[Entry]) -> list[str | None]:
        """For each entry None if it was accepted, or the code of its refusal. Raises StorageUnavailable."""


class DeadLetters(Protocol):
    """Keeps what cannot be published until somebody looks."""

    def put(self, keys: Mapping[str, str], why: str) -> None:
        """`keys`: of the item in the jobs table, which stays there. Raises StorageUnavailable."""


def _nobody(_entries: Sequence[Entry]) -> None:
    """Who else is told, where nobody is."""


def publish(
    records: Sequence[Record],
    bus: EventBus,
    dead_letters: DeadLetters,
    wait: Callable[[float], object],
    tell: Callable[[Sequence[Entry]], None] = _nobody,
) -> dict[str, Any]:
    """Publish the transitions among the records; what Lambda wants to be told: from which record on they come again.

    `tell`: is given the events that the bus has accepted, in order per job; may raise StorageUnavailable.

    A record that can never be published becomes a dead letter and does not keep others waiting. Behind one that may
    be accepted later nothing more is published. Raises what is wrong with the deployment: no such bus, no right.
    """
    transitions = [record for record in records if is_transition(record)]
    hopeless: dict[int, str] = {}
    entries = []
    for place, record in enumerate(transitions):
        try:
            entries.append(entry_of(transition_of(record), place))
        except UnreadableRecordError as error:
            hopeless[place] = str(error)
    left = {entry.place for entry in entries}
    for run in requests(in_order(entries)):
        refused = _put(run, bus, wait)
        hopeless |= {place: f"the bus refuses it: {code}" for place, code in refused.items() if code in NEVER}
        passing = {place: code for place, code in refused.items() if code not in NEVER}
        try:
            tell([entry for entry in run if entry.place not in refused])
        except StorageUnavailable as error:
            passing |= dict.fromkeys((entry.place for entry in run), str(error))
        left -= {entry.place for entry in run} - passing.keys()
        if passing:
            logger.warning("events are not accepted", extra={"code": passing[min(passing)]})
            break
    done = _bury(transitions[: min(left, default=len(transitions))], hopeless, dead_letters)
    return {"batchItemFailures": [{"itemIdentifier": _number_of(record)} for record in transitions[done : done + 1]]}


def _put(run: Sequence[Entry], bus: EventBus, wait: Callable[[float], object]) -> dict[int, str]:
    """Offer the run, and again what was not accepted: codes of the last refusals by place."""
    left, refused = run, dict[int, str]()
    for wait_s in (0.0, *WAITS_S):
        if wait_s:
            wait(wait_s)
        try:
            codes = bus.put(left)
        except StorageUnavailable as error:
            codes = [str(error) or "unavailable"] * len(left)
        refused |= {entry.place: code for entry, code in zip(left, codes, strict=True) if code is not None}
        accepted = {entry.place for entry, code in zip(left, codes, strict=True) if code is None}
        refused = {place: code for place, code in refused.items() if place not in accepted}
        left = [entry for entry in left if refused.get(entry.place) not in (None, *NEVER)]
        if not left:
            break
    return refused


def _bury(transitions: Sequence[Record], hopeless: Mapping[int, str], dead_letters: DeadLetters) -> int:
    """Make dead letters of those that are hopeless; the place of the first that could not be, else their number."""
    for place, record in enumerate(transitions):
        if place not in hopeless:
            continue
        logger.error("a transition cannot be published", extra={"why": hopeless[place], "keys": _keys_of(record)})
        try:
            dead_letters.put(_keys_of(record), hopeless[place])
        except StorageUnavailable:
            logger.exception("the dead letters take nothing")
            return place
    return len(transitions)


def _number_of(record: Record) -> str:
    return str(record["dynamodb"]["SequenceNumber"])


def _keys_of(record: Record) -> dict[str, str]:
    """Of the item in the jobs table: it has all that the record has."""
    return {name: str(value.get("S")) for name, value in record["dynamodb"]["Keys"].items()}
