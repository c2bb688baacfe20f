"""Outages of the stores and defects: a clear answer, a log line, no partial write."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.api.http.route import Route
from functions.api.jobs import job_calls
from functions.api.operations.sweeper import sweep
from functions.domain.errors import StorageUnavailable, WriteConflict
from tests.functional.api.calls import GUARDED, named, valid_call
from tests.kits.api.harness import NO_JOB, NOW, Api


class Away:
    """A store that does not answer."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise StorageUnavailable(f"{name}: ThrottlingException in account 4711")

        return call


def without(api: Api, monkeypatch: pytest.MonkeyPatch, *stores: str) -> None:
    for store in stores:
        # The context is frozen; tests may.
        monkeypatch.setitem(api.context.__dict__, store, Away())


@pytest.mark.parametrize("route", GUARDED, ids=named)
def test_without_storage_every_call_says_so(
    api: Api, route: Route, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = valid_call(route, NO_JOB)
    with api.unchanged(), monkeypatch.context() as patched, caplog.at_level(logging.INFO):
        without(api, patched, "jobs", "leases", "objects", "tokens")
        answer = api.call(call.method, call.target, call.body)
    answer.refused(ErrorCode.UNAVAILABLE)
    assert int(answer.headers["retry-after"]) >= 1
    assert "4711" not in answer.text
    assert any(record.exc_info and "unavailable" in record.message for record in caplog.records)


@pytest.mark.parametrize("store", ["jobs", "leases", "objects"])
def test_each_store_may_be_away(api: Api, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    api.submit()
    held = api.claim()
    held.commit(100).ok()
    declared = held.store_artifacts({"model": b"x"})
    with api.unchanged(), monkeypatch.context() as patched:
        without(api, patched, store)
        held.commit(200).refused(ErrorCode.UNAVAILABLE)
        held.post("/complete", {"job_id": held.id, "artifacts": declared}).refused(ErrorCode.UNAVAILABLE)
        if store != "jobs":
            # For a line of output the lease is proof enough.
            log = held.post(f"/job/{held.id}/logs", {"first_line": 0, "lines": ["a"]})
            log.refused(ErrorCode.UNAVAILABLE)
    held.commit(200).ok()
    held.post("/complete", {"job_id": held.id, "artifacts": declared}).ok()


def test_a_write_that_fails_leaves_everything_as_it_was(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.submit()
    held = api.claim()
    pending = api.submit()["id"]

    def fail(*_: Any) -> Any:
        raise StorageUnavailable("no answer")

    declared = held.store_artifacts({"model": b"x"})
    with api.unchanged(), monkeypatch.context() as patched:
        patched.setattr(api.context.jobs, "apply", fail)
        patched.setattr(api.context.leases, "heartbeat", fail)
        for answer in (
            api.post("/job", {"command": ["a"]}),
            api.post(f"/job/{pending}/stop"),
            api.post(f"/job/{pending}/pause"),
            api.get("/work", headers={"x-lease-aware": "1"}),
            held.heartbeat(step=1),
            held.fail(),
            held.release(),
            held.post("/complete", {"job_id": held.id, "artifacts": declared}),
        ):
            answer.refused(ErrorCode.UNAVAILABLE)
    held.post("/complete", {"job_id": held.id, "artifacts": declared}).ok()


@pytest.mark.parametrize("original", [True, False])
def test_a_claim_that_cannot_be_answered_is_handed_back(
    api: Api, original: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim whose answer fails is handed back at once; without that, the job would wait for the end of its lease."""
    body: dict[str, Any] = {"instance_prompt": "dog", "instance_data_prefix": "dog/"} if original else {}
    job_id = api.submit(**body)["id"]
    held = api.claim()
    held.commit(100).ok()
    held.release().ok()
    headers = {} if original else {"x-lease-aware": "1"}
    with monkeypatch.context() as patched:
        if original:
            without(api, patched, "objects")
        else:
            patched.setattr(api.context.jobs, "history", Away().history)
        api.get("/work", headers=headers).refused(ErrorCode.UNAVAILABLE)
    view = api.job(job_id)
    assert view["state"] == "pending" and view["counters"]["interruptions"] == 0
    assert api.attempts(job_id)[-1]["reason"]["code"] == "not_handed_out"
    assert api.claim().id == job_id


def test_a_key_that_cannot_be_looked_up_is_not_called_unknown(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        without(api, patched, "tokens")
        answer = api.get("/jobs")
    answer.refused(ErrorCode.UNAVAILABLE)
    assert answer.headers["retry-after"] == "2"
    assert api.get("/jobs").ok() == []


def test_a_defect_of_ours_shows_nothing_of_the_inside(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret of the inside")

    with api.unchanged(), caplog.at_level(logging.INFO):
        monkeypatch.setattr(job_calls.rules, "submit", defect)
        answer = api.post("/job", {"command": ["a"]})
    answer.refused(ErrorCode.INTERNAL)
    assert "inside" not in answer.text and "ZeroDivision" not in answer.text and "Traceback" not in answer.text
    (record,) = [record for record in caplog.records if record.message == "unexpected failure"]
    assert record.exc_info and record.__dict__["request_id"] == answer.error["request_id"]
    assert record.__dict__["action"] == "POST /job"


def test_an_error_of_ours_can_be_found_by_what_the_user_quotes(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        answer = api.get(f"/job/{NO_JOB}")
    (record,) = [record for record in caplog.records if record.message == "answered"]
    assert record.__dict__["status"] == 404 and record.__dict__["request_id"] == answer.error["request_id"]


def test_a_job_that_others_change_all_the_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = api.submit()["id"]
    apply, tries = api.context.jobs.apply, []

    def conflict(change: Any) -> None:
        tries.append(change)
        if len(tries) < 4:
            raise WriteConflict
        apply(change)

    monkeypatch.setattr(api.context.jobs, "apply", conflict)
    assert api.post(f"/job/{job_id}/pause").ok()["state"] == "paused"

    def always(_: Any) -> None:
        raise WriteConflict

    monkeypatch.setattr(api.context.jobs, "apply", always)
    with api.unchanged():
        api.post(f"/job/{job_id}/resume").refused(ErrorCode.CONFLICT)


def test_a_control_plane_that_was_down_takes_no_job_from_a_machine_that_lives(api: Api) -> None:
    """Ten heartbeats fail; then each worker has the time of one call and one pause to renew its lease."""
    api.submit()
    held = api.claim()
    api.sweep()
    api.clock.advance(300)
    swept = sweep(api.context.jobs, api.context.leases, api.clock)
    assert (swept.reclaimed, swept.left) == (0, 1)
    assert held.heartbeat(step=10).ok()["lease_expires_at"] == NOW + 390
    held.commit(20).ok()
    assert api.job(held.id)["counters"]["interruptions"] == 0
