"""The calls for sessions of web browsers: one-time links, sign-in, short-lived tokens, sign-out.

Codes, keys, cookies and tokens are secrets: no log line and no error message contains one.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from baton.contract.admin.keys import KeyView
from baton.contract.admin.sessions import (
    SESSION_COOKIE,
    SessionByCode,
    SessionByKey,
    SessionLink,
    SessionPreview,
    SessionToken,
)
from baton.contract.errors import ErrorCode
from baton.contract.names import KEY_PREFIX, KeyKind
from functions.api.http.context import ApiCall, Context, NoContent, WithHeaders
from functions.domain.access.api_keys import ApiKey, authenticate
from functions.domain.access.sessions import SESSION_SCOPES, derive_key, session_id_of
from functions.domain.errors import Refusal, WriteConflict

COOKIE_PATH = "/sessions"


def make_link(context: Context, call: ApiCall) -> SessionLink:
    """Issue a one-time link that opens a session of the console with the rights of the calling key."""
    key = context.tokens.get_key(call.principal.key_id)
    # A session's token must not outlive its session by a new session.
    opener = _require_opener(key or ErrorCode.KEY_UNKNOWN, field="x-api-key")
    link, code = _store(context, opener, KeyKind.LINK, call.now)
    return SessionLink(url=f"{call.origin}/console#code={code}", expires_at=link.expires_at or call.now)


def open_session(context: Context, call: ApiCall) -> WithHeaders:
    """Open a session with the code of a one-time link or with an API key; set the session's cookie."""
    _require_own_origin(call)
    body: SessionByCode | SessionByKey = call.body
    if isinstance(body, SessionByKey):
        opener, session_id = _require_opener(authenticate(context.tokens, body.key, call.now), field="key"), None
    else:
        link, opener = _require_link(context, call, body.code)
        session_id = session_id_of(link)
    try:
        session, cookie = _store(context, opener, KeyKind.SESSION, call.now, session_id)
    except WriteConflict:
        raise _used_already() from None
    max_age_s = (session.expires_at or call.now) - call.now
    return _with_cookie(call, KeyView.model_validate(session, from_attributes=True), cookie, max_age_s)


def preview_session(context: Context, call: ApiCall) -> SessionPreview:
    """Name the tenant and the key of a one-time link, which stays valid.

    A link that somebody else sends signs its reader in to the sender's tenant, so the page asks the reader first.
    """
    _require_own_origin(call)
    body: SessionByCode = call.body
    link, opener = _require_link(context, call, body.code)
    if context.tokens.get_key(session_id_of(link)) is not None:
        raise _used_already()
    return SessionPreview(
        tenant=link.tenant,
        key_id=opener.id,
        key_name=opener.name,
        scopes=list(link.scopes),
        expires_at=link.expires_at or call.now,
    )


def issue_token(context: Context, call: ApiCall) -> SessionToken:
    """Issue a short-lived key of the session that the cookie names."""
    _require_own_origin(call)
    session = _authenticate_cookie(context, call)
    if isinstance(session, ErrorCode):
        raise Refusal(ErrorCode.SESSION_OVER, field=SESSION_COOKIE)
    token, whole = _store(context, session, KeyKind.TOKEN, call.now)
    return SessionToken(
        token=whole,
        expires_at=token.expires_at or call.now,
        scopes=list(token.scopes),
        tenant=token.tenant,
        key_id=session.id,
    )


def close_session(context: Context, call: ApiCall) -> WithHeaders:
    """Revoke the session that the cookie names, and remove the cookie; idempotent."""
    _require_own_origin(call)
    session = _authenticate_cookie(context, call)
    if isinstance(session, ApiKey):
        context.tokens.replace_key(replace(session, revoked_at=call.now))
    return _with_cookie(call, NoContent(), "", 0)


def _store(context: Context, parent: ApiKey, kind: KeyKind, now: int, key_id: str | None = None) -> tuple[ApiKey, str]:
    """Store a derived key; return the record and the whole key. Raises WriteConflict if `key_id` is taken."""
    secret = context.random.token()
    key = derive_key(parent, kind, key_id=key_id or context.random.key_id(), secret=secret, now=now)
    context.tokens.put_key(key)
    return key, f"{KEY_PREFIX}_{key.id}_{secret}"


def _require_link(context: Context, call: ApiCall, code: str) -> tuple[ApiKey, ApiKey]:
    """Return a valid link and the key that made the link."""
    link = authenticate(context.tokens, code, call.now, kinds={KeyKind.LINK})
    opener = context.tokens.get_key(link.parent or "") if isinstance(link, ApiKey) else None
    if isinstance(link, ErrorCode) or opener is None:
        raise Refusal(ErrorCode.SESSION_CODE_INVALID, field="code")
    return link, opener


def _used_already() -> Refusal:
    return Refusal(ErrorCode.SESSION_CODE_INVALID, "The one-time link was used already.", field="code")


def _require_opener(key: ApiKey | ErrorCode, *, field: str) -> ApiKey:
    """Return an ordinary key that has a scope of a session."""
    if isinstance(key, ErrorCode):
        raise Refusal(key, field=field)
    if key.kind is not None or key.machine is not None or not SESSION_SCOPES & {*key.scopes}:
        raise Refusal(
            ErrorCode.WRONG_SCOPE,
            "An ordinary API key with the scope admin or submit opens sessions; a session's token opens none.",
            field=field,
        )
    return key


def _authenticate_cookie(context: Context, call: ApiCall) -> ApiKey | ErrorCode:
    return authenticate(context.tokens, call.cookies.get(SESSION_COOKIE, ""), call.now, kinds={KeyKind.SESSION})


def _with_cookie(call: ApiCall, value: KeyView | NoContent, cookie: str, max_age_s: int) -> WithHeaders:
    secure = "; Secure" if call.origin.startswith("https:") else ""
    line = f"{SESSION_COOKIE}={cookie}; HttpOnly; SameSite=Strict; Path={COOKIE_PATH}; Max-Age={max_age_s}{secure}"
    return WithHeaders(value, {}, cookies=(line,))


def _require_own_origin(call: ApiCall) -> None:
    """Refuse a request that a page of another origin sends. Browsers name the origin; other clients hold no cookie."""
    origin = call.headers.get("origin")
    own = urlsplit(call.origin)
    foreign = origin is not None and urlsplit(origin.lower())[:2] != (own.scheme, own.netloc.lower())
    if foreign or call.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Refusal(ErrorCode.ORIGIN_REFUSED, field="origin")
