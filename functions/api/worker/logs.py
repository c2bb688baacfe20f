"""A job's output: chunks of lines and metric points in the object store.

The names of the chunks sort in the order of the output. A chunk contains printed lines, reported points, or both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from baton.contract.base import Cursor, Epoch, PageLimit, WireModel
from baton.contract.elastic.nodes import MAX_NODES
from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.worker.calls import StatusAnswer
from baton.contract.worker.output import LogChunk, LogLine, LogPage, MetricPage, MetricPoint, ReportedPoint
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.http.paging import count_sent_bytes
from functions.api.worker.lease_guard import require_lease
from functions.domain.checkpoints.object_keys import logs_prefix
from functions.domain.errors import Refusal
from functions.domain.records import Job
from functions.domain.worlds.seat_ids import seat_id

_CURSOR = re.compile(r"([0-9a-f]{8})-(m-)?([0-9]{10}-[0-9]{13}(?:-[0-9]{13}[lpb])?)-([0-9]{1,6})")
_NAMES_PER_PAGE = 999
_CHUNKS_PER_PAGE = 20
_FIRST_CHUNKS = 400
_FIRST_BYTES = 16_000_000
_PAGE_BYTES = 4_000_000
"""Size after which a page ends; Lambda's answers end at 6 MB."""

E = TypeVar("E")


class _ItemKind(NamedTuple):
    """Lines or points. `letters`: the name endings of the chunks that contain the kind; `mark`: the mark in cursors."""

    letters: tuple[str, str]
    mark: str


POINT_LETTERS = ("p", "b")
"""Last letters of the names of chunks that contain points."""
_LINES, _POINTS = _ItemKind(("l", "b"), ""), _ItemKind(POINT_LETTERS, "m-")


class LogsQuery(WireModel):
    """Query of `GET /job/{id}/logs` and `/metrics`. Example: `?limit=500`"""

    limit: PageLimit = 500
    cursor: Cursor | None = None
    seat: Annotated[int, Field(ge=0, le=MAX_NODES - 1)] | None = None
    """Node of an elastic job; unset: all nodes, one after the other."""
    from_attempt: Epoch = 0
    """Attempt with which the first page begins; a page behind a cursor continues the page before."""


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
    key = f"{logs_prefix(job_id)}{_name_chunk(chunk)}"
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


def read_first_points(context: Context, tenant: str, job_id: str, limit: int) -> tuple[list[MetricPoint], bool]:
    """Return the first points of a job, in reported order, and True if the job has no further ones.

    At most `_FIRST_CHUNKS` chunks are read, and no chunk after `_FIRST_BYTES`.
    """
    prefix = logs_prefix(job_id)
    names = _list_names(context, tenant, prefix, "0" * 10, POINT_LETTERS)
    points: list[MetricPoint] = []
    size_bytes = chunks = 0
    while batch := [prefix + name for name in islice(names, _CHUNKS_PER_PAGE)]:
        if len(points) > limit or chunks >= _FIRST_CHUNKS or size_bytes > _FIRST_BYTES:
            return points[:limit], False
        found = context.objects.read_many(tenant, CHECKPOINTS_BUCKET, batch)
        chunks += len(batch)
        for data in (found[key] for key in batch if key in found):
            size_bytes += len(data)
            points += _slice_points(_StoredChunk.model_validate_json(data), None, 0, limit + 1)
    return points[:limit], len(points) <= limit


def _name_chunk(chunk: _StoredChunk) -> str:
    """Return the name of a chunk, which sorts after all earlier chunks of its attempt.

    The last letter names the content, so that a reader of points skips chunks with lines only.
    """
    name = f"{chunk.epoch:010d}-{chunk.first_line:013d}"
    if not chunk.points and not chunk.first_point:
        return name
    letter = "b" if chunk.points and chunk.lines else "p" if chunk.points else "l"
    return f"{name}-{chunk.first_point:013d}{letter}"


def _slice_lines(chunk: _StoredChunk, seat: int | None, skip: int, limit: int) -> list[LogLine]:
    return [
        LogLine(epoch=chunk.epoch, line=chunk.first_line + skip + offset, text=text, at=chunk.at, seat=seat)
        for offset, text in enumerate(chunk.lines[skip : skip + limit])
    ]


def _slice_points(chunk: _StoredChunk, seat: int | None, skip: int, limit: int) -> list[MetricPoint]:
    return [
        MetricPoint(epoch=chunk.epoch, step=point.step, at=point.at, metrics=point.metrics, seat=seat)
        for point in chunk.points[skip : skip + limit]
    ]


def _read_page(
    context: Context,
    call: ApiCall,
    kind: _ItemKind,
    items_of: Callable[[_StoredChunk, int | None, int, int], list[E]],
    text_of: Callable[[E], str],
) -> tuple[list[E], str | None]:
    """Return the next items and the cursor. `text_of`: the part of an item that may be large, as JSON."""
    query: LogsQuery = call.query
    owners = choose_owners(require_job(context, call, call.path["id"]), query.seat)
    skip, chunks = _list_chunks(context, call, owners, kind)
    items: list[E] = []
    cursor = query.cursor
    room_bytes = _PAGE_BYTES
    for seat, owner, name in islice(chunks, _CHUNKS_PER_PAGE + 1):
        data = context.objects.read(call.tenant, CHECKPOINTS_BUCKET, f"{logs_prefix(owner)}{name}")
        chunk = _StoredChunk.model_validate_json(data) if data else None
        if chunk is None:
            skip = 0
            continue
        found = items_of(chunk, seat, skip, query.limit - len(items))
        # In an answer each control character of the output takes seven bytes.
        ends_bytes = [0, *accumulate(count_sent_bytes(text_of(item)) for item in found)]
        taken = [item for item, before in zip(found, ends_bytes, strict=False) if before < room_bytes]
        items += taken
        room_bytes -= ends_bytes[len(taken)]
        cursor = f"{owner[:8]}-{kind.mark}{name}-{skip + len(taken)}"
        skip = 0
        if len(items) >= query.limit or room_bytes <= 0:
            break
    return items, cursor


def choose_owners(job: Job, seat: int | None) -> list[tuple[int | None, str]]:
    """Return the jobs that have produced the output: the job itself, or one seat or all seats of an elastic job."""
    nodes = job.spec.nodes
    if nodes is None:
        if seat is not None:
            raise Refusal(ErrorCode.NOT_ELASTIC, f"Job {job.id} has no nodes.", field="seat", remedy="Omit seat.")
        return [(None, job.id)]
    if (seat or 0) >= nodes.max:
        detail = f"Job {job.id} has no node {seat}."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="seat", remedy=f"The nodes are 0 to {nodes.max - 1}.")
    return [(place, seat_id(job.id, place)) for place in (range(nodes.max) if seat is None else [seat])]


def _list_chunks(
    context: Context, call: ApiCall, owners: Sequence[tuple[int | None, str]], kind: _ItemKind
) -> tuple[int, Iterator[tuple[int | None, str, str]]]:
    """Return the items to skip in the first chunk, and seat, owner and name of each chunk from the cursor on."""
    query: LogsQuery = call.query
    begun, known, skip = _parse_cursor(query.cursor, kind)
    places = [place for place, (_, owner) in enumerate(owners) if begun in (None, owner[:8])]
    if not places:
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")

    def chunks() -> Iterator[tuple[int | None, str, str]]:
        # The names of all chunks of an attempt begin with its number.
        first = f"{query.from_attempt:010d}"
        after = known
        for seat, owner in owners[places[0] :]:
            if after is not None:
                yield seat, owner, after  # the last page may have taken only a part of the chunk
            names = _list_names(context, call.tenant, logs_prefix(owner), after or first, kind.letters)
            yield from ((seat, owner, name) for name in names)
            after = None

    return skip, chunks()


def _list_names(context: Context, tenant: str, prefix: str, after: str, letters: tuple[str, str]) -> Iterator[str]:
    """Yield the names of the chunks behind a name, in order. A name without a letter is a chunk of lines."""
    while True:
        page = context.objects.list(tenant, CHECKPOINTS_BUCKET, prefix, limit=_NAMES_PER_PAGE, after=prefix + after)
        for entry in page.items:
            after = entry.key.removeprefix(prefix)
            if (after[-1] if after[-1] in "lpb" else "l") in letters:
                yield after
        if page.cursor is None or not page.items:
            return


def _parse_cursor(cursor: str | None, kind: _ItemKind) -> tuple[str | None, str | None, int]:
    """Return the begin of the owner's id, the last chunk of the page before, and the number of its items there."""
    if cursor is None:
        return None, None, 0
    found = _CURSOR.fullmatch(cursor)
    if found is None or (found[2] or "") != kind.mark:
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    return found[1], found[3], int(found[4])
