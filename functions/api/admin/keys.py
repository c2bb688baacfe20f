"""The calls for API keys, and the health check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from baton.contract.admin.keys import HealthAnswer, KeyCreate, KeyCreated, KeyPage, KeyView
from baton.contract.base import Cursor, PageLimit, WireModel
from baton.contract.errors import ErrorCode
from baton.contract.names import KEY_PREFIX, KeyKind, Scope
from functions.api.http.context import ApiCall, Context, NoContent
from functions.domain.access.api_keys import ApiKey, token_digest
from functions.domain.errors import Refusal, WriteConflict
from functions.domain.ports import Randomness


class KeysQuery(WireModel):
    """Query of `GET /keys`. Example: `?limit=100`"""

    limit: PageLimit = 100
    cursor: Cursor | None = None


def create(context: Context, call: ApiCall) -> KeyCreated:
    """Issue a key; only this answer shows the whole key."""
    body: KeyCreate = call.body
    replaced = None
    if body.replaces is not None:
        replaced = _require_key(context, call, body.replaces, field="replaces")
    key, whole = generate_key(
        context.random,
        tenant=call.tenant,
        name=body.name,
        scopes=body.scopes,
        now=call.now,
        expires_at=call.now + body.expires_in_s if body.expires_in_s else None,
    )
    context.tokens.put_key(key)
    if replaced is not None:
        ends_at = min(replaced.expires_at or 2**40, call.now + body.overlap_s)
        _replace(context, replace(replaced, expires_at=ends_at))
    return KeyCreated(key=whole, **_view(key).model_dump())


def list_keys(context: Context, call: ApiCall) -> KeyPage:
    """List a tenant's keys without their secrets."""
    query: KeysQuery = call.query
    page = context.tokens.list_keys(call.tenant, limit=query.limit, cursor=query.cursor)
    return KeyPage(keys=[_view(key) for key in page.items], next_cursor=page.cursor)


def revoke(context: Context, call: ApiCall) -> NoContent:
    """Revoke a key; idempotent. A submitter may revoke share keys alone, with which submitters share jobs."""
    key = _require_key(context, call, call.path["id"])
    if key.kind is not KeyKind.SHARE and Scope.ADMIN not in call.principal.scopes:
        detail = f"Key {key.id} is no share key: its revocation needs the scope admin."
        raise Refusal(ErrorCode.WRONG_SCOPE, detail, field="x-api-key")
    if key.revoked_at is None:
        _replace(context, replace(key, revoked_at=call.now))
    return NoContent()


def health(context: Context, call: ApiCall) -> HealthAnswer:
    """Confirm that the service answers; needs no key."""
    return HealthAnswer(version=context.settings.version, server_time=call.now)


def generate_key(
    random: Randomness,
    *,
    tenant: str,
    name: str,
    scopes: Sequence[Scope],
    now: int,
    expires_at: int | None,
    machine: str | None = None,
    queues: Sequence[str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> tuple[ApiKey, str]:
    """Return a new key: the record to store, and the whole key `<prefix>_<id>_<secret>`."""
    key_id, secret = random.key_id(), random.token()
    key = ApiKey(
        id=key_id,
        tenant=tenant,
        name=name,
        secret_sha256=token_digest(secret),
        scopes=tuple(dict.fromkeys(scopes)),
        created_at=now,
        expires_at=expires_at,
        machine=machine,
        queues=None if queues is None else tuple(dict.fromkeys(queues)),
        tags=tags or None,
    )
    return key, f"{KEY_PREFIX}_{key_id}_{secret}"


def _require_key(context: Context, call: ApiCall, key_id: str, *, field: str = "id") -> ApiKey:
    key = context.tokens.get_key(key_id)
    if key is None or key.tenant != call.tenant:
        raise Refusal(ErrorCode.KEY_NOT_FOUND, f"No key {key_id}.", field=field)
    return key


def _replace(context: Context, key: ApiKey) -> None:
    try:
        context.tokens.replace_key(key)
    except WriteConflict as conflict:
        raise Refusal(ErrorCode.CONFLICT, "Another call removed the key at the same moment.") from conflict


def _view(key: ApiKey) -> KeyView:
    """Return a key without its secret."""
    return KeyView.model_validate(key, from_attributes=True)
