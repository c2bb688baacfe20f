"""Identify paged lists, and build pages with cursors; every store shares this module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.contract.jobs.job import JobState
from functions.domain.ports import ResultPage
from functions.domain.record_base import TableRecord
from functions.storage import cursors

T = TypeVar("T")


@dataclass(frozen=True)
class PagedList:
    """Identity of a list, and the types of a position in the list."""

    name: tuple[str, ...]
    shape: tuple[type[str] | type[int], ...]

    def position(self, cursor: str | None) -> list[str | int] | None:
        """Decode the position in a cursor; None for the beginning of the list. Raises Refusal(INVALID_CURSOR)."""
        return None if cursor is None else cursors.decode(cursor, self.name, self.shape)


def ready_list(tenant: str, queue: str, shard: int) -> PagedList:
    """Return the list of claimable jobs; position: rank, id."""
    return PagedList(("ready", tenant, queue, str(shard)), (str, str))


def jobs_list(tenant: str, state: JobState | None, *, newest_first: bool) -> PagedList:
    """Return the list of a tenant's jobs; position: created_at, id."""
    kind = "newest jobs" if newest_first else "jobs"
    return PagedList((kind, tenant, state.value if state else ""), (int, str))


def history_list(kind: type[TableRecord], job_id: str, up_to: int | None) -> PagedList:
    """Return the list of a job's records of one kind; position: number."""
    return PagedList((kind.KIND, job_id, "" if up_to is None else str(up_to)), (int,))


def keys_list(tenant: str) -> PagedList:
    """Return the list of a tenant's API keys; position: created_at, id."""
    return PagedList(("keys", tenant), (int, str))


def deliveries_list(webhook_id: str) -> PagedList:
    """Return the list of a webhook's deliveries; position: the event's instant, job, seq."""
    return PagedList(("deliveries", webhook_id), (int, str, int))


def recipes_list(tenant: str) -> PagedList:
    """Return the list of a tenant's recipes; position: name, version."""
    return PagedList(("recipes", tenant), (str, int))


def rings_list(tenant: str) -> PagedList:
    """Return the list of a tenant's rings; position: name."""
    return PagedList(("rings", tenant), (str,))


def ring_keys_list(ring_id: str, prefix: str) -> PagedList:
    """Return the list of a ring's records with a key prefix; position: key."""
    return PagedList(("ring", ring_id, prefix), (str,))


def objects_list(tenant: str, bucket: str, prefix: str) -> PagedList:
    """Return the list of objects with a key prefix; position: key."""
    return PagedList(("objects", tenant, bucket, prefix), (str,))


def page(
    found: Sequence[T], limit: int, listed: PagedList, position_of: Callable[[T], Sequence[str | int]]
) -> ResultPage[T]:
    """Build a page from up to `limit + 1` found items; the extra item only shows that another page follows."""
    if len(found) <= limit:
        return ResultPage(list(found))
    return ResultPage(list(found[:limit]), cursors.encode(listed.name, position_of(found[limit - 1])))
