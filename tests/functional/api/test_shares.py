"""Links that show one job: what their keys may read, and when they end."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from functions.api.http.route import Route
from tests.functional.api.calls import GUARDED, named, valid_call
from tests.kits.api.harness import NOW, TENANT, Api

WEEK_S = 7 * 86_400


def share(api: Api, job_id: str, body: Any = None, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = api.post(f"/job/{job_id}/share", body, **more).ok(201)
    return made


def test_a_link_shows_its_job_until_it_expires(api: Api) -> None:
    job = api.submit()["id"]
    made = share(api, job, key="submit")
    assert made["url"] == f"http://api.test/console#share={made['key']}&job={job}"
    assert (made["kind"], made["scopes"], made["job"], made["expires_at"]) == ("share", ["view"], job, NOW + WEEK_S)
    listed = [key for key in api.get("/keys").ok()["keys"] if key["id"] == made["id"]]
    assert listed == [{name: value for name, value in made.items() if name not in ("key", "url")}]
    assert made["key"].rpartition("_")[2] not in str(api.snapshot())
    seen = api.get(f"/job/{job}", key=made["key"])
    assert seen.ok() == api.get(f"/job/{job}").ok()
    assert api.get(f"/job/{job}", key=made["key"], headers={"if-none-match": seen.headers["etag"]}).status == 304
    api.clock.advance(WEEK_S)
    api.get(f"/job/{job}", key=made["key"]).refused(ErrorCode.KEY_EXPIRED, "x-api-key")


@pytest.mark.parametrize("nodes", [None, {"min": 1, "max": 2}])
def test_a_link_shows_the_names_of_environment_variables_without_their_values(
    api: Api, nodes: dict[str, int] | None
) -> None:
    job = api.submit(environment={"HF_TOKEN": "hf_canary"}, **({"nodes": nodes} if nodes else {}))["id"]
    key = share(api, job)["key"]
    assert api.get(f"/job/{job}").ok()["environment"] == {"HF_TOKEN": "hf_canary"}
    assert api.get(f"/job/{job}", key=key).ok()["environment"] == {"HF_TOKEN": ""}
    for route in GUARDED:
        if route.shared:
            assert "hf_canary" not in api.get(valid_call(route, job).target, key=key).text


@pytest.mark.parametrize("route", GUARDED, ids=named)
def test_the_key_of_a_link_reads_its_job_and_does_nothing_else(api: Api, route: Route) -> None:
    mine, other = api.submit()["id"], api.submit()["id"]
    key = share(api, mine)["key"]
    call = valid_call(route, mine)
    with api.unchanged():
        answer = api.call(call.method, call.target, call.body, key=key)
        if not route.shared:
            answer.refused(ErrorCode.WRONG_SCOPE, "x-api-key", remedy="Use a key of your own")
            return
        assert answer.status in (200, 404, 409) and "another job" not in answer.text
        for target in (valid_call(route, other).target, valid_call(route, mine.upper()).target):
            api.call(call.method, target, key=key).refused(ErrorCode.JOB_NOT_FOUND, "id")


def test_the_reads_of_a_shared_job_are_these() -> None:
    shared = {route.path.removeprefix("/job/{id}") for route in GUARDED if route.shared}
    assert {"", "/events", "/attempts", "/checkpoints", "/logs", "/metrics", "/rules"} <= shared
    assert all(route.method == "GET" and route.scopes == {Scope.SUBMIT} for route in GUARDED if route.shared)


def test_a_link_ends_by_revocation_and_with_the_key_that_made_it(api: Api) -> None:
    job = api.submit()["id"]
    maker = api.issue(TENANT, Scope.SUBMIT, expires_at=NOW + 100)
    first, second = share(api, job), share(api, job, key=maker)
    assert second["expires_at"] == NOW + 100
    api.call("DELETE", f"/keys/{first['id']}").ok(204)
    api.get(f"/job/{job}", key=first["key"]).refused(ErrorCode.KEY_REVOKED, "x-api-key")
    assert api.get(f"/job/{job}", key=second["key"]).status == 200
    api.call("DELETE", f"/keys/{maker.split('_')[1]}").ok(204)
    api.get(f"/job/{job}", key=second["key"]).refused(ErrorCode.KEY_REVOKED, "x-api-key")


def test_a_submitter_ends_the_links_of_the_tenant_and_no_other_key(api: Api) -> None:
    job = api.submit()["id"]
    made = share(api, job)
    others = [one["id"] for one in api.get("/keys").ok()["keys"] if one["id"] != made["id"]]
    cookie = {"cookie": api.post("/sessions", {"key": api.keys["submit"]}).headers["set-cookie"].partition(";")[0]}
    token = api.request("POST", "/sessions/token", headers=cookie).ok(201)["token"]
    sessions = [one["id"] for one in api.get("/keys").ok()["keys"] if one["kind"] == "session"]
    assert others and sessions
    worker = api.issue(TENANT, *(set(Scope) - {Scope.ADMIN, Scope.SUBMIT}))
    with api.unchanged():
        for other in (*others, *sessions, token.split("_")[1]):
            api.call("DELETE", f"/keys/{other}", key=token).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        api.call("DELETE", f"/keys/{made['id']}", key="rival_submit").refused(ErrorCode.KEY_NOT_FOUND, "id")
        api.call("DELETE", f"/keys/{made['id']}", key=worker).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
    api.call("DELETE", f"/keys/{made['id']}", key=token).ok(204)
    api.get(f"/job/{job}", key=made["key"]).refused(ErrorCode.KEY_REVOKED, "x-api-key")


def test_a_link_of_a_session_outlives_the_session_but_not_its_key(api: Api) -> None:
    job, key = api.submit()["id"], api.issue(TENANT, Scope.SUBMIT)
    cookie = {"cookie": api.post("/sessions", {"key": key}).headers["set-cookie"].partition(";")[0]}
    token = api.request("POST", "/sessions/token", headers=cookie).ok(201)["token"]
    made = share(api, job, {"expires_in_s": 60}, key=token)
    assert made["parent"] == key.split("_")[1] and made["expires_at"] == NOW + 60
    api.request("DELETE", "/sessions/current", headers=cookie).ok(204)
    assert api.get(f"/job/{job}", key=made["key"]).status == 200
    with api.unchanged():
        api.post("/sessions", {"key": made["key"]}).refused(ErrorCode.WRONG_SCOPE, "key")
        api.post(f"/job/{job}/share", key="rival_submit").refused(ErrorCode.JOB_NOT_FOUND, "id")
        api.post(f"/job/{job}/share", {"expires_in_s": 59}).refused(ErrorCode.INVALID_VALUE, "expires_in_s")


def test_a_key_with_the_scope_view_but_no_job_reads_nothing(api: Api) -> None:
    job = api.submit()["id"]
    made = api.post("/keys", {"name": "v", "scopes": ["view"]}).ok()
    api.get(f"/job/{job}", key=made["key"]).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
