"""Stored artifacts are visible before the end; only `complete` makes them outputs. On both stores."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from tests.functional.api.test_transfers import multipart, token
from tests.kits.api.harness import NOW, Api, Held, emulated_api, memory_api
from tests.kits.clouds.emulator import unique
from tests.kits.files.declared_files import described


@pytest.fixture(params=["memory", pytest.param("emulated", marks=pytest.mark.emulator)])
def api(request: pytest.FixtureRequest) -> Api:
    if request.param == "memory":
        return memory_api()
    return emulated_api(request.getfixturevalue("emulator"))


def held(api: Api, **job: Any) -> Held:
    queue = unique("q")
    api.submit(queue=queue, outputs=["validation"], policy={"backoff_s": 0, "avoid_machine_s": 0}, **job)
    return api.claim(queue=queue)


def listed(api: Api, job_id: str, **query: Any) -> list[tuple[int, str]]:
    page = api.get(f"/job/{job_id}/artifacts", query=query).ok()
    return [(one["epoch"], one["path"]) for one in page["artifacts"]]


def test_a_picture_of_a_running_job_has_a_link_that_works_without_a_key(api: Api) -> None:
    job = held(api)
    before = api.job(job.id)
    job.store_artifacts({"validation/step-000500-0.png": b"picture", "model.bin": b"weights"})
    page = api.get(f"/job/{job.id}/artifacts").ok()
    assert (page["final"], page["next_cursor"]) == (False, None)
    assert (page["expires_at"], page["expires_in_s"]) == (NOW + 900, 900)
    model, picture = page["artifacts"]
    key = f"jobs/{job.id}/artifacts/1/validation/step-000500-0.png"
    assert {**picture, "url": ""} == {
        "path": "validation/step-000500-0.png",
        "epoch": 1,
        "seat": None,
        "step": 500,
        "size_bytes": 7,
        "bucket": CHECKPOINTS_BUCKET,
        "key": key,
        "url": "",
    }
    assert (model["path"], model["step"]) == ("model.bin", None)
    got = api.send("GET", picture["url"])
    assert (got.text, got.headers["content-type"]) == ("picture", "image/png"), "a browser shows it"
    assert api.send("GET", model["url"]).headers["content-type"] != "image/png"
    assert api.job(job.id) == before, "nothing is written for it, and nothing is an output yet"


def test_what_was_shown_is_not_sent_again_and_is_among_the_outputs(api: Api) -> None:
    job = held(api)
    (declared,) = job.store_artifacts({"validation/step-1.png": b"picture"})
    again = job.post(f"/job/{job.id}/artifacts", {"artifacts": [declared]}).ok()
    assert again["missing"] == []
    job.complete({"validation/step-1.png": b"picture", "model.bin": b"weights"}).ok()
    page = api.get(f"/job/{job.id}/artifacts").ok()
    assert page["final"] is True
    assert [one["path"] for one in page["artifacts"]] == ["model.bin", "validation/step-1.png"]
    assert api.send("GET", page["artifacts"][1]["url"]).text == "picture"
    assert {one["key"] for one in page["artifacts"]} == {one["key"] for one in api.job(job.id)["artifacts"]}


def test_a_complete_job_shows_its_outputs_and_nothing_else(api: Api) -> None:
    job = held(api)
    job.store_artifacts({"validation/step-1.png": b"picture", "left-over.bin": b"x"})
    job.complete({"validation/step-1.png": b"picture"}).ok()
    assert listed(api, job.id) == [(1, "validation/step-1.png")]


def test_every_attempts_pictures_are_there_and_a_zombie_replaces_none(api: Api) -> None:
    first = held(api)
    first.store_artifacts({"validation/step-1.png": b"first"})
    (kept,) = first.post(
        f"/job/{first.id}/artifacts", {"artifacts": [described("validation/step-2.png", b"zombie")]}
    ).ok()["missing"]
    first.release().ok()
    assert listed(api, first.id) == [(1, "validation/step-1.png")], "while it waits, too"
    second = api.claim(queue=api.job(first.id)["queue"])
    second.store_artifacts({"validation/step-1.png": b"second"})
    second.store_artifacts({"validation/step-2.png": b"living"})
    assert api.send("PUT", kept["url"], kept["headers"], b"zombie").status == 200, "it may, where nobody looks"
    late = {"artifacts": [described("validation/step-1.png", b"zombie")]}
    first.post(f"/job/{first.id}/artifacts", late).refused(ErrorCode.LEASE_LOST, "x-lease-token")
    page = api.get(f"/job/{first.id}/artifacts").ok()
    assert [(one["epoch"], one["step"], api.send("GET", one["url"]).text) for one in page["artifacts"]] == [
        (1, 1, "first"),
        (1, 2, "zombie"),
        (2, 1, "second"),
        (2, 2, "living"),
    ]
    files = {"validation/step-1.png": b"second", "validation/step-2.png": b"living"}
    second.complete(files).ok()
    assert listed(api, first.id) == [(2, path) for path in files]


@pytest.mark.parametrize("end", ["stop", "fail", "complete"])
def test_pages_do_not_lose_or_repeat_any(api: Api, end: str) -> None:
    job = held(api)
    files = {f"validation/step-{number}-ü.png": b"%d" % number for number in range(7)}
    job.store_artifacts(files)
    if end == "complete":
        job.complete(files).ok()
    elif end == "fail":
        job.fail().ok()
    else:
        api.post(f"/job/{job.id}/stop").ok()
    found, cursor, sizes = [], None, []
    while True:
        query = {"limit": 3, **({"cursor": cursor} if cursor else {})}
        page = api.get(f"/job/{job.id}/artifacts", query=query).ok()
        found += [one["path"] for one in page["artifacts"]]
        sizes.append(len(page["artifacts"]))
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sizes == [3, 3, 1]
    assert found == sorted(files)


@pytest.mark.parametrize(
    "cursor", ["x", "0" * 8 + ".YQ", "{job}.", "{job}.!!!", "{job}.gA", "{job}.Li4vLi4", "{job}.AGE", "{job}.A"]
)
def test_what_is_no_cursor_of_this_list(api: Api, cursor: str) -> None:
    job = held(api)
    answer = api.get(f"/job/{job.id}/artifacts", query={"cursor": cursor.replace("{job}", job.id[:8])})
    answer.refused(ErrorCode.INVALID_CURSOR, "cursor")


def test_other_tenants_and_workers_see_none(api: Api) -> None:
    job = held(api)
    job.store_artifacts({"validation/step-1.png": b"picture"})
    api.get(f"/job/{job.id}/artifacts", key="rival_submit").refused(ErrorCode.JOB_NOT_FOUND, "id")
    api.get(f"/job/{job.id}/artifacts", key="worker").refused(ErrorCode.WRONG_SCOPE, "x-api-key")


def test_a_job_that_has_stored_nothing(api: Api) -> None:
    job_id = api.submit(queue=unique("q"))["id"]
    page = api.get(f"/job/{job_id}/artifacts").ok()
    assert (page["artifacts"], page["next_cursor"], page["final"]) == ([], None, False)


def test_the_model_of_an_original_client_has_a_link_in_whatever_bucket_it_is(api: Api) -> None:
    api.submit(instance_prompt="dog", instance_data_prefix="dogs/", max_train_steps=2)
    (job,) = api.get("/work", query={"machine_id": "m-1"}).ok()
    key = "models/dog.safetensors"
    multipart(api, key, token(api, "upload", key, DATA_BUCKET), b"weights", bucket=DATA_BUCKET)
    body = {"job_id": job["id"], "bucket_name": DATA_BUCKET, "key": key, "machine_id": "m-1"}
    api.post("/complete", body).ok()
    (model,) = api.get(f"/job/{job['id']}/artifacts").ok()["artifacts"]
    assert (model["path"], model["bucket"], model["key"]) == ("dog.safetensors", DATA_BUCKET, key)
    assert api.send("GET", model["url"]).text == "weights"


def test_the_originals_model_is_the_lora_whatever_lies_beside_it(api: Api) -> None:
    """Class images and pictures come before it in the order of names."""
    view = api.submit(
        instance_prompt="dog",
        class_prompt="a dog",
        with_prior_preservation=True,
        validation_prompt="dog",
        instance_data_prefix="dogs/",
        max_train_steps=2,
    )
    assert view["outputs"] == ["pytorch_lora_weights.safetensors", "validation", "validation_grid.png"]
    job = api.claim(runs_plans=True)
    assert job.id == view["id"]
    files = {
        "class_images.zip": b"class",
        "pytorch_lora_weights.safetensors": b"lora",
        "validation/step-000002-0.png": b"picture",
        "validation_grid.png": b"grid",
    }
    missing = {path: data for path, data in files.items() if path != "validation_grid.png"}
    job.complete(missing).refused(ErrorCode.NOT_STORED_YET, "artifacts")
    job.complete(files).ok()
    assert api.job(job.id)["model_key"] == f"jobs/{job.id}/artifacts/1/pytorch_lora_weights.safetensors"
