"""Sessions of the console: one-time links, sign-in, short-lived tokens, sign-out."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from functions.api.http.dispatch import dispatch
from functions.domain.access.sessions import LINK_LIFE_S, SESSION_LIFE_S, TOKEN_LIFE_S
from tests.kits.api.harness import NOW, RIVAL, TENANT, Answer, Api


def code_of(api: Api, key: str = "submit") -> str:
    link = api.post("/sessions/links", key=key).ok(201)
    address, _, code = link["url"].partition("#code=")
    assert address == "http://api.test/console" and link["expires_at"] <= api.clock.now() + LINK_LIFE_S
    return str(code)


def cookie_of(answer: Answer) -> dict[str, str]:
    assert answer.status == 201, answer.text
    return {"cookie": answer.headers["set-cookie"].partition(";")[0]}


def sign_in(api: Api, key: str = "submit") -> dict[str, str]:
    return cookie_of(api.request("POST", "/sessions", b'{"code": "%s"}' % code_of(api, key).encode()))


def token_of(api: Api, cookie: dict[str, str]) -> str:
    return str(api.request("POST", "/sessions/token", headers=cookie).ok(201)["token"])


def test_a_link_opens_a_session_whose_tokens_call_the_api(api: Api) -> None:
    answer = api.request("POST", "/sessions", b'{"code": "%s"}' % code_of(api).encode())
    session = answer.ok(201)
    assert answer.headers["set-cookie"].partition("; ")[2] == "HttpOnly; SameSite=Strict; Path=/sessions; Max-Age=43200"
    made = api.request("POST", "/sessions/token", headers=cookie_of(answer)).ok(201)
    assert made == {
        "token": made["token"],
        "expires_at": NOW + TOKEN_LIFE_S,
        "scopes": ["submit"],
        "tenant": TENANT,
        "key_id": session["id"],
    }
    assert api.get("/jobs", key=made["token"]).ok() == []
    parent = api.keys["submit"].split("_")[1]
    assert (session["kind"], session["parent"], session["expires_at"]) == ("session", parent, NOW + SESSION_LIFE_S)
    listed = api.get("/keys").ok()["keys"]
    assert session in listed and {key["kind"] for key in listed} == {None, "session"}, "neither links nor tokens"


def test_the_cookie_travels_by_https_alone_where_the_api_has_https(api: Api) -> None:
    answer = api.post("/sessions", {"key": api.keys["submit"]}, headers={"x-forwarded-proto": "https"})
    assert answer.headers["set-cookie"].endswith("; Secure")
    assert api.post("/sessions/links", headers={"x-forwarded-proto": "https"}).ok(201)["url"].startswith("https://api.")


def test_a_code_is_used_once_also_by_many_at_once(api: Api) -> None:
    body = b'{"code": "%s"}' % code_of(api).encode()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: api.request("POST", "/sessions", body), range(8)))
    assert sorted(answer.status for answer in answers) == [201, *[401] * 7]
    with api.unchanged():
        answer = api.request("POST", "/sessions", body)
        assert "used already" in answer.refused(ErrorCode.SESSION_CODE_INVALID, "code")["message"]
        assert "set-cookie" not in answer.headers


def test_a_code_ends_with_its_minute_and_with_its_key(api: Api) -> None:
    key = api.issue(TENANT, Scope.SUBMIT)
    code, other = code_of(api), code_of(api, key)
    api.call("DELETE", f"/keys/{key.split('_')[1]}").ok(204)
    wrong = [other, f"{code}x", "baton_a", api.keys["submit"]]
    with api.unchanged():
        for one in wrong:
            api.post("/sessions", {"code": one}).refused(ErrorCode.SESSION_CODE_INVALID, "code")
        api.clock.advance(LINK_LIFE_S)
        api.post("/sessions", {"code": code}).refused(ErrorCode.SESSION_CODE_INVALID, "code")


def test_a_code_names_its_tenant_and_key_before_it_is_used(api: Api) -> None:
    """The page asks its reader first: a link that somebody else sends signs in to the sender's tenant."""
    code = code_of(api, "rival_submit")
    key_id = api.keys["rival_submit"].split("_")[1]
    (key,) = [one for one in api.get("/keys", key="rival_admin").ok()["keys"] if one["id"] == key_id]
    with api.unchanged():
        for _ in range(2):
            answer = api.post("/sessions/preview", {"code": code})
            assert answer.ok() == {
                "tenant": RIVAL,
                "key_id": key_id,
                "key_name": key["name"],
                "scopes": ["submit"],
                "expires_at": NOW + LINK_LIFE_S,
            }
            assert "set-cookie" not in answer.headers
        for wrong in (f"{code}x", "baton_a", api.keys["submit"]):
            api.post("/sessions/preview", {"code": wrong}).refused(ErrorCode.SESSION_CODE_INVALID, "code")
    api.post("/sessions", {"code": code}).ok(201)
    with api.unchanged():
        used = api.post("/sessions/preview", {"code": code}).refused(ErrorCode.SESSION_CODE_INVALID, "code")
        assert "used already" in used["message"]


def test_a_code_opens_a_session_of_its_own_tenant(api: Api) -> None:
    mine, theirs = sign_in(api), code_of(api, "rival_submit")
    answer = api.request("POST", "/sessions", b'{"code": "%s"}' % theirs.encode(), mine)
    assert answer.ok(201)["tenant"] == RIVAL
    assert api.request("POST", "/sessions/token", headers=mine).ok(201)["tenant"] == TENANT
    assert api.request("POST", "/sessions/token", headers=cookie_of(answer)).ok(201)["tenant"] == RIVAL


def test_a_pasted_key_opens_a_session_or_the_error_names_its_fault(api: Api) -> None:
    cookie = cookie_of(api.request("POST", "/sessions", b'{"key": "%s"}' % api.keys["admin"].encode()))
    assert api.get("/keys", key=token_of(api, cookie)).ok()["keys"]
    refused = [
        (api.keys["submit"][:-1] + "~", ErrorCode.KEY_UNKNOWN),
        (code_of(api), ErrorCode.KEY_UNKNOWN),
        (cookie["cookie"].partition("=")[2], ErrorCode.KEY_UNKNOWN),
        (api.issue(TENANT, Scope.SUBMIT, expires_at=NOW), ErrorCode.KEY_EXPIRED),
        (api.keys["worker"], ErrorCode.WRONG_SCOPE),
        (api.issue(TENANT, Scope.SUBMIT, machine="nights/m-1"), ErrorCode.WRONG_SCOPE),
        (token_of(api, cookie), ErrorCode.WRONG_SCOPE),
    ]
    with api.unchanged():
        for key, code in refused:
            api.post("/sessions", {"key": key}).refused(code, "key")
        api.post("/sessions", {"key": api.keys["submit"], "code": "c"}).refused(ErrorCode.UNKNOWN_FIELD, "code")


def test_rights_never_grow(api: Api) -> None:
    """Neither scopes nor time: a worker's scope stays behind, and a token opens no session that outlives its own."""
    key = api.issue(TENANT, Scope.SUBMIT, Scope.WORKER, expires_at=NOW + 600)
    code = code_of(api, key)
    api.clock.advance(10)
    answer = api.post("/sessions", {"code": code})
    assert answer.ok(201)["scopes"] == ["submit"] and answer.ok(201)["expires_at"] == NOW + 600
    assert "Max-Age=590" in answer.headers["set-cookie"]
    token = api.request("POST", "/sessions/token", headers=cookie_of(answer)).ok(201)
    assert token["scopes"] == ["submit"] and token["expires_at"] == NOW + 600
    with api.unchanged():
        api.get("/work", key=token["token"]).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        api.get("/keys", key=token["token"]).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        api.post("/sessions/links", key=token["token"]).refused(ErrorCode.WRONG_SCOPE, "x-api-key")


def test_neither_a_code_nor_a_cookie_is_a_key(api: Api) -> None:
    for secret in (code_of(api), sign_in(api)["cookie"].partition("=")[2]):
        api.get("/jobs", key=secret).refused(ErrorCode.KEY_UNKNOWN, "x-api-key")


@pytest.mark.parametrize("end", ["sign-out", "revoked session", "revoked key", "expired session"])
def test_the_end_of_a_session_ends_its_tokens(api: Api, end: str) -> None:
    key = api.issue(TENANT, Scope.SUBMIT)
    cookie = sign_in(api, key)
    api.clock.advance(SESSION_LIFE_S - TOKEN_LIFE_S // 2)
    made = api.request("POST", "/sessions/token", headers=cookie).ok(201)
    assert made["expires_at"] == NOW + SESSION_LIFE_S, "no token outlives its session"
    assert api.get("/jobs", key=made["token"]).ok() == []
    if end == "sign-out":
        answer = api.request("DELETE", "/sessions/current", headers=cookie)
        answer.ok(204)
        assert answer.headers["set-cookie"].startswith("baton_session=; HttpOnly") and answer.body == b""
    elif end == "expired session":
        api.clock.advance(TOKEN_LIFE_S // 2)
    else:
        api.call("DELETE", f"/keys/{made['key_id'] if end == 'revoked session' else key.split('_')[1]}").ok(204)
    with api.unchanged():
        expected = ErrorCode.KEY_EXPIRED if end == "expired session" else ErrorCode.SESSION_OVER
        api.get("/jobs", key=made["token"]).refused(expected, "x-api-key")
        api.request("POST", "/sessions/token", headers=cookie).refused(ErrorCode.SESSION_OVER, "baton_session")
        api.request("DELETE", "/sessions/current", headers=cookie).ok(204)


def test_a_token_without_a_valid_cookie_is_refused(api: Api) -> None:
    cookie = sign_in(api)["cookie"]
    with api.unchanged():
        for sent in ({}, {"cookie": "baton_session="}, {"cookie": cookie + "x"}, {"cookie": "other=1"}):
            api.request("POST", "/sessions/token", headers=sent).refused(ErrorCode.SESSION_OVER, "baton_session")
    # A browser that holds two cookies of one name sends the cookie with the more specific path first.
    api.request("POST", "/sessions/token", headers={"cookie": f"a=b; {cookie}; baton_session=x"}).ok(201)


def test_a_gateway_may_leave_the_cookies_in_their_header(api: Api) -> None:
    cookie = sign_in(api)["cookie"]
    event = {"routeKey": "POST /sessions/token", "headers": {"Cookie": f"other=1; {cookie}"}}
    assert dispatch(event, api.context, "admin")["statusCode"] == 201


FOREIGN = [
    {"origin": "https://evil.test"},
    {"origin": "null"},
    {"origin": "https://api.test"},
    {"origin": "http://api.test:81"},
    {"origin": "http://api.test.evil.test"},
    {"origin": ""},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("sent", FOREIGN, ids=str)
def test_a_page_of_another_origin_is_refused(api: Api, sent: dict[str, str]) -> None:
    cookie = sign_in(api)
    code = code_of(api)
    with api.unchanged():
        for method, path, body in (
            ("POST", "/sessions", b'{"code": "%s"}' % code.encode()),
            ("POST", "/sessions/preview", b'{"code": "%s"}' % code.encode()),
            ("POST", "/sessions/token", b""),
            ("DELETE", "/sessions/current", b""),
        ):
            answer = api.request(method, path, body, {**cookie, **sent})
            answer.refused(ErrorCode.ORIGIN_REFUSED, "origin")
            assert "set-cookie" not in answer.headers and "access-control-allow-origin" not in answer.headers
    own = {"origin": "http://API.test", "sec-fetch-site": "same-origin"}
    api.request("POST", "/sessions/token", headers={**cookie, **own}).ok(201)


def test_no_secret_is_logged_or_stored(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    code = code_of(api)
    answer = api.post("/sessions", {"code": code})
    cookie = cookie_of(answer)
    token = token_of(api, cookie)
    bad = [api.post("/sessions", {"code": code}), api.get("/jobs", key=token + "x"), api.post("/sessions", {"k": code})]
    assert all(one.status >= 400 for one in bad)
    secrets = [one.rpartition("_")[2][-40:] for one in (code, cookie["cookie"], token)]
    seen = caplog.text + str(api.snapshot()) + answer.text + "".join(one.text for one in bad)
    assert all(len(secret) == 40 and secret not in seen for secret in secrets)
