"""A job's output: small chunks in the object store, named so that listing them is reading in order."""

from __future__ import annotations

import json
import re
from itertools import accumulate

from pydantic import BaseModel, Field

from contract.base import Cursor, PageLimit, WireModel
from contract.errors import ErrorCode
from contract.names import CHECKPOINTS_BUCKET
from contract.work import LogChunk, LogLine, LogPage, StatusAnswer
from functions.api.context import Call, Context, job_of
from functions.api.leasing import require_lease
from functions.api.paging import sent_bytes
from functions.domain.checkpoints import job_prefix
from functions.domain.errors import Refusal

_CURSOR = re.compile(r"([0-9a-f]{8})-([0-9]{10}-[0-9]{13})-([0-9]{1,6})")
_CHUNKS_PER_PAGE = 20
_PAGE_BYTES = 4_000_000
"""A page ends once its lines take more in an answer. Lambda's end at 6 MB."""


class LogsQuery(WireModel):
    """Query of `GET /job/{id}/logs`. Example: `?limit=500`"""

    limit: PageLimit = 500
    cursor: Cursor | None = None


class _Stored(BaseModel):
    """One chunk at rest."""

    epoch: int
    first_line: int
    at: int
    lines: list[str] = Field(default_factory=list)
    dropped_bytes: int = 0


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
    )
    key = f"{job_prefix(job_id)}logs/{lease.epoch:010d}-{body.first_line:013d}"
    context.objects.create(call.tenant, CHECKPOINTS_BUCKET, key, chunk.model_dump_json().encode())
    return StatusAnswer()


def read(context: Context, call: Call) -> LogPage:
    """Lines of output, oldest first, across attempts. Poll with `next_cursor` to follow."""
    query: LogsQuery = call.query
    job = job_of(context, call, call.path["id"])
    prefix = f"{job_prefix(job.id)}logs/"
    chunk_name, skip = _position(job.id, query.cursor)
    # The chunk that the last page ended in may have more lines: it is read again first.
    names = [chunk_name] if chunk_name else []
    page = context.objects.list(
        call.tenant,
        CHECKPOINTS_BUCKET,
        prefix,
        limit=_CHUNKS_PER_PAGE,
        after=f"{prefix}{chunk_name}" if chunk_name else None,
    )
    names += [entry.key.removeprefix(prefix) for entry in page.items]
    lines: list[LogLine] = []
    cursor = query.cursor
    room_bytes = _PAGE_BYTES
    for name in names:
        data = context.objects.read(call.tenant, CHECKPOINTS_BUCKET, prefix + name)
        chunk = _Stored.model_validate_json(data) if data else None
        if chunk is None:
            skip = 0
            continue
        texts = chunk.lines[skip : skip + query.limit - len(lines)]
        # Output may be full of control characters, each of which takes seven bytes.
        ends_bytes = [0, *accumulate(sent_bytes(json.dumps(text, ensure_ascii=False)) for text in texts)]
        taken = [text for text, before in zip(texts, ends_bytes, strict=False) if before < room_bytes]
        lines += [
            LogLine(epoch=chunk.epoch, line=chunk.first_line + skip + offset, text=text, at=chunk.at)
            for offset, text in enumerate(taken)
        ]
        room_bytes -= ends_bytes[len(taken)]
        cursor = f"{job.id[:8]}-{name}-{skip + len(taken)}"
        skip = 0
        if len(lines) >= query.limit or room_bytes <= 0:
            break
    return LogPage(lines=lines, next_cursor=cursor)


def _position(job_id: str, cursor: str | None) -> tuple[str | None, int]:
    """The chunk that the page before ended in, and how many of its lines are known."""
    if cursor is None:
        return None, 0
    found = _CURSOR.fullmatch(cursor)
    if found is None or found[1] != job_id[:8]:
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    return found[2], int(found[3])
