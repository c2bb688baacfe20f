"""Answers to original clients: the shapes, and every difference that functions/api/README.md lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from tests.functional.api.original_calls import JOB, Original
from tests.functional.api.original_client import JOB_BODY
from tests.kits.api.harness import NO_JOB, TENANT, Api

README = Path(__file__).parents[3] / "functions" / "api" / "README.md"
INSTANTS = ("created_at", "started_at", "completed_at", "canceled_at", "failed_at", "last_heartbeat")
TEXT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}")


@pytest.fixture
def client(api: Api) -> Original:
    return Original(api, "m-1")


def submitted(client: Original, **more: Any) -> str:
    return str(client.call("POST", "/job", {**JOB, **more}).ok()["id"])


def completed(client: Original) -> str:
    job_id = submitted(client)
    client.taken()
    client.checkpoint(job_id, 50).ok()
    client.upload(client.model_key(job_id), b"trained").ok()
    client.report("complete", job_id, client.model_key(job_id)).ok()
    return job_id


@pytest.mark.parametrize("prompt", [{}, {"class_prompt": None}], ids=["left out", "null"])
def test_the_example_of_its_documentation_is_accepted(client: Original, prompt: dict[str, Any]) -> None:
    body = {name: value for name, value in JOB_BODY.items() if name != "class_prompt"}
    body |= {**prompt, "with_prior_preservation": True}
    row = client.call("POST", "/job", body).ok()
    assert body.items() <= row.items()
    assert client.taken()["id"] == row["id"]


def test_instants_are_text_in_every_row(api: Api, client: Original) -> None:
    def rows(job_id: str) -> list[dict[str, Any]]:
        listed = client.call("GET", "/jobs").ok()
        assert isinstance(listed, list)
        one = client.call("GET", f"/job/{job_id}").ok()
        assert one in listed
        return [one]

    made = client.call("POST", "/job", JOB).ok()
    seen = {name: {made[name]} for name in INSTANTS}
    for row in rows(made["id"]):
        assert {name: row[name] for name in INSTANTS} == {name: made[name] for name in INSTANTS}
    client.taken()
    canceled, failed = submitted(client), submitted(client, validation_epochs=51)
    client.call("POST", f"/job/{canceled}/stop").ok()
    for _ in range(3):
        worker = Original(api, None)
        while failed not in worker.holds:
            api.clock.advance(60)
            client.heartbeat(made["id"]).ok()
            worker.work()
        worker.report("fail", failed).ok()
    client.upload(client.model_key(made["id"]), b"trained").ok()
    client.heartbeat(made["id"]).ok()
    running = rows(made["id"])
    client.report("complete", made["id"], client.model_key(made["id"])).ok()
    for row in [*running, *rows(made["id"]), *rows(canceled), *rows(failed)]:
        for name in INSTANTS:
            seen[name].add(row[name])
    for name, values in seen.items():
        texts = values - {None}
        assert texts and all(TEXT.fullmatch(text) for text in texts), (name, values)
    assert [row["status"] for row in client.call("GET", "/jobs", query={"status": "failed"}).ok()] == ["failed"]


def test_events_have_the_columns_of_its_table(client: Original) -> None:
    job_id = completed(client)
    events = client.call("GET", f"/job/{job_id}/events").ok()
    assert [event["event_type"] for event in events] == ["created", "started", "checkpoint.committed", "complete"]
    assert {event["job_id"] for event in events} == {job_id}
    assert len({event["id"] for event in events}) == len(events)
    assert all(isinstance(event["event_data"], dict) and TEXT.fullmatch(event["timestamp"]) for event in events)
    assert events[1]["event_data"]["machine_id"] == "m-1"
    assert client.call("GET", f"/job/{NO_JOB}/events").ok() == []


def test_the_stop_of_an_ended_job_is_200_and_changes_nothing(api: Api, client: Original) -> None:
    job_id = completed(client)
    canceled = submitted(client)
    client.call("POST", f"/job/{canceled}/stop").ok()
    with api.unchanged():
        assert client.call("POST", f"/job/{job_id}/stop").ok()["status"] == "ok"
        assert client.call("POST", f"/job/{canceled}/stop").ok()["status"] == "ok"


def test_a_refusal_says_its_error_as_text(api: Api, client: Original, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submitted(client)
    refusals = [
        (client.call("GET", f"/job/{NO_JOB}"), ErrorCode.JOB_NOT_FOUND),
        (client.call("POST", "/job", {**JOB, "max_train_steps": -5}), ErrorCode.INVALID_VALUE),
        (client.call("POST", "/job", b"{"), ErrorCode.MALFORMED_JSON),
        (client.heartbeat(job_id), ErrorCode.JOB_NOT_RUNNING),
        (client.call("GET", "/download/training-data/x"), ErrorCode.TOKEN_INVALID),
    ]
    for answer, code in refusals:
        assert answer.status == code.status
        body = answer.json
        assert isinstance(body["error"], str) and code.remedy in body["error"], body
        assert body["code"] == code.value and body["request_id"]

    def defect(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(api.context.jobs, "get", defect)
    assert isinstance(client.call("GET", f"/job/{job_id}").json["error"], str)


@pytest.mark.parametrize(
    ("scopes", "headers"),
    [
        ((Scope.SUBMIT,), {}),
        ((Scope.WORKER,), {}),
        ((Scope.SUBMIT, Scope.WORKER, Scope.ADMIN), {}),
        ((Scope.SUBMIT, Scope.WORKER), {"user-agent": "baton/0.1.0 python/3.11.9"}),
    ],
)
def test_nobody_elses_answers_change(api: Api, scopes: tuple[Scope, ...], headers: dict[str, str]) -> None:
    key = api.issue(TENANT, *scopes)
    if Scope.SUBMIT in scopes:
        row = api.post("/job", JOB, key=key, headers=headers).ok()
        assert isinstance(row["created_at"], int)
        shown = api.get(f"/job/{row['id']}", key=key, headers=headers).ok()
        assert isinstance(shown["created_at"], int) and api.get("/jobs", key=key, headers=headers).ok() == [shown]
        (event,) = api.get(f"/job/{row['id']}/events", key=key, headers=headers).ok()
        assert isinstance(event["timestamp"], int) and "event_data" not in event
        answer = api.get(f"/job/{NO_JOB}/events", key=key, headers=headers)
    else:
        answer = api.post("/complete", {"job_id": NO_JOB}, key=key, headers=headers)
    assert answer.status == 404 and answer.json["error"]["code"] == "job_not_found"


# The differences


def _refused_key(api: Api, client: Original) -> None:
    answer = api.get("/jobs", key="baton_0000000000_unknown")
    assert answer.status == 403 and answer.json["error"]["code"] == "key_unknown"
    assert api.request("GET", "/jobs").json == {"message": "Unauthorized"}


def _invalid_body(api: Api, client: Original) -> None:
    for wrong in ({"stpes": 3}, {"max_train_steps": -5}):
        answer = client.call("POST", "/job", {**JOB, **wrong})
        assert answer.status == 422 and answer.json["problems"]


def _unknown_job(api: Api, client: Original) -> None:
    client.holds[NO_JOB] = {"checkpoint_prefix": f"jobs/{NO_JOB}/attempt-1/"}
    assert client.call("POST", f"/job/{NO_JOB}/stop").status == 404
    assert {answer.status for answer in client.reports(NO_JOB)} == {404}
    assert client.heartbeat(NO_JOB).status == 400


def _other_holder(api: Api, client: Original) -> None:
    job_id = submitted(client)
    client.taken()
    other = Original(api, "m-2")
    other.holds = client.holds
    assert {answer.status for answer in other.reports(job_id)} == {409}
    assert other.heartbeat(job_id).status == 400


def _ended_job(api: Api, client: Original) -> None:
    job_id = submitted(client)
    client.taken()
    client.call("POST", f"/job/{job_id}/stop").ok()
    assert {answer.status for answer in client.reports(job_id)} == {409}
    assert api.job(job_id)["state"] == "canceled"


def _not_stored(api: Api, client: Original) -> None:
    job_id = submitted(client)
    client.taken()
    for what, key in (("progress", client.zip_key(job_id, 50)), ("complete", client.model_key(job_id))):
        assert client.report(what, job_id, key).error["code"] == "not_stored_yet"


def _prefix(api: Api, client: Original) -> None:
    job_id = submitted(client)
    (peeked,) = client.call("GET", "/work/peek").ok()
    assert peeked["checkpoint_prefix"] == client.taken()["checkpoint_prefix"] == f"jobs/{job_id}/attempt-1/"


def _failed_attempt(api: Api, client: Original) -> None:
    job_id = submitted(client)
    client.taken()
    client.report("fail", job_id).ok()
    assert api.job(job_id)["status"] == "pending"
    api.clock.advance(3600)
    assert client.work() is None
    api.clock.advance(86_400)
    assert client.taken()["id"] == job_id


def _silent_worker(api: Api, client: Original) -> None:
    assert api.context.settings.original_progress_s == 6 * 3600
    job_id = submitted(client)
    client.taken()
    for _ in range(12 * 60):
        client.heartbeat(job_id).ok()
        api.clock.advance(60)
    assert client.heartbeat(job_id).status == 400


def _events(api: Api, client: Original) -> None:
    job_id = submitted(client)
    client.taken()
    client.heartbeat(job_id).ok()
    client.checkpoint(job_id, 50).ok()
    names = [event["event_type"] for event in client.call("GET", f"/job/{job_id}/events").ok()]
    assert names == ["created", "started", "checkpoint.committed"]


def _states(api: Api, client: Original) -> None:
    job_id = submitted(client)
    client.call("POST", f"/job/{job_id}/pause").ok()
    assert client.call("GET", f"/job/{job_id}").ok()["status"] == "paused"


def _long_lists(api: Api, client: Original) -> None:
    for _ in range(1001):
        submitted(client)
    assert len(client.call("GET", "/jobs").ok()) < 1001


def _other_jobs(api: Api, client: Original) -> None:
    api.submit()
    assert client.work() is None


DIFFERENCES: dict[str, Callable[[Api, Original], None]] = {
    "refused-key": _refused_key,
    "invalid-body": _invalid_body,
    "unknown-job": _unknown_job,
    "other-holder": _other_holder,
    "ended-job": _ended_job,
    "not-stored": _not_stored,
    "prefix": _prefix,
    "failed-attempt": _failed_attempt,
    "silent-worker": _silent_worker,
    "events": _events,
    "states": _states,
    "long-lists": _long_lists,
    "other-jobs": _other_jobs,
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_is_as_the_readme_says(api: Api, client: Original, difference: str) -> None:
    DIFFERENCES[difference](api, client)


def test_the_readme_lists_these_differences() -> None:
    section = README.read_text().split("## Clients of the original orchestrator\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == list(DIFFERENCES)
