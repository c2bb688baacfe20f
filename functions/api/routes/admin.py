"""The calls of administrators: keys, webhooks; and the health check."""

from __future__ import annotations

from functools import partial

from baton.contract.admin.keys import HealthAnswer, KeyCreate, KeyCreated, KeyPage
from baton.contract.admin.webhooks import (
    DeliveryPage,
    DeliveryQuery,
    ReplayAnswer,
    ReplayRequest,
    WebhookCreate,
    WebhookCreated,
    WebhookList,
)
from baton.contract.errors import ErrorCode as E
from functions.api.admin import keys, webhooks
from functions.api.http.route import ADMIN, JOB, NOBODY, Route

_WEBHOOK = (E.WEBHOOK_NOT_FOUND,)
_admin = partial(Route, function="admin", scopes=ADMIN)

ROUTES: tuple[Route, ...] = (
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
        refuses=(*_WEBHOOK, *JOB),
    ),
    _admin("GET", "/health", keys.health, scopes=NOBODY, answer=HealthAnswer),
)
