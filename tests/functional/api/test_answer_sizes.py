"""Answers and names of any size: contents that fit into a Lambda answer, and refusals before any store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import DATA_BUCKET, Scope
from functions.api.jobs import legacy_api
from functions.api.jobs.legacy_api import MAX_KEYS_BYTES
from functions.storage import cursors
from tests.kits.api.harness import TENANT, Api
from tests.kits.files.declared_files import described

LAMBDA_ANSWER_BYTES = 6 * 1024 * 1024


def as_lambda_sends(text: str) -> int:
    """Bytes of an answer's body as Lambda's runtime hands it on: quoted once more, which escapes it."""
    return len(json.dumps(text))


def test_a_list_of_jobs_in_another_script_fits_into_an_answer(api: Api) -> None:
    for n in range(380):
        api.submit(parameters={"prompt": "犬" * 10_600, "n": n})
    for text in (api.get("/jobs").text, api.get("/jobs", query={"limit": 1000}).text):
        assert as_lambda_sends(text) < LAMBDA_ANSWER_BYTES


def test_jobs_full_of_quotes_can_be_listed(api: Api) -> None:
    for _ in range(70):
        api.submit(parameters={"text": '"' * 15_000}, environment={"A": '"' * 4000, "B": '"' * 4000})
    ids: list[str] = []
    query: dict[str, Any] = {"limit": 1000}
    while True:
        answer = api.get("/jobs", query=query)
        assert as_lambda_sends(answer.text) < LAMBDA_ANSWER_BYTES
        page = answer.ok()
        ids += [job["id"] for job in page["jobs"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert len(set(ids)) == len(ids) == 70


def test_output_full_of_control_characters_can_be_read(api: Api) -> None:
    api.submit()
    held = api.claim()
    for first_line in range(0, 1000, 100):
        held.post(f"/job/{held.id}/logs", {"first_line": first_line, "lines": ["\x1b" * 4000] * 100}).ok()
    lines, query = 0, {"limit": 1000}
    while True:
        answer = api.get(f"/job/{held.id}/logs", query=query)
        assert as_lambda_sends(answer.text) < LAMBDA_ANSWER_BYTES
        page = answer.ok()
        if not page["lines"]:
            break
        lines += len(page["lines"])
        query["cursor"] = page["next_cursor"]
    assert lines == 1000


def test_the_largest_job_can_be_completed_with_the_most_artifacts(api: Api) -> None:
    """The largest accepted job can be stored with its artifacts too: hours of training depend on the last write."""
    api.submit(parameters={"text": "x" * 32_000}, environment={f"E{n}": "x" * 4000 for n in range(16)}, outputs=[])
    held = api.claim()
    files = {f"{n:03d}" + '"' * 62: b"%d" % n for n in range(500)}
    held.complete(files).ok()
    assert len(api.job(held.id)["artifacts"]) == 500


@pytest.mark.parametrize("size", [991, 1024])
def test_a_made_up_cursor_never_reaches_the_database(api: Api, size: int) -> None:
    """Longer than any sort key or object key may be: the services refuse it, which is no fault of ours to log."""
    jobs = cursors.encode(("jobs", TENANT, ""), [1, "x" * size])
    api.get("/jobs", query={"cursor": jobs}).refused(ErrorCode.INVALID_CURSOR, "cursor")
    data = cursors.encode(("objects", TENANT, "training-data", ""), ["x" * size])
    api.get("/data", query={"cursor": data}).refused(ErrorCode.INVALID_CURSOR, "cursor")


def test_an_output_with_the_longest_path_can_be_fetched(api: Api) -> None:
    """The API refuses an output path that is too long for a key with its prefix, and an accepted one can be fetched."""
    api.submit()
    held = api.claim()
    declared = described("/".join(["d" * 99] * 9), b"trained")
    held.post("/complete", {"job_id": held.id, "artifacts": [declared]}).refused(
        ErrorCode.INVALID_KEY, "artifacts.0.path"
    )
    held.complete({"/".join(["d" * 99] * 8): b"trained"}).ok()
    artifact = api.job(held.id)["artifacts"][0]
    api.get("/download/token", query={"bucket": artifact["bucket"], "key": artifact["key"]}, key="submit").ok()


@pytest.mark.parametrize("letter", ["a", "\u72ac"], ids=["ascii", "another script"])
def test_a_client_of_the_original_is_told_every_name_or_is_not_given_the_job(api: Api, letter: str) -> None:
    """A part of the list would be trained on as if it were the whole."""
    name = letter * (900 // len(letter.encode()))
    fit = MAX_KEYS_BYTES // (as_lambda_sends(json.dumps(f"dog/0000-{name}")))
    for number in range(fit):
        api.put_object(DATA_BUCKET, f"dog/{number:04d}-{name}")
    job_id = api.submit(instance_prompt="dog", instance_data_prefix="dog/")["id"]
    key = api.issue(TENANT, Scope.SUBMIT, Scope.WORKER)
    answer = api.get("/work", key=key)
    assert as_lambda_sends(answer.text) < LAMBDA_ANSWER_BYTES
    (claimed,) = answer.ok()
    assert len(claimed["instance_data_keys"]) == fit
    api.post("/fail", {"job_id": job_id, "bucket_name": "", "key": claimed["checkpoint_prefix"]}, key=key).ok()

    for number in range(fit, fit + 20):
        api.put_object(DATA_BUCKET, f"dog/{number:04d}-{name}")
    api.clock.advance(3600)
    assert api.get("/work/peek", key=key).ok() == []
    assert api.get("/work", key=key).ok() == []
    job = api.job(job_id)
    assert (job["state"], job["reason"]["code"], job["counters"]["failures"]) == ("pending", "bad_input", 2)
    assert "dog/" in job["reason"]["message"] and "gpu_client.agent" in job["reason"]["message"]
    api.clock.advance(3600)
    assert api.claim().id == job_id, "a worker of ours lists them itself"


def test_a_cancel_while_the_names_are_listed_is_what_counts(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy_api, "MAX_KEYS_BYTES", 20)
    for number in range(3):
        api.put_object(DATA_BUCKET, f"dog/{number:04d}.jpg")
    job_id = api.submit(instance_prompt="dog", instance_data_prefix="dog/")["id"]
    key = api.issue(TENANT, Scope.SUBMIT, Scope.WORKER)
    listed, objects = api.context.objects.list, api.context.objects

    def cancel_first(*arguments: Any, **more: Any) -> Any:
        api.post(f"/job/{job_id}/stop").ok()
        return listed(*arguments, **more)

    monkeypatch.setattr(objects, "list", cancel_first)
    assert api.get("/work", key=key).ok() == []
    job = api.job(job_id)
    assert (job["state"], job["counters"]["failures"]) == ("canceled", 0)
