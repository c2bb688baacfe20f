"""The calls of administrators: keys, webhooks; the console's sessions and shared jobs; the health check."""

from __future__ import annotations

from functools import partial

from baton.contract.admin.keys import HealthAnswer, KeyCreate, KeyCreated, KeyPage, KeyView
from baton.contract.admin.sessions import SessionByCode, SessionByKey, SessionLink, SessionPreview, SessionToken
from baton.contract.admin.shares import ShareCreated, ShareRequest
from baton.contract.admin.webhooks import (
    DeliveryPage,
    DeliveryQuery,
    FleetReplayRequest,
    ReplayAnswer,
    ReplayRequest,
    WebhookCreate,
    WebhookCreated,
    WebhookList,
)
from baton.contract.errors import ErrorCode as E
from functions.api.admin import keys, sessions, shares, webhooks
from functions.api.http.route import ADMIN, JOB, NOBODY, SUBMIT, Route

_WEBHOOK = (E.WEBHOOK_NOT_FOUND,)
_admin = partial(Route, function="admin", scopes=ADMIN)
_browser = partial(Route, function="admin", scopes=NOBODY)

ROUTES: tuple[Route, ...] = (
    _admin("POST", "/keys", keys.create, body=(KeyCreate,), answer=KeyCreated, refuses=(E.KEY_NOT_FOUND,)),
    _admin("GET", "/keys", keys.list_keys, query=keys.KeysQuery, answer=KeyPage, refuses=(E.INVALID_CURSOR,)),
    _admin(
        "DELETE",
        "/keys/{id}",
        keys.revoke,
        scopes=ADMIN | SUBMIT,
        status=204,
        refuses=(E.KEY_NOT_FOUND, E.CONFLICT),
    ),
    _admin("POST", "/sessions/links", sessions.make_link, scopes=ADMIN | SUBMIT, answer=SessionLink, status=201),
    _browser(
        "POST",
        "/sessions",
        sessions.open_session,
        body=(SessionByCode, SessionByKey),
        answer=KeyView,
        status=201,
        refuses=(
            E.ORIGIN_REFUSED,
            E.SESSION_CODE_INVALID,
            E.SESSION_OVER,
            E.KEY_UNKNOWN,
            E.KEY_REVOKED,
            E.KEY_EXPIRED,
            E.WRONG_SCOPE,
        ),
    ),
    _browser(
        "POST",
        "/sessions/preview",
        sessions.preview_session,
        body=(SessionByCode,),
        answer=SessionPreview,
        refuses=(E.ORIGIN_REFUSED, E.SESSION_CODE_INVALID),
    ),
    _browser(
        "POST",
        "/sessions/token",
        sessions.issue_token,
        answer=SessionToken,
        status=201,
        refuses=(E.ORIGIN_REFUSED, E.SESSION_OVER),
    ),
    _browser("DELETE", "/sessions/current", sessions.close_session, status=204, refuses=(E.ORIGIN_REFUSED,)),
    _admin(
        "POST",
        "/job/{id}/share",
        shares.share_job,
        scopes=ADMIN | SUBMIT,
        body=(ShareRequest,),
        body_required=False,
        answer=ShareCreated,
        status=201,
        refuses=JOB,
    ),
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
        body=(ReplayRequest, FleetReplayRequest),
        answer=ReplayAnswer,
        refuses=(*_WEBHOOK, *JOB, E.FLEET_NOT_FOUND),
    ),
    _browser("GET", "/health", keys.health, answer=HealthAnswer),
)
