"""Submission: idempotent with a key, atomic checks of a batch, and the views afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.errors import StorageUnavailable
from functions.recipes import built_in_ids
from tests.kits.api.harness import NOW, Api

KEY = {"idempotency-key": "k-1"}
JOB: dict[str, Any] = {"recipe": "digits@1", "parameters": {"steps": 5}, "priority": 60}


def test_a_recipe_fills_in_what_was_not_said(api: Api) -> None:
    view = api.post("/job", {**JOB, "name": "first", "tags": {"a": "b"}}).ok()
    assert view["state"] == view["status"] == "pending" and view["created_at"] == NOW
    assert view["command"] == ["python", "-m", "gpu_client.training.digits"]
    assert view["parameters"]["steps"] == 5 and view["parameters"]["batch_size"] == 64
    assert view["outputs"] == ["model.safetensors", "predictions.json"]
    assert api.job(view["id"]) == view
    assert api.events(view["id"]) == ["job.submitted"]


def test_the_same_key_and_body_is_the_same_job(api: Api) -> None:
    first = api.post("/job", JOB, headers=KEY).ok()
    with api.unchanged():
        api.clock.advance(60)
        again = api.post("/job", b'{"priority": 60, "parameters": {"steps": 5}, "recipe": "digits@1"}', headers=KEY)
        assert again.ok() == first
    api.claim()
    assert api.post("/job", JOB, headers=KEY).ok()["state"] == "running"
    assert len(api.get("/jobs").ok()) == 1


@pytest.mark.parametrize("other", [{"priority": 61}, {"parameters": {"steps": 6}}, {"queue": "other"}, {"name": "x"}])
def test_the_same_key_and_another_body(api: Api, other: dict[str, Any]) -> None:
    api.post("/job", JOB, headers=KEY).ok()
    with api.unchanged():
        api.post("/job", {**JOB, **other}, headers=KEY).refused(ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key")


def test_without_a_key_every_call_is_a_job_and_tenants_do_not_share_keys(api: Api) -> None:
    ids = {api.post("/job", JOB).ok()["id"] for _ in range(2)}
    ids.add(api.post("/job", JOB, headers=KEY).ok()["id"])
    ids.add(api.post("/job", {**JOB, "priority": 1}, headers=KEY, key="rival_submit").ok()["id"])
    assert len(ids) == 4


def test_the_original_form_is_idempotent_too(api: Api) -> None:
    body = {"instance_prompt": "dog", "instance_data_prefix": "dog/", "class_prompt": "a dog"}
    first = api.post("/job", body, headers=KEY).ok()
    with api.unchanged():
        assert api.post("/job", body, headers=KEY).ok() == first
        changed = {**body, "instance_prompt": "cat"}
        api.post("/job", changed, headers=KEY).refused(ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key")


def test_a_batch_is_stored_in_order(api: Api) -> None:
    jobs = [{**JOB, "priority": n} for n in range(20)]
    views = api.post("/jobs/batch", {"jobs": jobs}).ok()
    assert [view["priority"] for view in views] == list(range(20))
    assert {view["id"] for view in views} == {view["id"] for view in api.get("/jobs").ok()}


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        ({"recipe": "digits@1", "parameters": {"steps": -1}}, ErrorCode.INVALID_VALUE, "jobs.2.parameters.steps"),
        ({"recipe": "nothing@1"}, ErrorCode.UNKNOWN_RECIPE, "jobs.2.recipe"),
        ({"command": ["a"], "priority": 101}, ErrorCode.INVALID_VALUE, "jobs.2.priority"),
        ({"command": ["a"], "stpes": 1}, ErrorCode.UNKNOWN_FIELD, "jobs.2.stpes"),
        ({"command": ["a"], "policy": {"deadline_at": 1}}, ErrorCode.INVALID_VALUE, "jobs.2.policy.deadline_at"),
        ({"command": ["x" * 4096] * 30}, ErrorCode.PAYLOAD_TOO_LARGE, "jobs.2"),
        ({"instance_prompt": "dog", "instance_data_prefix": "dog/"}, ErrorCode.UNKNOWN_FIELD, "jobs.2.instance_prompt"),
    ],
)
def test_one_invalid_job_keeps_the_whole_batch_out(api: Api, bad: dict[str, Any], code: ErrorCode, field: str) -> None:
    with api.unchanged():
        answer = api.post("/jobs/batch", {"jobs": [JOB, JOB, bad, JOB]}, headers=KEY)
        if field.endswith("instance_prompt"):
            assert answer.status == 422 and answer.error["field"].startswith("jobs.2")
        else:
            answer.refused(code, field)


@pytest.mark.parametrize("jobs", [[], [JOB] * 1001], ids=["none", "1001"])
def test_a_batch_has_1_to_1000_jobs(api: Api, jobs: list[dict[str, Any]]) -> None:
    with api.unchanged():
        api.post("/jobs/batch", {"jobs": jobs}).refused(ErrorCode.INVALID_VALUE, "jobs")


def test_a_repeated_batch_is_the_same_jobs(api: Api) -> None:
    body = {"jobs": [JOB, {**JOB, "priority": 61}, JOB]}
    first = api.post("/jobs/batch", body, headers=KEY).ok()
    with api.unchanged():
        assert api.post("/jobs/batch", body, headers=KEY).ok() == first
    assert len({view["id"] for view in first}) == 3


def test_a_batch_cut_off_in_the_middle_is_made_whole_by_its_repeat(api: Api) -> None:
    body = {"jobs": [{**JOB, "priority": n} for n in range(5)]}
    apply, calls = api.context.jobs.apply, []

    def fails_at_the_third(change: Any) -> None:
        calls.append(change)
        if len(calls) == 3:
            raise StorageUnavailable("no answer")
        apply(change)

    api.context.jobs.apply = fails_at_the_third  # type: ignore[method-assign]
    api.post("/jobs/batch", body, headers=KEY).refused(ErrorCode.UNAVAILABLE)
    assert len(api.get("/jobs").ok()) == 2
    views = api.post("/jobs/batch", body, headers=KEY).ok()
    assert [view["priority"] for view in views] == list(range(5))
    assert len(api.get("/jobs").ok()) == 5


@pytest.mark.parametrize("changed", ["longer", "shorter", "other"])
def test_the_same_key_for_another_batch_stores_nothing(api: Api, changed: str) -> None:
    jobs = [JOB, {**JOB, "priority": 61}]
    api.post("/jobs/batch", {"jobs": jobs}, headers=KEY).ok()
    other = {"longer": [*jobs, JOB], "shorter": jobs[:1], "other": [JOB, {**JOB, "priority": 62}]}[changed]
    with api.unchanged():
        answer = api.post("/jobs/batch", {"jobs": other}, headers=KEY)
        answer.refused(ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key")


def test_the_key_of_a_batch_is_no_key_of_a_single_job(api: Api) -> None:
    batch = api.post("/jobs/batch", {"jobs": [JOB]}, headers={"idempotency-key": "k"}).ok()
    for key in ("k", "k#0", "k-0", "k0"):
        single = api.post("/job", {**JOB, "priority": 1}, headers={"idempotency-key": key}).ok()
        assert single["id"] != batch[0]["id"]


def test_a_batch_whose_answer_lambda_could_not_carry_is_refused_before_anything_is_stored(api: Api) -> None:
    jobs = [{"command": ["x" * 4096, "y" * 900]}] * 900
    with api.unchanged():
        api.post("/jobs/batch", {"jobs": jobs}).refused(ErrorCode.PAYLOAD_TOO_LARGE, "jobs")


def test_an_unknown_recipe_is_answered_with_those_there_are(api: Api) -> None:
    with api.unchanged():
        error = api.post("/job", {"recipe": "digits@7"}).refused(ErrorCode.UNKNOWN_RECIPE, "recipe")
    assert "digits@7" in error["message"]
    assert [recipe for recipe in built_in_ids() if recipe not in error["message"]] == []
