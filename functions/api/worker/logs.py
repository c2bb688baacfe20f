"""A job's output: small chunks in the object store, named so that listing them is reading in order.

Each has lines that were printed, points that were reported, or both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, Field

from baton.contract.base import Cursor, PageLimit, WireModel
from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.output import LogChunk, LogLine, LogPage, MetricPage, MetricPoint, ReportedPoint
from baton.contract.work import StatusAnswer
from functions.api.http.context import Call, Context, job_of
from functions.api.http.paging import sent_bytes
from functions.api.worker.lease_guard import require_lease
from functions.domain.checkpoints.object_keys import job_prefix
from functions.domain.errors import Refusal

_CURSOR = re.compile(r"([0-9a-f]{8})-(m-)?([0-9]{10}-[0-9]{13}(?:-[0-9]{13}[lpb])?)-([0-9]{1,6})")
_LISTED = 999
_CHUNKS_PER_PAGE = 20
_PAGE_BYTES = 4_000_000
"""A page ends once its items take more in an answer. Lambda's end at 6 MB."""

E = TypeVar("E")


class _Kind(NamedTuple):
    """What is read. `letters` are those of the chunks that have some, `mark` is that of its cursors."""

    letters: tuple[str, str]
    mark: str


_LINES, _POINTS = _Kind(("l", "b"), ""), _Kind(("p", "b"), "m-")


class LogsQuery(WireModel):
    """Query of `GET /job/{id}/logs` and `/metrics`. Example: `?limit=500`"""

    limit: PageLimit = 500
    cursor: Cursor | None = None


class _Stored(BaseModel):
    """One chunk at rest."""

    epoch: int
    first_line: int
    at: int
    lines: list[str] = Field(default_factory=list)
    dropped_bytes: int = 0
    first_point: int = 0
    points: list[ReportedPoint] = Field(default_factory=list)


def append(context: Context, call: Call) -> StatusAnswer:
    """Store a chunk of output; the same chunk sent again changes nothing."""
    body: LogChunk = call.body
    job_id = call.path["id"]
    try:
        lease = require_lease(context, call.fence(job_id))
    except Refusal:
        # Only who is refused is told whether there is such a job: a lease that is proved belongs to one.
        job_of(context, call, job_id)
        raise
    chunk = _Stored(
        epoch=lease.epoch,
        first_line=body.first_line,
        at=call.now,
        lines=body.lines,
        dropped_bytes=body.dropped_bytes,
        first_point=body.first_point,
        points=body.points,
    )
    key = f"{job_prefix(job_id)}logs/{_name_of(chunk)}"
    context.objects.create(call.tenant, CHECKPOINTS_BUCKET, key, chunk.model_dump_json().encode())
    return StatusAnswer()


def read(context: Context, call: Call) -> LogPage:
    """Lines of output, oldest first, across attempts. Poll with `next_cursor` to follow."""
    lines, cursor = _page(context, call, _LINES, _lines_of, lambda line: json.dumps(line.text, ensure_ascii=False))
    return LogPage(lines=lines, next_cursor=cursor)


def read_points(context: Context, call: Call) -> MetricPage:
    """What the training reported, oldest first, across attempts. Poll with `next_cursor` to follow."""
    points, cursor = _page(context, call, _POINTS, _points_of, MetricPoint.model_dump_json)
    return MetricPage(points=points, next_cursor=cursor)


def _name_of(chunk: _Stored) -> str:
    """Sorts behind all earlier chunks of its attempt, also those of which it continues only lines or only points.

    The letter says what is in it, so that who looks for points need not read chunks that have only lines.
    """
    name = f"{chunk.epoch:010d}-{chunk.first_line:013d}"
    if not chunk.points and not chunk.first_point:
        return name
    letter = "b" if chunk.points and chunk.lines else "p" if chunk.points else "l"
    return f"{name}-{chunk.first_point:013d}{letter}"


def _lines_of(chunk: _Stored, skip: int, limit: int) -> list[LogLine]:
    return [
        LogLine(epoch=chunk.epoch, line=chunk.first_line + skip + offset, text=text, at=chunk.at)
        for offset, text in enumerate(chunk.lines[skip : skip + limit])
    ]


def _points_of(chunk: _Stored, skip: int, limit: int) -> list[MetricPoint]:
    return [
        MetricPoint(epoch=chunk.epoch, step=point.step, at=point.at, metrics=point.metrics)
        for point in chunk.points[skip : skip + limit]
    ]


def _page(
    context: Context,
    call: Call,
    kind: _Kind,
    items_of: Callable[[_Stored, int, int], list[E]],
    text_of: Callable[[E], str],
) -> tuple[list[E], str | None]:
    """The next items, and where to go on. `text_of`: what of an item may be large, as JSON."""
    query: LogsQuery = call.query
    job = job_of(context, call, call.path["id"])
    prefix = f"{job_prefix(job.id)}logs/"
    known, skip = _position(job.id, query.cursor, kind)
    items: list[E] = []
    cursor = query.cursor
    room_bytes = _PAGE_BYTES
    for name in islice(_names(context, call, prefix, known, kind.letters), _CHUNKS_PER_PAGE + 1):
        data = context.objects.read(call.tenant, CHECKPOINTS_BUCKET, prefix + name)
        chunk = _Stored.model_validate_json(data) if data else None
        if chunk is None:
            skip = 0
            continue
        found = items_of(chunk, skip, query.limit - len(items))
        # Output may be full of control characters, each of which takes seven bytes.
        ends_bytes = [0, *accumulate(sent_bytes(text_of(item)) for item in found)]
        taken = [item for item, before in zip(found, ends_bytes, strict=False) if before < room_bytes]
        items += taken
        room_bytes -= ends_bytes[len(taken)]
        cursor = f"{job.id[:8]}-{kind.mark}{name}-{skip + len(taken)}"
        skip = 0
        if len(items) >= query.limit or room_bytes <= 0:
            break
    return items, cursor


def _names(context: Context, call: Call, prefix: str, known: str | None, letters: tuple[str, str]) -> Iterator[str]:
    """Of the chunks to read, in order. Older ones have no letter, and lines."""
    if known is not None:
        yield known  # it may have more than the last page took
    after = known
    while True:
        page = context.objects.list(
            call.tenant,
            CHECKPOINTS_BUCKET,
            prefix,
            limit=_LISTED,
            after=None if after is None else prefix + after,
        )
        for entry in page.items:
            after = entry.key.removeprefix(prefix)
            if (after[-1] if after[-1] in "lpb" else "l") in letters:
                yield after
        if page.cursor is None or not page.items:
            return


def _position(job_id: str, cursor: str | None, kind: _Kind) -> tuple[str | None, int]:
    """The chunk that the page before ended in, and how many of its items are known."""
    if cursor is None:
        return None, 0
    found = _CURSOR.fullmatch(cursor)
    if found is None or found[1] != job_id[:8] or (found[2] or "") != kind.mark:
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    return found[3], int(found[4])
