"""Every call of the API in one table: path, function, scope, models. API Gateway, the dispatcher, the local front
and the OpenAPI description are all made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel

from contract.artifacts import StoredArtifactsPage, StoredArtifactsQuery
from contract.checkpoints import BlobUrls, BlobUrlsRequest, CheckpointPage, CommitAnswer, DamagedRequest
from contract.dreambooth import DreamboothSubmit
from contract.errors import ErrorCode as E
from contract.history import AttemptPage, EventPage, EventView
from contract.jobs import BatchSubmit, JobPage, JobSubmit, JobView, RetryRequest, StopRequest
from contract.keys import HealthAnswer, KeyCreate, KeyCreated, KeyPage
from contract.manifest import Manifest, ManifestV1
from contract.names import Scope
from contract.recipes.calls import RecipePage, RecipePush, RecipeQuery, RecipeView
from contract.steering import (
    Command,
    CommandList,
    CommandRequest,
    RulesChecked,
    RulesHistory,
    RulesRequest,
    RulesView,
)
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
from contract.webhooks import (
    DeliveryPage,
    DeliveryQuery,
    ReplayAnswer,
    ReplayRequest,
    WebhookCreate,
    WebhookCreated,
    WebhookList,
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
from functions.api import (
    artifacts,
    checkpointing,
    keys,
    logs,
    recipes,
    steering,
    submitting,
    transfers,
    webhooks,
    working,
)
from functions.api.context import Call, Context

Function = Literal["submitter", "worker", "transfer", "admin"]
"""The privilege groups: each is one Lambda function with one role."""

SUBMIT = frozenset({Scope.SUBMIT})
WORKER = frozenset({Scope.WORKER})
ADMIN = frozenset({Scope.ADMIN})
BOTH = SUBMIT | WORKER
NOBODY: frozenset[Scope] = frozenset()


@dataclass(frozen=True)
class Route:
    """One call. With several body models their `version` says which is meant, or else their required fields."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    """As API Gateway writes it: `{id}`, and `{key+}` for the rest of the path."""
    call: Callable[[Context, Call], Any]
    _: KW_ONLY
    function: Function
    scopes: frozenset[Scope]
    """Any of these is enough; none means that no key is needed."""
    query: type[BaseModel] | None = None
    body: tuple[type[BaseModel], ...] = ()
    body_required: bool = True
    answer: Any = None
    status: int = 200
    refuses: tuple[E, ...] = ()
    """Codes of its own; openapi.py adds those that follow from scopes, models and headers."""
    headers: tuple[str, ...] = ()

    @property
    def route_key(self) -> str:
        """API Gateway's name of the route."""
        return f"{self.method} {self.path}"


_JOB = (E.JOB_NOT_FOUND,)
_PAGE = (*_JOB, E.INVALID_CURSOR)
_WEBHOOK = (E.WEBHOOK_NOT_FOUND,)
_SUBMIT = (E.UNKNOWN_RECIPE, E.INVALID_RULES, E.IDEMPOTENCY_MISMATCH, *_WEBHOOK)
_STEER = (*_JOB, E.ILLEGAL_TRANSITION, E.JOB_FINISHED, E.JOB_CANCELED, E.CONFLICT, E.CHECKPOINT_NOT_FOUND)
_GIVE = (*_JOB, E.JOB_FINISHED, E.ILLEGAL_TRANSITION, E.CONFLICT)
_LEASE = (
    *_JOB,
    E.JOB_NOT_RUNNING,
    E.JOB_CANCELED,
    E.JOB_FINISHED,
    E.LEASE_LOST,
    E.LEASE_EXPIRED,
    E.LEASE_REQUIRED,
    E.CONFLICT,
)
_COMPLETE = (*_LEASE, E.NOT_STORED_YET, E.DIGEST_MISMATCH, E.UNKNOWN_BUCKET)
_PLACE = (E.UNKNOWN_BUCKET, E.INVALID_KEY)
_TOKEN = (E.TOKEN_INVALID, E.TOKEN_WRONG_KEY, *_PLACE, *_LEASE)
_IDEMPOTENCY = ("idempotency-key",)
_LEASE_AWARE = ("x-lease-aware",)

_submitter = partial(Route, function="submitter", scopes=SUBMIT)
_submit = partial(_submitter, "POST", refuses=_SUBMIT, headers=_IDEMPOTENCY)
_page = partial(_submitter, "GET", refuses=_PAGE)
_steer = partial(_submitter, "POST", body_required=False, answer=TransitionAnswer, refuses=_STEER)
_worker = partial(Route, function="worker", scopes=WORKER)
_bearer = partial(_worker, headers=("x-lease-token",))
_transfer = partial(Route, function="transfer", scopes=BOTH)
_upload = partial(
    _transfer,
    path="/upload/{bucket}/{key+}",
    query=transfers.UploadQuery,
    headers=("x-upload-token",),
    refuses=(*_TOKEN, E.UPLOAD_NOT_FOUND),
)
_admin = partial(Route, function="admin", scopes=ADMIN)

_WORK = list[WorkItem] | list[dict[str, Any]]

ROUTES: tuple[Route, ...] = (
    _submit("/job", submitting.submit, body=(JobSubmit, DreamboothSubmit), answer=JobView),
    _submit("/jobs/batch", submitting.submit_batch, body=(BatchSubmit,), answer=list[JobView]),
    _submitter(
        "GET",
        "/jobs",
        submitting.list_jobs,
        query=submitting.JobsQuery,
        answer=JobPage | list[JobView],
        refuses=(E.INVALID_CURSOR,),
    ),
    _submitter("GET", "/job/{id}", submitting.get_job, answer=JobView, refuses=_JOB),
    _page("/job/{id}/events", submitting.list_events, query=submitting.PageQuery, answer=EventPage | list[EventView]),
    _page("/job/{id}/attempts", submitting.list_attempts, query=submitting.PageQuery, answer=AttemptPage),
    _page("/job/{id}/checkpoints", submitting.list_checkpoints, query=submitting.PageQuery, answer=CheckpointPage),
    _page("/job/{id}/logs", logs.read, query=logs.LogsQuery, answer=LogPage),
    _steer("/job/{id}/stop", submitting.stop, body=(StopRequest,)),
    _steer("/job/{id}/pause", submitting.pause, body=(StopRequest,)),
    _steer("/job/{id}/resume", submitting.resume, body=(StopRequest,)),
    _steer("/job/{id}/retry", submitting.retry, body=(RetryRequest,)),
    _submitter(
        "PUT",
        "/job/{id}/rules",
        steering.put_rules,
        body=(RulesRequest,),
        answer=RulesView,
        refuses=(*_GIVE, E.INVALID_RULES),
    ),
    _submitter("GET", "/job/{id}/rules", steering.show_rules, answer=RulesView, refuses=_JOB),
    _page("/job/{id}/rules/history", steering.list_rules, query=steering.RulesHistoryQuery, answer=RulesHistory),
    _submitter("POST", "/rules/check", steering.check_rules, body=(steering.RulesCheck,), answer=RulesChecked),
    _submitter(
        "POST",
        "/job/{id}/commands",
        steering.give_command,
        body=(CommandRequest,),
        answer=Command,
        refuses=(*_GIVE, E.IDEMPOTENCY_MISMATCH),
        headers=_IDEMPOTENCY,
    ),
    _submitter("GET", "/job/{id}/commands", steering.list_commands, answer=CommandList, refuses=_JOB),
    _submitter(
        "POST",
        "/recipes",
        recipes.push,
        body=(RecipePush,),
        answer=RecipeView,
        refuses=(E.INVALID_RECIPE, E.RECIPE_EXISTS),
    ),
    _submitter(
        "GET", "/recipes", recipes.list_recipes, query=RecipeQuery, answer=RecipePage, refuses=(E.INVALID_CURSOR,)
    ),
    _submitter("GET", "/recipes/{recipe}", recipes.show, answer=RecipeView, refuses=(E.RECIPE_NOT_FOUND,)),
    _worker("GET", "/work", working.get_work, query=WorkQuery, answer=_WORK, headers=_LEASE_AWARE),
    _worker("GET", "/work/peek", working.peek_work, query=WorkQuery, answer=_WORK, headers=_LEASE_AWARE),
    _bearer(
        "POST",
        "/heartbeat/{id}",
        working.heartbeat,
        body=(HeartbeatRequest,),
        body_required=False,
        answer=HeartbeatAnswer,
        refuses=_LEASE,
    ),
    _bearer(
        "POST",
        "/progress",
        checkpointing.register_zip,
        body=(ProgressRequest,),
        answer=StatusAnswer,
        refuses=(*_LEASE, E.NOT_STORED_YET, E.STEP_NOT_NEWER),
    ),
    _bearer("POST", "/complete", working.complete, body=(CompleteRequest,), answer=TransitionAnswer, refuses=_COMPLETE),
    _bearer("POST", "/fail", working.fail, body=(FailRequest,), answer=TransitionAnswer, refuses=_LEASE),
    _bearer(
        "POST",
        "/release",
        working.release,
        body=(ReleaseRequest,),
        answer=TransitionAnswer,
        refuses=(*_LEASE, E.ROLLBACK_BUDGET_SPENT),
    ),
    _bearer(
        "POST",
        "/job/{id}/checkpoints",
        checkpointing.commit,
        body=(Manifest, ManifestV1),
        answer=CommitAnswer,
        refuses=(*_LEASE, E.STEP_NOT_NEWER, E.CHECKPOINT_CONFLICT),
    ),
    _worker(
        "POST",
        "/job/{id}/checkpoints/{step}/urls",
        checkpointing.blob_urls,
        scopes=BOTH,
        body=(BlobUrlsRequest,),
        body_required=False,
        answer=BlobUrls,
        refuses=(*_JOB, E.CHECKPOINT_NOT_FOUND),
    ),
    _bearer(
        "POST",
        "/job/{id}/checkpoints/{step}/damaged",
        checkpointing.report_damaged,
        body=(DamagedRequest,),
        answer=StatusAnswer,
        refuses=(*_LEASE, E.CHECKPOINT_NOT_FOUND),
    ),
    _bearer(
        "POST",
        "/job/{id}/artifacts",
        artifacts.declare_artifacts,
        body=(ArtifactsRequest,),
        answer=ArtifactsAnswer,
        refuses=(*_LEASE, E.DIGEST_MISMATCH),
    ),
    _bearer(
        "GET",
        "/job/{id}/inputs",
        transfers.list_inputs,
        query=transfers.InputsQuery,
        answer=InputPage,
        refuses=(*_LEASE, E.INVALID_CURSOR),
    ),
    _bearer("POST", "/job/{id}/logs", logs.append, body=(LogChunk,), answer=StatusAnswer, refuses=_LEASE),
    _transfer(
        "GET",
        "/download/token",
        transfers.download_token,
        query=TokenQuery,
        answer=TokenAnswer,
        refuses=(*_PLACE, E.OBJECT_NOT_FOUND),
    ),
    _transfer(
        "GET",
        "/download/{bucket}/{key+}",
        transfers.download,
        status=302,
        headers=("x-download-token",),
        refuses=_TOKEN,
    ),
    _transfer(
        "GET",
        "/upload/token",
        transfers.upload_token,
        query=TokenQuery,
        answer=TokenAnswer,
        refuses=(*_PLACE, *_LEASE),
    ),
    _upload(
        "POST",
        call=transfers.upload_post,
        body=(MultipartComplete,),
        body_required=False,
        answer=MultipartCreated | StatusAnswer,
    ),
    _upload("PUT", call=transfers.upload_put, status=307),
    _upload("DELETE", call=transfers.upload_delete, status=204),
    _transfer(
        "POST",
        "/uploads",
        transfers.upload_batch,
        scopes=SUBMIT,
        body=(UploadBatch,),
        answer=UploadTargets,
        refuses=(*_PLACE, E.DIGEST_MISMATCH),
    ),
    _transfer(
        "GET",
        "/data",
        transfers.list_objects,
        scopes=SUBMIT,
        query=ObjectQuery,
        answer=ObjectPage,
        refuses=(E.UNKNOWN_BUCKET, E.INVALID_CURSOR),
    ),
    _transfer(
        "GET",
        "/job/{id}/artifacts",
        artifacts.list_artifacts,
        scopes=SUBMIT,
        query=StoredArtifactsQuery,
        answer=StoredArtifactsPage,
        refuses=_PAGE,
    ),
    _admin("POST", "/keys", keys.create, body=(KeyCreate,), answer=KeyCreated, refuses=(E.KEY_NOT_FOUND,)),
    _admin("GET", "/keys", keys.list_keys, query=keys.KeysQuery, answer=KeyPage, refuses=(E.INVALID_CURSOR,)),
    _admin("DELETE", "/keys/{id}", keys.revoke, status=204, refuses=(E.KEY_NOT_FOUND, E.CONFLICT)),
    _admin(
        "POST",
        "/webhooks",
        webhooks.create_webhook,
        body=(WebhookCreate,),
        answer=WebhookCreated,
        refuses=(E.CONFLICT,),
    ),
    _admin("GET", "/webhooks", webhooks.list_webhooks, answer=WebhookList),
    _admin("DELETE", "/webhooks/{id}", webhooks.delete_webhook, status=204, refuses=_WEBHOOK),
    _admin(
        "GET",
        "/webhooks/{id}/deliveries",
        webhooks.list_deliveries,
        query=DeliveryQuery,
        answer=DeliveryPage,
        refuses=(*_WEBHOOK, E.INVALID_CURSOR),
    ),
    _admin(
        "POST",
        "/webhooks/{id}/replay",
        webhooks.replay,
        body=(ReplayRequest,),
        answer=ReplayAnswer,
        refuses=(*_WEBHOOK, *_JOB),
    ),
    _admin("GET", "/health", keys.health, scopes=NOBODY, answer=HealthAnswer),
)


def routes_of(function: Function) -> dict[str, Route]:
    """The routes that one function serves, by route key."""
    return {route.route_key: route for route in ROUTES if route.function == function}
