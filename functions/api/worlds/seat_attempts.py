"""Read the attempts at all seats of an elastic job."""

from __future__ import annotations

import re

from baton.contract.errors import ErrorCode
from functions.api.http.context import Context
from functions.domain.errors import Refusal
from functions.domain.ports import ResultPage
from functions.domain.records import Attempt, Job
from functions.domain.worlds.seat_ids import seat_id

_CURSOR = re.compile(r"([0-9]{1,2})\.(.*)")


def read_seat_attempts(context: Context, job: Job, limit: int, cursor: str | None) -> ResultPage[tuple[int, Attempt]]:
    """Return attempts with their seats, seat by seat. A cursor is a seat and the cursor of the seat's own list."""
    place, inner = 0, None
    if cursor is not None:
        found = _CURSOR.fullmatch(cursor)
        if found is None or int(found[1]) >= len(job.seats):
            raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
        place, inner = int(found[1]), found[2] or None
    items: list[tuple[int, Attempt]] = []
    while place < len(job.seats) and len(items) < limit:
        inner_id = seat_id(job.id, place)
        page = context.jobs.history(Attempt, inner_id, limit=limit - len(items), cursor=inner)
        items += [(place, attempt) for attempt in page.items]
        inner = page.cursor
        place += inner is None
    return ResultPage(items, f"{place}.{inner or ''}" if place < len(job.seats) else None)
