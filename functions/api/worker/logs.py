"""A job's output: chunks of lines and metric points in the object store.

The names of the chunks sort in the order of the output. A chunk contains printed lines, reported points, or both.
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
from baton.contract.worker.calls import StatusAnswer
from baton.contract.worker.output import LogChunk, LogLine, LogPage, MetricPage, MetricPoint, ReportedPoint
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.http.paging import count_sent_bytes
from functions.api.worker.lease_guard import require_lease
from functions.domain.checkpoints.object_keys import job_prefix
from functions.domain.errors import Refusal

_CURSOR = re.compile(r"([0-9a-f]{8})-(m-)?([0-9]{10}-[0-9]{13}(?:-[0-9]{13}[lpb])?)-([0-9]{1,6})")
_NAMES_PER_PAGE = 999
_CHUNKS_PER_PAGE = 20
_PAGE_BYTES = 4_000_000
"""Size after which a page ends; Lambda's answers end at 6 MB."""

E = TypeVar("E")


class _ItemKind(NamedTuple):
    """Lines or points. `letters`: the name endings of the chunks that contain the kind; `mark`: the mark in cursors."""

    letters: tuple[str, str]
    mark: str


_LINES, _POINTS = _ItemKind(("l", "b"), ""), _ItemKind(("p", "b"), "m-")


class LogsQuery(WireModel):
    """Query of `GET /job/{id}/logs` and `/metrics`. Example: `?limit=500`"""

    limit: PageLimit = 500
    cursor: Cursor | None = None


class _StoredChunk(BaseModel):
    """Chunk of output as stored."""

    epoch: int
    first_line: int
    at: int
    lines: list[str] = Field(default_factory=list)
    dropped_bytes: int = 0
    first_point: int = 0
    points: list[ReportedPoint] = Field(default_factory=list)


def append(context: Context, call: ApiCall) -> StatusAnswer:
    """Store a chunk of output; idempotent."""
    body: LogChunk = call.body
    job_id = call.path["id"]
    try:
        lease = require_lease(context, call.fence(job_id))
    except Refusal:
        # Only a refused call reads the job: a proved lease shows that the job exists.
        require_job(context, call, job_id)
        raise
    chunk = _StoredChunk(
        epoch=lease.epoch,
        first_line=body.first_line,
        at=call.now,
        lines=body.lines,
        dropped_bytes=body.dropped_bytes,
        first_point=body.first_point,
        points=body.points,
    )
    key = f"{job_prefix(job_id)}logs/{_name_chunk(chunk)}"
    context.objects.create(call.tenant, CHECKPOINTS_BUCKET, key, chunk.model_dump_json().encode())
    return StatusAnswer()


def read(context: Context, call: ApiCall) -> LogPage:
    """List lines of output, oldest first, across attempts. Poll with `next_cursor` to follow."""
    lines, cursor = _read_page(
        context, call, _LINES, _slice_lines, lambda line: json.dumps(line.text, ensure_ascii=False)
    )
    return LogPage(lines=lines, next_cursor=cursor)


def read_points(context: Context, call: ApiCall) -> MetricPage:
    """List reported metric points, oldest first, across attempts. Poll with `next_cursor` to follow."""
    points, cursor = _read_page(context, call, _POINTS, _slice_points, MetricPoint.model_dump_json)
    return MetricPage(points=points, next_cursor=cursor)


def _name_chunk(chunk: _StoredChunk) -> str:
    """Return the name of a chunk, which sorts after all earlier chunks of its attempt.

    The last letter names the content, so that a reader of points skips chunks with lines only.
    """
    name = f"{chunk.epoch:010d}-{chunk.first_line:013d}"
    if not chunk.points and not chunk.first_point:
        return name
    letter = "b" if chunk.points and chunk.lines else "p" if chunk.points else "l"
    return f"{name}-{chunk.first_point:013d}{letter}"


def _slice_lines(chunk: _StoredChunk, skip: int, limit: int) -> list[LogLine]:
    return [
        LogLine(epoch=chunk.epoch, line=chunk.first_line + skip + offset, text=text, at=chunk.at)
        for offset, text in enumerate(chunk.lines[skip : skip + limit])
    ]


def _slice_points(chunk: _StoredChunk, skip: int, limit: int) -> list[MetricPoint]:
    return [
        MetricPoint(epoch=chunk.epoch, step=point.step, at=point.at, metrics=point.metrics)
        for point in chunk.points[skip : skip + limit]
    ]


def _read_page(
    context: Context,
    call: ApiCall,
    kind: _ItemKind,
    items_of: Callable[[_StoredChunk, int, int], list[E]],
    text_of: Callable[[E], str],
) -> tuple[list[E], str | None]:
    """Return the next items and the cursor. `text_of`: the part of an item that may be large, as JSON."""
    query: LogsQuery = call.query
    job = require_job(context, call, call.path["id"])
    prefix = f"{job_prefix(job.id)}logs/"
    known, skip = _parse_cursor(job.id, query.cursor, kind)
    items: list[E] = []
    cursor = query.cursor
    room_bytes = _PAGE_BYTES
    for name in islice(_list_names(context, call, prefix, known, kind.letters), _CHUNKS_PER_PAGE + 1):
        data = context.objects.read(call.tenant, CHECKPOINTS_BUCKET, prefix + name)
        chunk = _StoredChunk.model_validate_json(data) if data else None
        if chunk is None:
            skip = 0
            continue
        found = items_of(chunk, skip, query.limit - len(items))
        # In an answer each control character of the output takes seven bytes.
        ends_bytes = [0, *accumulate(count_sent_bytes(text_of(item)) for item in found)]
        taken = [item for item, before in zip(found, ends_bytes, strict=False) if before < room_bytes]
        items += taken
        room_bytes -= ends_bytes[len(taken)]
        cursor = f"{job.id[:8]}-{kind.mark}{name}-{skip + len(taken)}"
        skip = 0
        if len(items) >= query.limit or room_bytes <= 0:
            break
    return items, cursor


def _list_names(
    context: Context, call: ApiCall, prefix: str, known: str | None, letters: tuple[str, str]
) -> Iterator[str]:
    """Yield the names of the chunks to read, in order. A name without a letter is a chunk of lines."""
    if known is not None:
        yield known  # the last page may have taken only a part of the chunk
    after = known
    while True:
        page = context.objects.list(
            call.tenant,
            CHECKPOINTS_BUCKET,
            prefix,
            limit=_NAMES_PER_PAGE,
            after=None if after is None else prefix + after,
        )
        for entry in page.items:
            after = entry.key.removeprefix(prefix)
            if (after[-1] if after[-1] in "lpb" else "l") in letters:
                yield after
        if page.cursor is None or not page.items:
            return


def _parse_cursor(job_id: str, cursor: str | None, kind: _ItemKind) -> tuple[str | None, int]:
    """Return the last chunk of the page before, and the number of its items in that page."""
    if cursor is None:
        return None, 0
    found = _CURSOR.fullmatch(cursor)
    if found is None or found[1] != job_id[:8] or (found[2] or "") != kind.mark:
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    return found[3], int(found[4])
