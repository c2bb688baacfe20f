"""What a complete job leaves for later ones; what a job is given of that, and of what its own attempts have left."""

from __future__ import annotations

import logging

from contract.names import CHECKPOINTS_BUCKET, SHARED_DIR
from contract.work import InputObject
from functions.api.context import Call, Context
from functions.domain.checkpoints import artifacts_prefix
from functions.domain.errors import StorageUnavailable
from functions.domain.records import Job
from functions.domain.sharing import may_have_parts, offered, part_path, replaces

MAX_PARTS = 500
"""Each has a URL, which may take 2 KB: an answer holds so many."""

logger = logging.getLogger("baton.sharing")


def offer(context: Context, call: Call, job: Job) -> None:
    """Offer what the complete job has left to later ones. A failure is logged: the job is complete, and others can do
    without."""
    new = offered(job, call.now)
    if not new:
        return
    try:
        there = context.shared.get_many(call.tenant, [record.key for record in new])
        known = [record.object_key for record in there.values()]
        stored = context.objects.head_many(call.tenant, CHECKPOINTS_BUCKET, known)
        for record in new:
            seen = there.get(record.key)
            is_stored = seen is not None and seen.object_key in stored
            if replaces(record, seen, stored=is_stored, started_at=job.started_at or 0):
                # Where another job was faster, its offer is as good.
                context.shared.replace(record, seen=seen)
    except StorageUnavailable as error:
        logger.warning("what the job shares is not offered: %s", error, extra={"job_id": job.id})


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
    """One list in the store, and only where there may be any. Without a checkpoint a job has shown little else."""
    if not may_have_parts(job):
        return []
    listed = context.objects.list(call.tenant, CHECKPOINTS_BUCKET, artifacts_prefix(job.id), limit=MAX_PARTS)
    return [
        InputObject(
            key=one.key,
            path=f"{SHARED_DIR}/{path}",
            size_bytes=one.size_bytes,
            etag=one.etag,
            url=context.objects.presign_get(
                call.tenant, CHECKPOINTS_BUCKET, one.key, expires_s=context.settings.url_life_s
            ),
            shared=True,
        )
        for one in listed.items
        if (path := part_path(job, one.key)) is not None
    ]
