"""API keys: invalid keys, scopes, and the life of a key."""

from __future__ import annotations

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import OPERATOR_TENANT, Scope
from functions.api.http.route import Route, all_routes
from tests.functional.api.calls import GUARDED, named, valid_call
from tests.kits.api.harness import NO_JOB, NOW, RIVAL, TENANT, Api


@pytest.mark.parametrize("route", GUARDED, ids=named)
def test_every_call_needs_one_of_its_scopes(api: Api, route: Route) -> None:
    call = valid_call(route, NO_JOB)
    tenant = OPERATOR_TENANT if route.operator else TENANT
    without = api.issue(tenant, *(set(Scope) - route.scopes))
    with api.unchanged():
        error = api.call(call.method, call.target, call.body, key=without).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        assert all(scope.value in error["message"] for scope in route.scopes)
    for scope in route.scopes:
        answer = api.call(call.method, call.target, call.body, key=api.issue(tenant, scope))
        assert answer.status not in (401, 403) or answer.error["code"] == "token_invalid", answer.text


OPERATED = [route for route in GUARDED if route.path.startswith(("/providers", "/fleet-doctor"))]


def test_the_calls_about_the_whole_deployment_are_the_operator_s() -> None:
    assert [route for route in all_routes() if route.operator] == OPERATED


@pytest.mark.parametrize("route", OPERATED, ids=named)
def test_no_other_tenant_s_admin_manages_the_deployment(api: Api, route: Route) -> None:
    """Neither an answer nor its code tells whether the deployment has an account."""
    call = valid_call(route, NO_JOB)
    keys = [api.issue(tenant, *Scope) for tenant in (TENANT, RIVAL)]
    with api.unchanged():
        for key in keys:
            api.call(call.method, call.target, call.body, key=key).refused(ErrorCode.OPERATOR_ONLY, "x-api-key")


@pytest.mark.parametrize("route", GUARDED, ids=named)
def test_every_call_needs_a_key_that_works(api: Api, route: Route) -> None:
    call = valid_call(route, NO_JOB)
    good = api.issue(TENANT, *Scope)
    expired = api.issue(TENANT, *Scope, expires_at=NOW)
    revoked = api.issue(TENANT, *Scope)
    api.call("DELETE", f"/keys/{revoked.split('_')[1]}").ok(204)
    prefix, key_id, secret = good.split("_", 2)
    with api.unchanged():
        assert api.request(call.method, call.target).status == 401
        for bad, code in (
            ("nonsense", ErrorCode.KEY_UNKNOWN),
            (f"{prefix}_{key_id}_{'x' * len(secret)}", ErrorCode.KEY_UNKNOWN),
            (f"other_{key_id}_{secret}", ErrorCode.KEY_UNKNOWN),
            (f"{prefix}_{'a' * 20}_{secret}", ErrorCode.KEY_UNKNOWN),
            (expired, ErrorCode.KEY_EXPIRED),
            (revoked, ErrorCode.KEY_REVOKED),
        ):
            api.call(call.method, call.target, call.body, key=bad).refused(code, "x-api-key")


def test_a_wrong_secret_does_not_tell_that_the_key_was_revoked(api: Api) -> None:
    revoked = api.issue(TENANT, Scope.SUBMIT)
    key_id = revoked.split("_")[1]
    api.call("DELETE", f"/keys/{key_id}").ok(204)
    api.get("/jobs", key=f"baton_{key_id}_{'x' * 64}").refused(ErrorCode.KEY_UNKNOWN, "x-api-key")


def test_health_needs_no_key(api: Api) -> None:
    answer = api.request("GET", "/health").ok()
    assert answer == {"status": "ok", "version": "0.1.0", "server_time": NOW}


def test_the_routes_without_a_scope_are_health_the_console_and_what_reads_a_code_or_a_cookie() -> None:
    cookie = ["POST /sessions", "POST /sessions/preview", "POST /sessions/token", "DELETE /sessions/current"]
    files = ["GET /", "HEAD /", "GET /console", "HEAD /console", "GET /console/{file}"]
    assert [route.route_key for route in all_routes() if not route.scopes] == [*cookie, "GET /health", *files]


def test_a_new_key_works_at_once_and_is_shown_only_once(api: Api) -> None:
    made = api.post("/keys", {"name": "laptop", "scopes": ["submit", "submit"], "expires_in_s": 60}).ok()
    assert made["scopes"] == ["submit"] and made["expires_at"] == NOW + 60 and made["tenant"] == TENANT
    assert api.get("/jobs", key=made["key"]).ok() == []
    listed = {key["id"]: key for key in api.get("/keys").ok()["keys"]}
    secret = made["key"].split("_", 2)[2]
    assert listed[made["id"]] == {name: value for name, value in made.items() if name != "key"}
    assert secret not in api.get("/keys").text
    assert secret not in str(api.snapshot())
    api.clock.advance(60)
    api.get("/jobs", key=made["key"]).refused(ErrorCode.KEY_EXPIRED, "x-api-key")


def test_rotation_leaves_the_old_key_its_overlap(api: Api) -> None:
    old = api.post("/keys", {"name": "ci", "scopes": ["worker"]}).ok()
    new = api.post("/keys", {"name": "ci", "scopes": ["worker"], "replaces": old["id"], "overlap_s": 100}).ok()
    api.clock.advance(99)
    assert api.get("/work", key=old["key"]).ok() == []
    api.clock.advance(1)
    api.get("/work", key=old["key"]).refused(ErrorCode.KEY_EXPIRED, "x-api-key")
    assert api.get("/work", key=new["key"]).ok() == []


def test_rotation_never_prolongs_a_key(api: Api) -> None:
    old = api.post("/keys", {"name": "ci", "scopes": ["worker"], "expires_in_s": 60}).ok()
    api.post("/keys", {"name": "ci", "scopes": ["worker"], "replaces": old["id"], "overlap_s": 1000}).ok()
    api.clock.advance(60)
    api.get("/work", key=old["key"]).refused(ErrorCode.KEY_EXPIRED, "x-api-key")


def test_replacing_a_key_that_is_not_ones_own_makes_none(api: Api) -> None:
    theirs = api.post("/keys", {"name": "t", "scopes": ["submit"]}, key="rival_admin").ok()
    with api.unchanged():
        for unknown in (theirs["id"], "a" * 20):
            body = {"name": "n", "scopes": ["submit"], "replaces": unknown}
            api.post("/keys", body).refused(ErrorCode.KEY_NOT_FOUND, "replaces")


def test_revoking_is_repeatable_and_stays_within_the_tenant(api: Api) -> None:
    theirs = api.post("/keys", {"name": "t", "scopes": ["submit"]}, key="rival_admin").ok()
    with api.unchanged():
        for unknown in (theirs["id"], "a" * 20, "a" * 3000, "%C3%BC" * 8, "a" * 19 + "%0A"):
            api.call("DELETE", f"/keys/{unknown}").refused(ErrorCode.KEY_NOT_FOUND, "id")
    assert api.get("/jobs", key=theirs["key"]).ok() == []
    mine = api.post("/keys", {"name": "m", "scopes": ["submit"]}).ok()
    for _ in range(2):
        api.call("DELETE", f"/keys/{mine['id']}").ok(204)
        api.clock.advance(5)
    (view,) = [key for key in api.get("/keys").ok()["keys"] if key["id"] == mine["id"]]
    assert view["revoked_at"] == NOW
    api.get("/jobs", key=mine["key"]).refused(ErrorCode.KEY_REVOKED, "x-api-key")


def test_keys_are_listed_in_pages_of_ones_own(api: Api) -> None:
    api.issue(RIVAL, Scope.SUBMIT)
    made = [api.post("/keys", {"name": f"k{n}", "scopes": ["submit"]}).ok()["id"] for n in range(5)]
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = api.get("/keys", query={"limit": 2, **({"cursor": cursor} if cursor else {})}).ok()
        assert len(page["keys"]) <= 2 and all(key["tenant"] == TENANT for key in page["keys"])
        found += [key["id"] for key in page["keys"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert len(found) == len(set(found)) == 9
    assert set(made) <= set(found)
    theirs = api.get("/keys", key="rival_admin").ok()["keys"]
    assert len(theirs) == 5 and all(key["tenant"] == RIVAL for key in theirs)
