"""Outputs that complete jobs publish for later jobs, and the shared inputs of a job.

A shared input is an output of an earlier job, or a part that an earlier attempt at the same job has stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from baton.contract.names import CHECKPOINTS_BUCKET, SHARED_DIR
from baton.contract.worker.calls import InputObject
from functions.api.http.context import ApiCall, Context
from functions.domain.checkpoints.object_keys import artifacts_prefix
from functions.domain.checkpoints.shared_outputs import may_have_parts, part_of, shared_records, should_replace
from functions.domain.errors import StorageUnavailable
from functions.domain.ports import StoredObject
from functions.domain.records import Job

MAX_PARTS = 500
"""Limit of the parts in an answer: each part has a URL of up to 2 KB, and an answer is limited to 6 MB."""
_KEYS_PER_PAGE = 999
"""Keys of a page: the store requests one more, and S3 lists at most 1,000."""
_MAX_PAGES = 10
"""Limit of the pages, because a worker waits for the answer. Before its first checkpoint a job stores far fewer
outputs."""

logger = logging.getLogger("baton.sharing")


def publish(context: Context, call: ApiCall, job: Job) -> None:
    """Publish the complete job's shared outputs for later jobs.

    A failure is logged, because the job is complete and later jobs can produce the outputs themselves.
    """
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
                # After a conflict the output of the other job is equivalent.
                context.shared.replace(record, seen=seen)
    except StorageUnavailable as error:
        logger.warning("the job's shared outputs are not published: %s", error, extra={"job_id": job.id})


def list_available_inputs(context: Context, call: ApiCall, job: Job) -> list[InputObject]:
    """List the shared outputs of earlier jobs, then the parts of earlier attempts at this job, with URLs."""
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
    ] + _list_parts(context, call, job)


def _list_parts(context: Context, call: ApiCall, job: Job) -> list[InputObject]:
    """List the parts of earlier attempts, newest attempt first.

    Attempts never store a part twice, because each attempt receives the stored parts. Only a job that may have parts
    costs a listing, usually of one page.
    """
    if not may_have_parts(job):
        return []
    found = [(part, one) for one in _list_artifacts(context, call, job) if (part := part_of(job, one.key)) is not None]
    # Sorted by number, because in the order of keys attempt 10 comes before attempt 2.
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


def _list_artifacts(context: Context, call: ApiCall, job: Job) -> Iterator[StoredObject]:
    """Yield the stored outputs of the job's attempts."""
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = context.objects.list(
            call.tenant, CHECKPOINTS_BUCKET, artifacts_prefix(job.id), limit=_KEYS_PER_PAGE, cursor=cursor
        )
        yield from page.items
        cursor = page.cursor
        if cursor is None:
            return
    logger.warning("the job has too many outputs to search all for shared parts", extra={"job_id": job.id})
