"""The calls that move bytes: tokens, uploads, downloads, listings."""

from __future__ import annotations

from functools import partial

from baton.contract.errors import ErrorCode as E
from baton.contract.objects.artifacts import StoredArtifactsPage, StoredArtifactsQuery
from baton.contract.objects.transfers import (
    DownloadQuery,
    MultipartComplete,
    MultipartCreated,
    ObjectPage,
    ObjectQuery,
    PresignedUrl,
    TokenAnswer,
    TokenQuery,
    UploadBatch,
    UploadedPart,
    UploadTargets,
)
from baton.contract.worker.calls import (
    StatusAnswer,
)
from functions.api.http.route import BOTH, LEASE, PAGE, SUBMIT, Route
from functions.api.objects import artifacts, transfers

_PLACE = (E.UNKNOWN_BUCKET, E.INVALID_KEY)
_TOKEN = (E.TOKEN_INVALID, E.TOKEN_WRONG_KEY, *_PLACE, *LEASE)
_transfer = partial(Route, function="transfer", scopes=BOTH)
_upload = partial(
    _transfer,
    path="/upload/{bucket}/{key+}",
    query=transfers.UploadQuery,
    headers=("x-upload-token",),
    refuses=(*_TOKEN, E.UPLOAD_NOT_FOUND),
)

ROUTES: tuple[Route, ...] = (
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
        query=DownloadQuery,
        answer=PresignedUrl,
        answers_bytes=True,
        headers=("x-download-token",),
        refuses=(*_TOKEN, E.OBJECT_NOT_FOUND, E.OBJECT_TOO_LARGE),
    ),
    _transfer(
        "GET",
        "/upload/token",
        transfers.upload_token,
        query=TokenQuery,
        answer=TokenAnswer,
        refuses=(*_PLACE, *LEASE),
    ),
    _upload(
        "POST",
        call=transfers.upload_post,
        body=(MultipartComplete,),
        body_required=False,
        answer=MultipartCreated | PresignedUrl | StatusAnswer,
    ),
    _upload("PUT", call=transfers.upload_put, takes_bytes=True, answer=UploadedPart),
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
        refuses=PAGE,
    ),
)
