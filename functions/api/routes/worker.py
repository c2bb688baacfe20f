"""The calls of workers."""

from __future__ import annotations

from functools import partial
from typing import Any

from baton.contract.checkpoints.calls import BlobUrls, BlobUrlsRequest, CommitAnswer, DamagedRequest
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.elastic.relay import RelayAnswer, RelayRequest
from baton.contract.elastic.world import EpochProposal, ExcludeRequest, JoinRequest, WorldReport, WorldView
from baton.contract.errors import ErrorCode as E
from baton.contract.worker.calls import (
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
from baton.contract.worker.output import LogChunk
from functions.api.checkpoints import checkpoint_calls
from functions.api.http.route import BOTH, JOB, LEASE, SUBMIT, WORKER, Route
from functions.api.objects import artifacts, input_files
from functions.api.worker import logs, worker_calls
from functions.api.worlds import data_calls, relay_calls, world_calls

_COMPLETE = (*LEASE, E.NOT_STORED_YET, E.DIGEST_MISMATCH, E.UNKNOWN_BUCKET)
_WORLD = (*LEASE, E.NOT_ELASTIC)
_LEASE_AWARE = ("x-lease-aware",)
_worker = partial(Route, function="worker", scopes=WORKER)
_bearer = partial(_worker, headers=("x-lease-token",))
_WORK = list[WorkItem] | list[dict[str, Any]]

ROUTES: tuple[Route, ...] = (
    _worker("GET", "/work", worker_calls.get_work, query=WorkQuery, answer=_WORK, headers=_LEASE_AWARE),
    _worker("GET", "/work/peek", worker_calls.peek_work, query=WorkQuery, answer=_WORK, headers=_LEASE_AWARE),
    _bearer(
        "POST",
        "/heartbeat/{id}",
        worker_calls.heartbeat,
        body=(HeartbeatRequest,),
        body_required=False,
        answer=HeartbeatAnswer,
        refuses=LEASE,
    ),
    _bearer(
        "POST",
        "/progress",
        checkpoint_calls.register_zip,
        body=(ProgressRequest,),
        answer=StatusAnswer,
        refuses=(*LEASE, E.NOT_STORED_YET, E.STEP_NOT_NEWER),
    ),
    _bearer(
        "POST", "/complete", worker_calls.complete, body=(CompleteRequest,), answer=TransitionAnswer, refuses=_COMPLETE
    ),
    _bearer("POST", "/fail", worker_calls.fail, body=(FailRequest,), answer=TransitionAnswer, refuses=LEASE),
    _bearer(
        "POST",
        "/release",
        worker_calls.release,
        body=(ReleaseRequest,),
        answer=TransitionAnswer,
        refuses=(*LEASE, E.ROLLBACK_BUDGET_SPENT, E.ROLLBACK_NOT_KEPT, E.NOT_FOR_ELASTIC),
    ),
    _bearer(
        "POST",
        "/job/{id}/checkpoints",
        checkpoint_calls.commit,
        body=(Manifest,),
        answer=CommitAnswer,
        refuses=(*LEASE, E.STEP_NOT_NEWER, E.CHECKPOINT_CONFLICT),
    ),
    _worker(
        "POST",
        "/job/{id}/checkpoints/{step}/urls",
        checkpoint_calls.blob_urls,
        scopes=BOTH,
        body=(BlobUrlsRequest,),
        body_required=False,
        answer=BlobUrls,
        refuses=(*JOB, E.CHECKPOINT_NOT_FOUND),
    ),
    _bearer(
        "POST",
        "/job/{id}/checkpoints/{step}/damaged",
        checkpoint_calls.report_damaged,
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
        input_files.list_inputs,
        query=input_files.InputsQuery,
        answer=InputPage,
        refuses=(*LEASE, E.INVALID_CURSOR),
    ),
    _bearer("POST", "/job/{id}/logs", logs.append, body=(LogChunk,), answer=StatusAnswer, refuses=LEASE),
    _bearer("GET", "/job/{id}/world", world_calls.show, scopes=BOTH, answer=WorldView, refuses=_WORLD),
    _bearer(
        "POST",
        "/job/{id}/world/join",
        world_calls.join,
        body=(JoinRequest,),
        answer=WorldView,
        refuses=(*_WORLD, E.WORLD_MISMATCH),
    ),
    _bearer(
        "POST",
        "/job/{id}/world/epoch",
        world_calls.propose,
        body=(EpochProposal,),
        answer=WorldView,
        refuses=(*_WORLD, E.WORLD_CHANGED, E.NO_MAJORITY, E.NOT_A_MEMBER),
    ),
    Route(
        "POST",
        "/job/{id}/world/exclude",
        world_calls.exclude,
        function="worker",
        scopes=SUBMIT,
        body=(ExcludeRequest,),
        answer=WorldView,
        refuses=(*JOB, E.NOT_ELASTIC, E.NOT_A_MEMBER, E.JOB_FINISHED, E.CONFLICT),
    ),
    _bearer(
        "POST",
        "/job/{id}/world/report",
        world_calls.report,
        body=(WorldReport,),
        answer=WorldView,
        refuses=(*_WORLD, E.WORLD_CHANGED, E.NOT_A_MEMBER),
    ),
    _bearer(
        "POST",
        "/job/{id}/world/relay",
        relay_calls.relay,
        body=(RelayRequest,),
        answer=RelayAnswer,
        refuses=(*_WORLD, E.NOT_A_MEMBER),
    ),
    _bearer(
        "POST",
        "/job/{id}/world/data",
        data_calls.lease,
        body=(DataRequest,),
        answer=DataGrant,
        refuses=(*_WORLD, E.DATA_MISMATCH),
    ),
)
