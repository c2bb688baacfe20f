"""Entries of PutEvents: conversion from transitions, order, division into requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.contract.jobs.events import EVENT_SOURCE, JobEvent, event_id
from functions.storage.stream import FleetTransition, Transition

MAX_ENTRIES = 10
MAX_REQUEST_BYTES = 256 * 1024
"""Size limit of a request, as EventBridge counts the entries; so also the limit of one entry."""
TIME_BYTES = 14
"""Size that EventBridge counts for the time of an entry."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Event for the bus. `place`: index of the transition in the batch, from 0."""

    place: int
    job_id: str
    """Job or fleet, whose events stay in order."""
    seq: int
    tenant: str
    of_fleet: bool = False
    webhook: str | None = None
    """Id of the webhook that the job names."""
    type: str
    detail: str
    """The JobEvent or PublishedFleetEvent as JSON."""
    at: int

    @property
    def size_bytes(self) -> int:
        """Size of the entry in bytes, as EventBridge counts."""
        return TIME_BYTES + sum(len(text.encode()) for text in (EVENT_SOURCE, self.type, self.detail))


def entry_of(transition: Transition | FleetTransition, place: int) -> Entry:
    """Build the entry of a transition; an event too large for a request loses its data.

    Raises ValueError for an event of a fleet whose type this version does not publish.
    """
    if isinstance(transition, FleetTransition):
        return _entry_of_fleet(transition, place)
    event = transition.event
    published = JobEvent(
        id=event_id(transition.job_id, event.seq),
        type=event.type,
        job_id=transition.job_id,
        tenant=transition.tenant,
        seq=event.seq,
        epoch=event.epoch,
        at=event.at,
        data=event.data,
    )
    entry = _entry(published, place, transition.webhook)
    if entry.size_bytes > MAX_REQUEST_BYTES:
        published = published.model_copy(update={"data": {}, "data_omitted": True})
        entry = _entry(published, place, transition.webhook)
    return entry


def _entry_of_fleet(transition: FleetTransition, place: int) -> Entry:
    published = transition.event.published(transition.tenant, transition.fleet, transition.number)
    return Entry(
        place=place,
        job_id=f"{transition.tenant}/{published.subject}",
        seq=transition.number,
        tenant=transition.tenant,
        of_fleet=True,
        type=published.type,
        detail=published.model_dump_json(),
        at=published.at,
    )


def _entry(event: JobEvent, place: int, webhook: str | None) -> Entry:
    return Entry(
        place=place,
        job_id=event.job_id,
        seq=event.seq,
        tenant=event.tenant,
        webhook=webhook,
        type=event.type,
        detail=event.model_dump_json(),
        at=event.at,
    )


def sort_by_seq(entries: Sequence[Entry]) -> list[Entry]:
    """Sort the entries of each job by number, and leave each job in its places.

    The stream orders the writes of one item, but not the items of one transaction.
    """
    of_job: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.seq, reverse=True):
        of_job.setdefault(entry.job_id, []).append(entry)
    return [of_job[entry.job_id].pop() for entry in entries]


def group_into_requests(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Divide the entries, in order, into requests within the limits and with at most one event of each job.

    The bus may refuse an entry and accept a later entry of the same request, so two events of one job in a request
    could change places.
    """
    request: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        is_full = len(request) == MAX_ENTRIES or size_bytes + entry.size_bytes > MAX_REQUEST_BYTES
        if request and (is_full or entry.job_id in {other.job_id for other in request}):
            yield request
            request, size_bytes = [], 0
        request.append(entry)
        size_bytes += entry.size_bytes
    if request:
        yield request
