"""What a complete job leaves for later ones; what a job is given of that, and of what its own attempts have left."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from baton.contract.names import CHECKPOINTS_BUCKET, SHARED_DIR
from baton.contract.work import InputObject
from functions.api.http.context import Call, Context
from functions.domain.checkpoints.object_keys import artifacts_prefix
from functions.domain.checkpoints.shared_outputs import may_have_parts, part_of, shared_records, should_replace
from functions.domain.errors import StorageUnavailable
from functions.domain.ports import StoredObject
from functions.domain.records import Job

MAX_PARTS = 500
"""Each has a URL, which may take 2 KB: an answer holds so many."""
_KEYS_PER_PAGE = 999
"""One more is asked for, and S3 lists no more than 1,000 at once."""
_MAX_PAGES = 10
"""A worker waits for them. No job shows so much before its first checkpoint, unless it shows files without end."""

logger = logging.getLogger("baton.sharing")


def offer(context: Context, call: Call, job: Job) -> None:
    """Offer what the complete job has left to later ones. A failure is logged: the job is complete, and others can do
    without."""
    new = shared_records(job, call.now)
    if not new:
        return
    try:
        there = context.shared.get_many(call.tenant, [record.key for record in new])
        known = [record.object_key for record in there.values()]
        stored = context.objects.head_many(call.tenant, CHECKPOINTS_BUCKET, known)
        for record in new:
            seen = there.get(record.key)
            is_stored = seen is not None and seen.object_key in stored
            if should_replace(record, seen, stored=is_stored, started_at=job.started_at or 0):
                # Where another job was faster, its offer is as good.
                context.shared.replace(record, seen=seen)
    except StorageUnavailable as error:
        logger.warning("what the job shares is not shared_records: %s", error, extra={"job_id": job.id})


def given(context: Context, call: Call, job: Job) -> list[InputObject]:
    """What earlier jobs have left for this one and is stored as they left it, and behind it the parts that earlier
    attempts at this one have made, with URLs."""
    wanted = {shared.key: shared.path for shared in job.spec.plan.shared} if job.spec.plan else {}
    if not wanted:
        return []
    records = context.shared.get_many(call.tenant, list(wanted))
    stored = context.objects.head_many(
        call.tenant, CHECKPOINTS_BUCKET, [record.object_key for record in records.values()]
    )
    return [
        InputObject(
            key=record.object_key,
            path=f"{SHARED_DIR}/{wanted[record.key]}",
            size_bytes=record.size_bytes,
            etag=stored[record.object_key].etag,
            url=context.objects.presign_get(
                call.tenant, CHECKPOINTS_BUCKET, record.object_key, expires_s=context.settings.url_life_s
            ),
            blake3=record.blake3,
            shared=True,
        )
        for record in records.values()
        if record.object_key in stored
    ] + _parts(context, call, job)


def _parts(context: Context, call: Call, job: Job) -> list[InputObject]:
    """Those of the newest attempts: each is given what there is, so what it has shown is none of that.

    Listed only where there may be any. Without a checkpoint a job has shown little else: one page, as a rule.
    """
    if not may_have_parts(job):
        return []
    found = [(part, one) for one in _artifacts(context, call, job) if (part := part_of(job, one.key)) is not None]
    # In the order of their keys attempt 10 comes before attempt 2.
    found.sort(key=lambda part_and_object: -part_and_object[0].epoch)
    return [
        InputObject(
            key=one.key,
            path=f"{SHARED_DIR}/{part.path}",
            size_bytes=one.size_bytes,
            etag=one.etag,
            url=context.objects.presign_get(
                call.tenant, CHECKPOINTS_BUCKET, one.key, expires_s=context.settings.url_life_s
            ),
            shared=True,
        )
        for part, one in found[:MAX_PARTS]
    ]


def _artifacts(context: Context, call: Call, job: Job) -> Iterator[StoredObject]:
    """What attempts at the job have stored of outputs."""
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = context.objects.list(
            call.tenant, CHECKPOINTS_BUCKET, artifacts_prefix(job.id), limit=_KEYS_PER_PAGE, cursor=cursor
        )
        yield from page.items
        cursor = page.cursor
        if cursor is None:
            return
    logger.warning("not all that the job has shown is looked at for its parts", extra={"job_id": job.id})
