"""Unknown jobs and other tenants' jobs receive the same answers from every call."""

from __future__ import annotations

import pytest

from baton.contract.errors import ErrorCode
from functions.api.http.route import Route
from tests.functional.api.calls import ABOUT_A_JOB, named, valid_call
from tests.kits.api.harness import NO_JOB, Api


@pytest.mark.parametrize("route", ABOUT_A_JOB, ids=named)
@pytest.mark.parametrize("state", ["unknown", "pending", "running", "complete"])
def test_unknown_and_foreign_jobs_are_not_found(api: Api, route: Route, state: str) -> None:
    job_id, token = NO_JOB, "t" * 32
    if state != "unknown":
        job_id = api.submit()["id"]
    if state in ("running", "complete"):
        held = api.claim()
        token = held.token
        held.commit(100).ok()
        if state == "complete":
            held.complete().ok()
    call = valid_call(route, job_id)
    key = "rival_" + min(route.scopes)
    with api.unchanged():
        answer = api.call(call.method, call.target, call.body, key=key, headers={"x-lease-token": token})
        error = answer.refused(ErrorCode.JOB_NOT_FOUND, "id")
        assert error["message"] == f"No job {job_id}. {ErrorCode.JOB_NOT_FOUND.remedy}"


@pytest.mark.parametrize("token", [None, "t" * 32, "held"])
@pytest.mark.parametrize("lease_aware", [True, False])
def test_a_heartbeat_for_a_foreign_job_is_answered_like_one_for_none(
    api: Api, token: str | None, lease_aware: bool
) -> None:
    if lease_aware:
        api.submit()
        held = api.claim()
        job_id = held.id
        token = held.token if token == "held" else token
    else:
        api.submit(instance_prompt="dog", instance_data_prefix="dog/")
        job_id = api.get("/work", query={"machine_id": "m-1"}).ok()[0]["id"]
    headers = {"x-lease-token": token} if token else {}
    with api.unchanged():
        foreign = api.post(f"/heartbeat/{job_id}", key="rival_worker", headers=headers)
        unknown = api.post(f"/heartbeat/{NO_JOB}", key="rival_worker", headers=headers)
    assert foreign.status == unknown.status == (404 if token else 400)
    assert foreign.text.replace(job_id, NO_JOB).replace(foreign.error["request_id"], "") == unknown.text.replace(
        unknown.error["request_id"], ""
    )
    code = ErrorCode.JOB_NOT_FOUND if token else ErrorCode.JOB_NOT_RUNNING
    foreign.refused(code, "id" if token else None)


@pytest.mark.parametrize("bad", ["x", "1234", "a" * 3000, "%2E%2E", "%C3%BC", "NO_JOB%0A", "NO_JOB%20"])
def test_an_id_that_cannot_be_one_is_not_found_and_never_reaches_a_store(api: Api, bad: str) -> None:
    bad = bad.replace("NO_JOB", NO_JOB)
    api.get(f"/job/{bad}").refused(ErrorCode.JOB_NOT_FOUND, "id")
    api.post(f"/heartbeat/{bad}").refused(ErrorCode.JOB_NOT_FOUND, "id")


@pytest.mark.parametrize("step", ["x", "-1", "1.5", "9" * 14, "1000000000001", "%D9%A3", "5%0A"])
def test_a_step_in_the_path_that_cannot_be_one(api: Api, step: str) -> None:
    api.post(f"/job/{NO_JOB}/checkpoints/{step}/urls").refused(ErrorCode.INVALID_VALUE, "step")
