"""The input files of a running job, for the worker that runs the job."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from baton.contract.base import WireModel
from baton.contract.errors import ErrorCode
from baton.contract.names import DATA_BUCKET, RINGS_PREFIX, in_a_ring
from baton.contract.objects.dataset_manifest import DATASET_MANIFEST
from baton.contract.worker.calls import InputObject, InputPage, PushManifest
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.objects.shared_outputs import list_available_inputs
from functions.api.worker.lease_guard import require_lease
from functions.domain.errors import Refusal
from functions.domain.jobs.transitions import require_running
from functions.domain.records import Job

_INPUTS_PER_PAGE = 500
_INPUTS_CURSOR = re.compile(r"([0-9a-f]{8})\.([0-9]{1,4})\.(.*)", re.DOTALL)


class InputsQuery(WireModel):
    """Query of `GET /job/{id}/inputs`: the `next_cursor` of the page before.

    A cursor contains a prefix and a key, of up to 900 bytes each, in base64.
    """

    cursor: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


def list_inputs(context: Context, call: ApiCall) -> InputPage:
    """List a running job's input files with URLs for its worker; the last page adds outputs shared by other jobs."""
    query: InputsQuery = call.query
    job = require_job(context, call, call.path["id"])
    require_running(job)
    require_lease(context, call.fence(job.id))
    life_s = context.settings.url_life_s
    expires_at = call.now + life_s
    number, cursor = _parse_cursor(job, query.cursor)
    refs = job.spec.inputs
    if not refs:
        return InputPage(inputs=list_available_inputs(context, call, job), expires_at=expires_at)
    ref = refs[number]
    page = context.objects.list(call.tenant, DATA_BUCKET, ref.prefix, limit=_INPUTS_PER_PAGE, cursor=cursor)
    inputs = [
        InputObject(
            key=item.key,
            path=_compute_path(ref.prefix, ref.into, item.key),
            size_bytes=item.size_bytes,
            etag=item.etag,
            url=context.objects.presign_get(call.tenant, DATA_BUCKET, item.key, expires_s=life_s),
        )
        for item in page.items
        # A prefix above rings selects the files beside the rings.
        if ref.prefix.startswith(RINGS_PREFIX) or not in_a_ring(item.key)
    ]
    following = f"{job.id[:8]}.{number + 1}." if number + 1 < len(refs) else None
    next_cursor = f"{job.id[:8]}.{number}.{page.cursor}" if page.cursor else following
    if next_cursor is None:
        inputs += list_available_inputs(context, call, job)
    manifests = _find_outer_manifests(context, call, ref.prefix) if cursor is None else []
    return InputPage(inputs=inputs, manifests=manifests, next_cursor=next_cursor, expires_at=expires_at)


def _find_outer_manifests(context: Context, call: ApiCall, prefix: str) -> list[PushManifest]:
    """Return the manifests of pushed folders above the prefix, which a listing omits, outermost first."""
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


def _parse_cursor(job: Job, list_available_inputs: str | None) -> tuple[int, str | None]:
    """Return the number of the job's input to list, and the store's cursor within the input."""
    if list_available_inputs is None:
        return 0, None
    found = _INPUTS_CURSOR.fullmatch(list_available_inputs)
    if found is None or found[1] != job.id[:8] or int(found[2]) >= len(job.spec.inputs):
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    return int(found[2]), found[3] or None


def _compute_path(prefix: str, into: str, key: str) -> str:
    """Return an input's path below the data directory: the key's part behind the last '/' of the prefix."""
    below = key[prefix.rfind("/") + 1 :]
    return f"{into}/{below}" if into else below
