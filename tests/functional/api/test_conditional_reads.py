"""Reads that clients poll: an ETag, and 304 without a body while nothing is new."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from tests.kits.api.harness import Answer, Api

MAX_UNCHANGED_BYTES = 300
"""Limit of the headers of an answer 304, besides the headers of the gateway."""


def read(api: Api, target: str, etag: str = "", **more: Any) -> Answer:
    return api.get(target, headers={"if-none-match": etag} if etag else {}, **more)


@pytest.mark.parametrize("part", ["", "/events", "/metrics", "/attempts", "/checkpoints", "/logs"])
def test_a_view_of_a_job_is_sent_again_only_if_it_changed(api: Api, part: str) -> None:
    api.submit()
    held = api.claim()
    target = f"/job/{held.id}{part}"
    first = read(api, target)
    known = first.headers["etag"]
    assert first.status == 200 and known.startswith('W/"')
    for sent in (known, known.removeprefix("W/"), f'"a", {known}'):
        unchanged = read(api, target, sent)
        assert (unchanged.status, unchanged.body, unchanged.headers["etag"]) == (304, b"", known)
        assert sum(len(name) + len(value) + 4 for name, value in unchanged.headers.items()) < MAX_UNCHANGED_BYTES
    api.clock.advance(1)
    point = {"step": 100, "at": api.clock.now(), "metrics": {"loss": 1.0}}
    held.post(f"/job/{held.id}/logs", {"first_line": 0, "lines": ["hello"], "points": [point]}).ok()
    held.commit(100).ok()
    held.post("/release", {"job_id": held.id}).ok()
    changed = read(api, target, known)
    assert changed.status == 200 and changed.headers["etag"] != known and changed.body != first.body


def test_the_list_of_jobs_is_sent_again_after_a_new_job(api: Api) -> None:
    api.submit()
    target = "/jobs?limit=50&order=desc"
    known = read(api, target).headers["etag"]
    assert read(api, target, known).status == 304
    made = api.submit()
    answer = read(api, target, known)
    assert answer.headers["etag"] != known and made["id"] in answer.text


def test_a_long_answer_is_compressed_for_who_accepts_it(api: Api) -> None:
    for _ in range(20):
        api.submit()
    plain = read(api, "/jobs?limit=50")
    packed = api.get("/jobs?limit=50", headers={"accept-encoding": "br, gzip"})
    assert gzip.decompress(packed.body) == plain.body and len(packed.body) < len(plain.body) / 5
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "accept-encoding")
    assert packed.headers["etag"] == plain.headers["etag"] and "content-encoding" not in plain.headers
    short = api.get(f"/job/{plain.json['jobs'][0]['id']}/logs", headers={"accept-encoding": "gzip"})
    assert short.ok()["lines"] == [] and "content-encoding" not in short.headers


def test_a_known_answer_is_no_way_past_a_refusal(api: Api) -> None:
    job = api.submit()
    known = read(api, f"/job/{job['id']}").headers["etag"]
    assert read(api, f"/job/{job['id']}", known, key="rival_submit").status == 404
    assert read(api, f"/job/{job['id']}", known, key="worker").status == 403
    assert read(api, f"/job/{job['id']}", "*").status == 200


def test_a_claim_is_never_unchanged(api: Api) -> None:
    for _ in range(2):
        answer = read(api, "/work", "*")
        assert answer.ok() == [] and "etag" not in answer.headers
