"""The input files of a running job, for the worker that holds it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from baton.contract.base import WireModel
from baton.contract.datasets import DATASET_MANIFEST
from baton.contract.errors import ErrorCode
from baton.contract.names import DATA_BUCKET, RINGS_PREFIX, in_a_ring
from baton.contract.work import InputObject, InputPage, PushManifest
from functions.api.http.context import Call, Context, job_of
from functions.api.objects.shared_outputs import given
from functions.api.worker.lease_guard import require_lease
from functions.domain.errors import Refusal
from functions.domain.jobs.transitions import require_running
from functions.domain.records import Job

_INPUTS_PER_PAGE = 500
_INPUTS_CURSOR = re.compile(r"([0-9a-f]{8})\.([0-9]{1,4})\.(.*)", re.DOTALL)


class InputsQuery(WireModel):
    """Query of `GET /job/{id}/inputs`: the `next_cursor` of the page before.

    A cursor holds a prefix and a key, of up to 900 bytes each, in base64.
    """

    cursor: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


def list_inputs(context: Context, call: Call) -> InputPage:
    """A running job's input files with URLs, for the worker that holds it; last of all what other jobs have shared."""
    query: InputsQuery = call.query
    job = job_of(context, call, call.path["id"])
    require_running(job)
    require_lease(context, call.fence(job.id))
    life_s = context.settings.url_life_s
    expires_at = call.now + life_s
    number, cursor = _inputs_position(job, query.cursor)
    refs = job.spec.inputs
    if not refs:
        return InputPage(inputs=given(context, call, job), expires_at=expires_at)
    ref = refs[number]
    page = context.objects.list(call.tenant, DATA_BUCKET, ref.prefix, limit=_INPUTS_PER_PAGE, cursor=cursor)
    inputs = [
        InputObject(
            key=item.key,
            path=_input_path(ref.prefix, ref.into, item.key),
            size_bytes=item.size_bytes,
            etag=item.etag,
            url=context.objects.presign_get(call.tenant, DATA_BUCKET, item.key, expires_s=life_s),
        )
        for item in page.items
        # A prefix that happens to have rings below it means the files beside them.
        if ref.prefix.startswith(RINGS_PREFIX) or not in_a_ring(item.key)
    ]
    following = f"{job.id[:8]}.{number + 1}." if number + 1 < len(refs) else None
    next_cursor = f"{job.id[:8]}.{number}.{page.cursor}" if page.cursor else following
    if next_cursor is None:
        inputs += given(context, call, job)
    manifests = _manifests_around(context, call, ref.prefix) if cursor is None else []
    return InputPage(inputs=inputs, manifests=manifests, next_cursor=next_cursor, expires_at=expires_at)


def _manifests_around(context: Context, call: Call, prefix: str) -> list[PushManifest]:
    """Those of pushed folders that hold more than the prefix, outermost first: no listing below it has them."""
    folders = (prefix[: at + 1] for at, character in enumerate(prefix) if character == "/")
    keys = [folder + DATASET_MANIFEST for folder in folders if folder != prefix]
    stored = context.objects.head_many(call.tenant, DATA_BUCKET, keys) if keys else {}
    return [
        PushManifest(
            key=key,
            url=context.objects.presign_get(call.tenant, DATA_BUCKET, key, expires_s=context.settings.url_life_s),
        )
        for key in keys
        if key in stored
    ]


def _inputs_position(job: Job, given: str | None) -> tuple[int, str | None]:
    """Which of the job's inputs to list, and the store's own cursor within it."""
    if given is None:
        return 0, None
    found = _INPUTS_CURSOR.fullmatch(given)
    if found is None or found[1] != job.id[:8] or int(found[2]) >= len(job.spec.inputs):
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    return int(found[2]), found[3] or None


def _input_path(prefix: str, into: str, key: str) -> str:
    """Where an input lies below the data directory: its path below the last '/' of the prefix."""
    below = key[prefix.rfind("/") + 1 :]
    return f"{into}/{below}" if into else below
