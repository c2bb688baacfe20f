"""The calls of workers."""

from __future__ import annotations

from functools import partial
from typing import Any

from baton.contract.checkpoints import BlobUrls, BlobUrlsRequest, CommitAnswer, DamagedRequest
from baton.contract.errors import ErrorCode as E
from baton.contract.manifest import Manifest
from baton.contract.output import LogChunk
from baton.contract.work import (
    ArtifactsAnswer,
    ArtifactsRequest,
    CompleteRequest,
    FailRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    InputPage,
    ProgressRequest,
    ReleaseRequest,
    StatusAnswer,
    TransitionAnswer,
    WorkItem,
    WorkQuery,
)
from functions.api import (
    artifacts,
    checkpointing,
    input_lists,
    logs,
    working,
)
from functions.api.route import BOTH, JOB, LEASE, WORKER, Route

_COMPLETE = (*LEASE, E.NOT_STORED_YET, E.DIGEST_MISMATCH, E.UNKNOWN_BUCKET)
_LEASE_AWARE = ("x-lease-aware",)
_worker = partial(Route, function="worker", scopes=WORKER)
_bearer = partial(_worker, headers=("x-lease-token",))
_WORK = list[WorkItem] | list[dict[str, Any]]

ROUTES: tuple[Route, ...] = (
    _worker("GET", "/work", working.get_work, query=WorkQuery, answer=_WORK, headers=_LEASE_AWARE),
    _worker("GET", "/work/peek", working.peek_work, query=WorkQuery, answer=_WORK, headers=_LEASE_AWARE),
    _bearer(
        "POST",
        "/heartbeat/{id}",
        working.heartbeat,
        body=(HeartbeatRequest,),
        body_required=False,
        answer=HeartbeatAnswer,
        refuses=LEASE,
    ),
    _bearer(
        "POST",
        "/progress",
        checkpointing.register_zip,
        body=(ProgressRequest,),
        answer=StatusAnswer,
        refuses=(*LEASE, E.NOT_STORED_YET, E.STEP_NOT_NEWER),
    ),
    _bearer("POST", "/complete", working.complete, body=(CompleteRequest,), answer=TransitionAnswer, refuses=_COMPLETE),
    _bearer("POST", "/fail", working.fail, body=(FailRequest,), answer=TransitionAnswer, refuses=LEASE),
    _bearer(
        "POST",
        "/release",
        working.release,
        body=(ReleaseRequest,),
        answer=TransitionAnswer,
        refuses=(*LEASE, E.ROLLBACK_BUDGET_SPENT, E.ROLLBACK_NOT_KEPT),
    ),
    _bearer(
        "POST",
        "/job/{id}/checkpoints",
        checkpointing.commit,
        body=(Manifest,),
        answer=CommitAnswer,
        refuses=(*LEASE, E.STEP_NOT_NEWER, E.CHECKPOINT_CONFLICT),
    ),
    _worker(
        "POST",
        "/job/{id}/checkpoints/{step}/urls",
        checkpointing.blob_urls,
        scopes=BOTH,
        body=(BlobUrlsRequest,),
        body_required=False,
        answer=BlobUrls,
        refuses=(*JOB, E.CHECKPOINT_NOT_FOUND),
    ),
    _bearer(
        "POST",
        "/job/{id}/checkpoints/{step}/damaged",
        checkpointing.report_damaged,
        body=(DamagedRequest,),
        answer=StatusAnswer,
        refuses=(*LEASE, E.CHECKPOINT_NOT_FOUND),
    ),
    _bearer(
        "POST",
        "/job/{id}/artifacts",
        artifacts.declare_artifacts,
        body=(ArtifactsRequest,),
        answer=ArtifactsAnswer,
        refuses=(*LEASE, E.DIGEST_MISMATCH),
    ),
    _bearer(
        "GET",
        "/job/{id}/inputs",
        input_lists.list_inputs,
        query=input_lists.InputsQuery,
        answer=InputPage,
        refuses=(*LEASE, E.INVALID_CURSOR),
    ),
    _bearer("POST", "/job/{id}/logs", logs.append, body=(LogChunk,), answer=StatusAnswer, refuses=LEASE),
)
