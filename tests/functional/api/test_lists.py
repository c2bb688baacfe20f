"""Lists: pages without gaps, cursors bound to their list, answers within Lambda's limit."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState
from functions.api.jobs import job_calls
from tests.kits.api.harness import NOW, Api, Held

Filled = tuple[Api, Held]


@pytest.fixture
def filled(api: Api) -> Filled:
    """Fill every list: jobs, events, attempts, checkpoints, log lines, objects, inputs, keys."""
    api.submit(inputs=[{"prefix": "a/"}, {"prefix": "b/"}], policy={"retention": {"keep_last": 100}})
    for letter in "ab":
        for number in range(3):
            api.put_object("training-data", f"{letter}/{number}")
    step = 0
    for _ in range(4):
        held = api.claim()
        for _ in range(2):
            step += 10
            held.commit(step).ok()
        points = [{"step": n, "at": NOW, "metrics": {"loss": n}} for n in range(3)]
        chunk = {"first_line": 0, "lines": [f"{held.epoch}.{n}" for n in range(3)], "points": points}
        held.post(f"/job/{held.id}/logs", chunk).ok()
        held.release().ok()
    held = api.claim()
    for _ in range(4):
        api.submit()
    return api, held


LISTS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Any], int]] = {
    "jobs": ("/jobs", "jobs", lambda item: item["id"], 5),
    "pending jobs": ("/jobs?status=pending", "jobs", lambda item: item["id"], 4),
    "newest jobs": ("/jobs?order=desc", "jobs", lambda item: item["id"], 5),
    "events": ("/job/{id}/events", "events", lambda item: item["seq"], 18),
    "attempts": ("/job/{id}/attempts", "attempts", lambda item: item["epoch"], 5),
    "checkpoints": ("/job/{id}/checkpoints", "checkpoints", lambda item: -item["step"], 8),
    "objects": ("/data", "objects", lambda item: item["key"], 6),
    "keys": ("/keys", "keys", lambda item: item["id"], 4),
    "points": ("/job/{id}/metrics", "points", lambda item: (item["epoch"], item["step"]), 12),
    "lines": ("/job/{id}/logs", "lines", lambda item: (item["epoch"], item["line"]), 12),
}
EVERY_LIST = pytest.mark.parametrize("name", LISTS)


def page(api: Api, held: Held, name: str, **query: Any) -> dict[str, Any]:
    target = LISTS[name][0].replace("{id}", held.id)
    answer: dict[str, Any] = api.get(
        target + ("&" if "?" in target else "?") + "&".join(f"{key}={value}" for key, value in query.items())
    ).ok()
    return answer


@EVERY_LIST
@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
def test_pages_join_without_gap_or_repetition(filled: Filled, name: str, limit: int) -> None:
    api, held = filled
    _, field, identity, total = LISTS[name]
    whole = [identity(item) for item in page(api, held, name, limit=1000)[field]]
    assert len(whole) == len(set(whole)) == total
    if name not in ("jobs", "pending jobs", "newest jobs", "keys"):
        assert whole == sorted(whole)
    found: list[Any] = []
    query: dict[str, Any] = {"limit": limit}
    while True:
        answer = page(api, held, name, **query)
        assert len(answer[field]) <= limit
        found += [identity(item) for item in answer[field]]
        if answer["next_cursor"] is None or (field in ("lines", "points") and not answer[field]):
            break
        query["cursor"] = answer["next_cursor"]
    assert found == whole


@EVERY_LIST
def test_a_damaged_cursor(filled: Filled, name: str) -> None:
    api, held = filled
    cursor = page(api, held, name, limit=1)["next_cursor"]
    target = LISTS[name][0].replace("{id}", held.id)
    target += "&" if "?" in target else "?"
    garbage = base64.urlsafe_b64encode(b'[["jobs"],["x"]]').decode()
    with api.unchanged():
        for bad in (cursor[:-2], cursor + "x", "x", "%00", "%C2%B2:", "%D9%A3", garbage, "[]", "0" * 2000):
            api.get(f"{target}cursor={bad}").refused(ErrorCode.INVALID_CURSOR, "cursor")


@EVERY_LIST
def test_a_cursor_of_another_list(filled: Filled, name: str) -> None:
    api, held = filled
    other_job = api.submit()["id"]
    target = LISTS[name][0].replace("{id}", held.id)
    for other in LISTS:
        cursor = page(api, held, other, limit=1)["next_cursor"]
        if other != name:
            answer = api.get(target + ("&" if "?" in target else "?") + f"cursor={cursor}")
            answer.refused(ErrorCode.INVALID_CURSOR, "cursor")
        elif "{id}" in LISTS[name][0]:
            answer = api.get(LISTS[name][0].replace("{id}", other_job) + f"?cursor={cursor}")
            answer.refused(ErrorCode.INVALID_CURSOR, "cursor")


def test_inputs_are_listed_prefix_by_prefix(filled: Filled) -> None:
    api, held = filled
    first = api.get(f"/job/{held.id}/inputs", headers=held.headers).ok()
    assert [item["key"] for item in first["inputs"]] == ["a/0", "a/1", "a/2"]
    second = api.get(f"/job/{held.id}/inputs", headers=held.headers, query={"cursor": first["next_cursor"]}).ok()
    assert [item["key"] for item in second["inputs"]] == ["b/0", "b/1", "b/2"] and second["next_cursor"] is None
    api.submit(queue="other", inputs=[{"prefix": "a/"}] * 3)
    other = api.claim(queue="other")
    api.submit(queue="bare")
    bare = api.claim(queue="bare")
    assert api.get(f"/job/{bare.id}/inputs", headers=bare.headers).ok()["inputs"] == []
    for one in (held, other, bare):
        for bad in ("5", "x", "²:", "0:", "9" * 2000, f"{one.id[:8]}.9.", f"{one.id[:8]}.0.x", f"{one.id[:8]}.²."):
            answer = api.get(f"/job/{one.id}/inputs", headers=one.headers, query={"cursor": bad})
            answer.refused(ErrorCode.INVALID_CURSOR, "cursor")
    answer = api.get(f"/job/{other.id}/inputs", headers=other.headers, query={"cursor": first["next_cursor"]})
    answer.refused(ErrorCode.INVALID_CURSOR, "cursor")


def test_inputs_with_long_names_are_listed_to_the_end(api: Api) -> None:
    prefix = "p" * 890 + "/"
    api.submit(inputs=[{"prefix": prefix}])
    for number in range(501):
        api.put_object("training-data", f"{prefix}{number:04d}")
    held = api.claim()
    first = api.get(f"/job/{held.id}/inputs", headers=held.headers).ok()
    assert len(first["inputs"]) == 500
    second = api.get(f"/job/{held.id}/inputs", headers=held.headers, query={"cursor": first["next_cursor"]}).ok()
    assert [item["path"] for item in second["inputs"]] == ["0500"] and second["next_cursor"] is None


def test_the_original_lists_are_bare(filled: Filled) -> None:
    api, held = filled
    jobs = api.get("/jobs").ok()
    assert isinstance(jobs, list) and len(jobs) == 5
    assert [job["id"] for job in api.get("/jobs?status=running").ok()] == [held.id]
    (running,) = [job for job in jobs if job["id"] == held.id]
    assert running["lease_expires_at"] == NOW + 90
    events = api.get(f"/job/{held.id}/events").ok()
    assert isinstance(events, list) and events[0]["event_type"] == "created"
    assert [job["id"] for job in api.get("/jobs?queue=nothing").ok()] == []


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_a_filter_by_queue_loses_nothing_between_pages(api: Api, limit: int) -> None:
    """A page may be shorter than asked for, or empty: the cursor says whether it was the last one."""
    queues = ["a", "b", "b", "b", "a", "b", "a"]
    ids = [api.submit(queue=queue)["id"] for queue in queues]
    wanted = {job_id for job_id, queue in zip(ids, queues, strict=True) if queue == "a"}
    found: list[str] = []
    query: dict[str, Any] = {"queue": "a", "status": "pending", "limit": limit}
    while True:
        answer = api.get("/jobs", query=query).ok()
        assert {job["queue"] for job in answer["jobs"]} <= {"a"}
        found += [job["id"] for job in answer["jobs"]]
        if answer["next_cursor"] is None:
            break
        query["cursor"] = answer["next_cursor"]
    assert len(found) == len(wanted) and set(found) == wanted
    assert {job["id"] for job in api.get("/jobs?queue=a").ok()} == wanted


def test_the_newest_jobs_come_first_where_that_is_asked_for(api: Api) -> None:
    ids = []
    for _ in range(4):
        api.clock.advance(1)
        ids.append(api.submit()["id"])
    assert [job["id"] for job in api.get("/jobs").ok()] == ids
    assert [job["id"] for job in api.get("/jobs?order=asc&limit=4").ok()["jobs"]] == ids
    assert [job["id"] for job in api.get("/jobs?order=desc").ok()] == ids[::-1]
    first = api.get("/jobs?order=desc&status=pending&limit=3").ok()
    assert [job["id"] for job in first["jobs"]] == ids[:0:-1]
    api.clock.advance(1)
    api.submit()
    rest = api.get("/jobs", query={"order": "desc", "status": "pending", "cursor": first["next_cursor"]}).ok()
    assert [job["id"] for job in rest["jobs"]] == ids[:1]
    api.get("/jobs?order=sideways").refused(ErrorCode.INVALID_VALUE, "order")


def test_a_page_counts_all_jobs_by_state(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts have a bound, so that a poll of the console never reads all jobs of a tenant."""
    stopped = api.submit()["id"]
    api.post(f"/job/{stopped}/stop", {}).ok()
    for _ in range(3):
        api.submit(queue="other")
    api.post("/job", {"command": ["train"]}, key="rival_submit").ok()
    page = api.get("/jobs?limit=2&status=canceled&queue=default&counts=true").ok()
    assert [job["id"] for job in page["jobs"]] == [stopped]
    assert page["counts"] == {**dict.fromkeys(JobState, 0), "pending": 3, "canceled": 1}
    assert api.get("/jobs?limit=2").ok()["counts"] is None, "counts cost reads"
    monkeypatch.setattr(job_calls, "COUNTED_UP_TO", 2)
    assert api.get("/jobs?limit=2&counts=true").ok()["counts"]["pending"] == 2


def test_a_tenant_sees_its_own(filled: Filled) -> None:
    api, _ = filled
    for target in ("/jobs", "/jobs?status=pending", "/jobs?status=running", "/jobs?queue=default"):
        assert api.get(target).ok() != [], target
        assert api.get(target, key="rival_submit").ok() == [], target
        page = api.get(f"{target}{'&' if '?' in target else '?'}limit=10", key="rival_submit").ok()
        assert page == {"jobs": [], "next_cursor": None, "counts": None}, target
    assert api.get("/data", key="rival_submit").ok() == {"objects": [], "next_cursor": None}


def test_answers_stay_below_what_lambda_can_carry(api: Api) -> None:
    big = {"parameters": {"text": "x" * 32_000}, "command": ["y" * 4096] * 15}
    ids = [api.submit(**big)["id"] for _ in range(60)]
    found: list[str] = []
    query = {"limit": "1000"}
    while True:
        answer = api.get("/jobs", query=query)
        assert len(answer.text) < 4_200_000
        found += [job["id"] for job in answer.ok()["jobs"]]
        if answer.json["next_cursor"] is None:
            break
        query["cursor"] = answer.json["next_cursor"]
    assert sorted(found) == sorted(ids)
    assert len(api.get("/jobs").text) < 4_200_000
