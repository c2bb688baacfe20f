"""Transitions as entries of PutEvents, and how many of them go together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.contract.events import EVENT_SOURCE, JobEvent, event_id
from functions.storage.stream import Transition

MAX_ENTRIES = 10
MAX_REQUEST_BYTES = 256 * 1024
"""Of all entries of a request together, as EventBridge counts them; so also of one."""
TIME_BYTES = 14
"""What EventBridge counts for an entry's time."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One event for the bus. `place`: which of the transitions at hand it is, from 0."""

    place: int
    job_id: str
    seq: int
    tenant: str
    webhook: str | None = None
    """The one that the job names."""
    type: str
    detail: str
    """A JobEvent as JSON."""
    at: int

    @property
    def size_bytes(self) -> int:
        """As EventBridge counts it."""
        return TIME_BYTES + sum(len(text.encode()) for text in (EVENT_SOURCE, self.type, self.detail))


def entry_of(transition: Transition, place: int) -> Entry:
    """The entry of a transition; without its data if with them no request could carry it."""
    event = transition.event
    told = JobEvent(
        id=event_id(transition.job_id, event.seq),
        type=event.type,
        job_id=transition.job_id,
        tenant=transition.tenant,
        seq=event.seq,
        epoch=event.epoch,
        at=event.at,
        data=event.data,
    )
    entry = _entry(told, place, transition.webhook)
    if entry.size_bytes > MAX_REQUEST_BYTES:
        told = told.model_copy(update={"data": {}, "data_omitted": True})
        entry = _entry(told, place, transition.webhook)
    return entry


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


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, those of each job by their number.

    The stream promises an order for the writes of one item, and none for the items of one transaction.
    """
    of_job: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.seq, reverse=True):
        of_job.setdefault(entry.job_id, []).append(entry)
    return [of_job[entry.job_id].pop() for entry in entries]


def requests(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The entries in their order, in runs that one request may carry and that have at most one event of each job.

    An entry may be refused while the one behind it is accepted: two of one job in a request could change places.
    """
    run: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        too_much = len(run) == MAX_ENTRIES or size_bytes + entry.size_bytes > MAX_REQUEST_BYTES
        if run and (too_much or entry.job_id in {other.job_id for other in run}):
            yield run
            run, size_bytes = [], 0
        run.append(entry)
        size_bytes += entry.size_bytes
    if run:
        yield run
