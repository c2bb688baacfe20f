"""Every call of the API in one table: path, function, scope, models. API Gateway, the dispatcher, the local front
and the OpenAPI description are all made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from contract.checkpoints import BlobUrls, BlobUrlsRequest, CheckpointPage, CommitAnswer, DamagedRequest, Manifest
from contract.errors import ErrorCode
from contract.errors import ErrorCode as E
from contract.history import AttemptPage, EventPage, EventView
from contract.jobs import BatchSubmit, DreamboothSubmit, JobPage, JobSubmit, JobView, RetryRequest, StopRequest
from contract.keys import HealthAnswer, KeyCreate, KeyCreated, KeyPage, Scope
from contract.transfers import (
    MultipartComplete,
    MultipartCreated,
    ObjectPage,
    ObjectQuery,
    TokenAnswer,
    TokenQuery,
    UploadBatch,
    UploadTargets,
)
from contract.work import (
    ArtifactsAnswer,
    ArtifactsRequest,
    CompleteRequest,
    FailRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    InputPage,
    LogChunk,
    LogPage,
    ProgressRequest,
    ReleaseRequest,
    StatusAnswer,
    TransitionAnswer,
    WorkItem,
    WorkQuery,
)
from functions.api import artifacts, checkpointing, keys, logs, submitting, transfers, working
from functions.api.context import Call, Context

Function = Literal["submitter", "worker", "transfer", "admin"]
"""The privilege groups: each is one Lambda function with one role."""

SUBMIT = frozenset({Scope.SUBMIT})
WORKER = frozenset({Scope.WORKER})
ADMIN = frozenset({Scope.ADMIN})
BOTH = SUBMIT | WORKER
NOBODY: frozenset[Scope] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Route:
    """One call. With several body models the first whose required fields are present is meant."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    """As API Gateway writes it: `{id}`, and `{key+}` for the rest of the path."""
    function: Function
    scopes: frozenset[Scope]
    """Any of these is enough; none means that no key is needed."""
    call: Callable[[Context, Call], Any]
    query: type[BaseModel] | None = None
    body: tuple[type[BaseModel], ...] = ()
    body_required: bool = True
    answer: Any = None
    status: int = 200
    refuses: tuple[ErrorCode, ...] = ()
    headers: tuple[str, ...] = ()

    @property
    def route_key(self) -> str:
        """API Gateway's name of the route."""
        return f"{self.method} {self.path}"


_JOB = (E.JOB_NOT_FOUND,)
_LEASE = (
    E.JOB_NOT_FOUND,
    E.JOB_NOT_RUNNING,
    E.JOB_CANCELED,
    E.JOB_FINISHED,
    E.LEASE_LOST,
    E.LEASE_EXPIRED,
    E.LEASE_REQUIRED,
    E.CONFLICT,
)
_STEER = (E.JOB_NOT_FOUND, E.ILLEGAL_TRANSITION, E.JOB_FINISHED, E.JOB_CANCELED, E.CONFLICT)
_TOKEN = (E.TOKEN_INVALID, E.TOKEN_WRONG_KEY, E.UNKNOWN_BUCKET, E.INVALID_KEY, *_LEASE)
_TOKEN_LEASE = "x-lease-token"
_IDEMPOTENCY = "idempotency-key"


def _submitter() -> Iterable[Route]:
    common: dict[str, Any] = {"function": "submitter", "scopes": SUBMIT}
    yield Route(
        method="POST",
        path="/job",
        call=submitting.submit,
        body=(JobSubmit, DreamboothSubmit),
        answer=JobView,
        headers=(_IDEMPOTENCY,),
        refuses=(E.UNKNOWN_RECIPE, E.IDEMPOTENCY_MISMATCH),
        **common,
    )
    yield Route(
        method="POST",
        path="/jobs/batch",
        call=submitting.submit_batch,
        body=(BatchSubmit,),
        answer=list[JobView],
        headers=(_IDEMPOTENCY,),
        refuses=(E.UNKNOWN_RECIPE, E.IDEMPOTENCY_MISMATCH),
        **common,
    )
    yield Route(
        method="GET",
        path="/jobs",
        call=submitting.list_jobs,
        query=submitting.JobsQuery,
        answer=JobPage | list[JobView],
        refuses=(E.INVALID_CURSOR,),
        **common,
    )
    yield Route(method="GET", path="/job/{id}", call=submitting.get_job, answer=JobView, refuses=_JOB, **common)
    pages: tuple[tuple[str, Callable[[Context, Call], Any], Any], ...] = (
        ("events", submitting.list_events, EventPage | list[EventView]),
        ("attempts", submitting.list_attempts, AttemptPage),
        ("checkpoints", submitting.list_checkpoints, CheckpointPage),
    )
    for name, call, answer in pages:
        yield Route(
            method="GET",
            path=f"/job/{{id}}/{name}",
            call=call,
            query=submitting.PageQuery,
            answer=answer,
            refuses=(*_JOB, E.INVALID_CURSOR),
            **common,
        )
    yield Route(
        method="GET",
        path="/job/{id}/logs",
        call=logs.read,
        query=logs.LogsQuery,
        answer=LogPage,
        refuses=(*_JOB, E.INVALID_CURSOR),
        **common,
    )
    steering: tuple[tuple[str, Callable[[Context, Call], Any], tuple[type[BaseModel], ...]], ...] = (
        ("stop", submitting.stop, (StopRequest,)),
        ("pause", submitting.pause, (StopRequest,)),
        ("resume", submitting.resume, (StopRequest,)),
        ("retry", submitting.retry, (RetryRequest,)),
    )
    for name, call, body in steering:
        yield Route(
            method="POST",
            path=f"/job/{{id}}/{name}",
            call=call,
            body=body,
            body_required=False,
            answer=TransitionAnswer,
            refuses=(*_STEER, E.CHECKPOINT_NOT_FOUND),
            **common,
        )


def _worker() -> Iterable[Route]:
    common: dict[str, Any] = {"function": "worker", "scopes": WORKER}
    asking: tuple[tuple[str, Callable[[Context, Call], Any]], ...] = (
        ("/work", working.get_work),
        ("/work/peek", working.peek_work),
    )
    for path, call in asking:
        yield Route(
            method="GET",
            path=path,
            call=call,
            query=WorkQuery,
            answer=list[WorkItem] | list[dict[str, Any]],
            headers=("x-lease-aware",),
            **common,
        )
    bearer: dict[str, Any] = {**common, "headers": (_TOKEN_LEASE,)}
    yield Route(
        method="POST",
        path="/heartbeat/{id}",
        call=working.heartbeat,
        body=(HeartbeatRequest,),
        body_required=False,
        answer=HeartbeatAnswer,
        refuses=_LEASE,
        **bearer,
    )
    yield Route(
        method="POST",
        path="/progress",
        call=checkpointing.register_zip,
        body=(ProgressRequest,),
        answer=StatusAnswer,
        refuses=(*_LEASE, E.NOT_STORED_YET, E.STEP_NOT_NEWER),
        **bearer,
    )
    yield Route(
        method="POST",
        path="/complete",
        call=working.complete,
        body=(CompleteRequest,),
        answer=TransitionAnswer,
        refuses=(*_LEASE, E.NOT_STORED_YET, E.DIGEST_MISMATCH, E.UNKNOWN_BUCKET),
        **bearer,
    )
    ending: tuple[tuple[str, Callable[[Context, Call], Any], type[BaseModel]], ...] = (
        ("/fail", working.fail, FailRequest),
        ("/release", working.release, ReleaseRequest),
    )
    for path, call, body in ending:
        yield Route(
            method="POST", path=path, call=call, body=(body,), answer=TransitionAnswer, refuses=_LEASE, **bearer
        )
    yield Route(
        method="POST",
        path="/job/{id}/checkpoints",
        call=checkpointing.commit,
        body=(Manifest,),
        answer=CommitAnswer,
        refuses=(*_LEASE, E.STEP_NOT_NEWER, E.CHECKPOINT_CONFLICT),
        **bearer,
    )
    yield Route(
        method="POST",
        path="/job/{id}/checkpoints/{step}/urls",
        call=checkpointing.blob_urls,
        body=(BlobUrlsRequest,),
        body_required=False,
        answer=BlobUrls,
        refuses=(*_JOB, E.CHECKPOINT_NOT_FOUND),
        **{**common, "scopes": BOTH},
    )
    yield Route(
        method="POST",
        path="/job/{id}/checkpoints/{step}/damaged",
        call=checkpointing.report_damaged,
        body=(DamagedRequest,),
        answer=StatusAnswer,
        refuses=(*_LEASE, E.CHECKPOINT_NOT_FOUND),
        **bearer,
    )
    yield Route(
        method="POST",
        path="/job/{id}/artifacts",
        call=artifacts.declare_artifacts,
        body=(ArtifactsRequest,),
        answer=ArtifactsAnswer,
        refuses=_LEASE,
        **bearer,
    )
    yield Route(
        method="GET",
        path="/job/{id}/inputs",
        call=transfers.list_inputs,
        query=transfers.InputsQuery,
        answer=InputPage,
        refuses=(*_LEASE, E.INVALID_CURSOR),
        **bearer,
    )
    yield Route(
        method="POST",
        path="/job/{id}/logs",
        call=logs.append,
        body=(LogChunk,),
        answer=StatusAnswer,
        refuses=_LEASE,
        **bearer,
    )


def _transfer() -> Iterable[Route]:
    common: dict[str, Any] = {"function": "transfer", "scopes": BOTH}
    yield Route(
        method="GET",
        path="/download/token",
        call=transfers.download_token,
        query=TokenQuery,
        answer=TokenAnswer,
        refuses=(E.UNKNOWN_BUCKET, E.OBJECT_NOT_FOUND, E.INVALID_KEY),
        **common,
    )
    yield Route(
        method="GET",
        path="/download/{bucket}/{key+}",
        call=transfers.download,
        status=302,
        headers=("x-download-token",),
        refuses=_TOKEN,
        **common,
    )
    yield Route(
        method="GET",
        path="/upload/token",
        call=transfers.upload_token,
        query=TokenQuery,
        answer=TokenAnswer,
        refuses=(E.UNKNOWN_BUCKET, E.INVALID_KEY, *_LEASE),
        **common,
    )
    upload: dict[str, Any] = {
        **common,
        "path": "/upload/{bucket}/{key+}",
        "query": transfers.UploadQuery,
        "headers": ("x-upload-token",),
        "refuses": (*_TOKEN, E.UPLOAD_NOT_FOUND),
    }
    yield Route(
        method="POST",
        call=transfers.upload_post,
        body=(MultipartComplete,),
        body_required=False,
        answer=MultipartCreated | StatusAnswer,
        **upload,
    )
    yield Route(method="PUT", call=transfers.upload_put, status=307, **upload)
    yield Route(method="DELETE", call=transfers.upload_delete, status=204, **upload)
    yield Route(
        method="POST",
        path="/uploads",
        call=transfers.upload_batch,
        body=(UploadBatch,),
        answer=UploadTargets,
        refuses=(E.UNKNOWN_BUCKET, E.INVALID_KEY),
        **{**common, "scopes": SUBMIT},
    )
    yield Route(
        method="GET",
        path="/data",
        call=transfers.list_objects,
        query=ObjectQuery,
        answer=ObjectPage,
        refuses=(E.UNKNOWN_BUCKET, E.INVALID_CURSOR),
        **{**common, "scopes": SUBMIT},
    )


def _admin() -> Iterable[Route]:
    common: dict[str, Any] = {"function": "admin", "scopes": ADMIN}
    yield Route(
        method="POST",
        path="/keys",
        call=keys.create,
        body=(KeyCreate,),
        answer=KeyCreated,
        refuses=(E.NOT_FOUND,),
        **common,
    )
    yield Route(
        method="GET",
        path="/keys",
        call=keys.list_keys,
        query=keys.KeysQuery,
        answer=KeyPage,
        refuses=(E.INVALID_CURSOR,),
        **common,
    )
    yield Route(
        method="DELETE",
        path="/keys/{id}",
        call=keys.revoke,
        status=204,
        refuses=(E.NOT_FOUND, E.CONFLICT),
        **common,
    )
    yield Route(method="GET", path="/health", call=keys.health, answer=HealthAnswer, **{**common, "scopes": NOBODY})


ROUTES: tuple[Route, ...] = (*_submitter(), *_worker(), *_transfer(), *_admin())


def routes_of(function: Function) -> dict[str, Route]:
    """The routes that one function serves, by route key."""
    return {route.route_key: route for route in ROUTES if route.function == function}
