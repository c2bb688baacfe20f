"""Completion requires stored outputs; failure and release carry reasons."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from tests.kits.api.harness import NOW, TENANT, Api, Held
from tests.kits.files.declared_files import described

MODEL = b"trained weights"


@pytest.fixture
def held(api: Api) -> Held:
    """A held job that must produce a model."""
    api.submit(outputs=["model.safetensors"])
    return api.claim()


def declare(held: Held, *declared: dict[str, Any], **more: Any) -> Any:
    return held.post("/complete", {"job_id": held.id, "artifacts": list(declared), **more})


def artifact_key(held: Held, path: str) -> str:
    return f"jobs/{held.id}/artifacts/{held.epoch}/{path}"


def test_a_finished_job_names_its_artifacts(api: Api, held: Held) -> None:
    api.clock.advance(60)
    answer = held.complete({"model.safetensors": MODEL, "logs/train.log": b""}, step=500, metrics={"loss": 0.1})
    assert answer.ok() == {"status": "ok", "state": "complete", "not_before": None}
    view = api.job(held.id)
    assert view["state"] == "complete" and view["completed_at"] == NOW + 60
    assert view["progress"]["step"] == 500 and view["counters"]["runtime_s"] == 60
    assert [item["path"] for item in view["artifacts"]] == ["model.safetensors", "logs/train.log"]
    model = view["artifacts"][0]
    assert (model["bucket"], model["key"]) == (CHECKPOINTS_BUCKET, artifact_key(held, "model.safetensors"))
    assert {name: model[name] for name in ("path", "size_bytes", "blake3", "crc64nvme")} == described(
        "model.safetensors", MODEL
    )
    query = {"bucket": model["bucket"], "key": model["key"]}
    token = api.get("/download/token", query=query, key="submit").ok()["token"]
    got = api.get(f"/download/{model['bucket']}/{model['key']}", headers={"x-download-token": token}, key="submit")
    assert got.body == MODEL
    (attempt,) = api.attempts(held.id)
    assert attempt["end"] == "complete" and attempt["ended_at"] == NOW + 60


def test_an_output_may_be_a_directory(api: Api) -> None:
    api.submit(outputs=["model"])
    held = api.claim()
    with api.unchanged():
        # A name that merely begins alike is not in that directory.
        declare(held, described("model.safetensors", MODEL)).refused(ErrorCode.NOT_STORED_YET, "artifacts")
    held.complete({"model/a.bin": b"a", "model/b.bin": b"b"}).ok()
    assert [item["path"] for item in api.job(held.id)["artifacts"]] == ["model/a.bin", "model/b.bin"]


def test_a_missing_artifact(api: Api, held: Held) -> None:
    with api.unchanged():
        declare(held, described("model.safetensors", MODEL)).refused(ErrorCode.NOT_STORED_YET, "artifacts.0")
    held.store_artifacts({"model.safetensors": MODEL})
    with api.unchanged():
        answer = declare(held, described("model.safetensors", MODEL), described("more.bin", b"more"))
        error = answer.refused(ErrorCode.NOT_STORED_YET, "artifacts.1")
        assert "more.bin" in error["message"]
    assert api.job(held.id)["state"] == "running"


@pytest.mark.parametrize("stored", [b"short", b"trained weightz", b""])
def test_a_short_or_altered_artifact(api: Api, held: Held, stored: bytes) -> None:
    assert api.memory is not None
    api.memory.objects.put(TENANT, CHECKPOINTS_BUCKET, artifact_key(held, "model.safetensors"), stored)
    with api.unchanged():
        declare(held, described("model.safetensors", MODEL)).refused(ErrorCode.DIGEST_MISMATCH, "artifacts.0")
    # Declared again, it may be replaced: exactly that version of it.
    assert held.complete({"model.safetensors": MODEL}).ok()["state"] == "complete"
    assert api.objects()[artifact_key(held, "model.safetensors")] == MODEL


@pytest.mark.parametrize("declared", [{"size_bytes": len(MODEL) - 1}, {"crc64nvme": described("", b"")["crc64nvme"]}])
def test_an_artifact_declared_otherwise_than_it_is_stored(api: Api, held: Held, declared: dict[str, Any]) -> None:
    held.store_artifacts({"model.safetensors": MODEL})
    with api.unchanged():
        wrong = described("model.safetensors", MODEL) | declared
        declare(held, wrong).refused(ErrorCode.DIGEST_MISMATCH, "artifacts.0")
    assert api.job(held.id)["state"] == "running"


def test_an_output_of_the_job_that_is_not_declared(api: Api, held: Held) -> None:
    held.store_artifacts({"other.bin": b"x"})
    with api.unchanged():
        error = declare(held).refused(ErrorCode.NOT_STORED_YET, "artifacts")
        assert "model.safetensors" in error["message"]
        declare(held, described("other.bin", b"x")).refused(ErrorCode.NOT_STORED_YET, "artifacts")
    assert api.job(held.id)["state"] == "running"


def test_an_artifact_declared_twice(api: Api, held: Held) -> None:
    twice = [described("model.safetensors", MODEL)] * 2
    with api.unchanged():
        declare(held, *twice).refused(ErrorCode.INVALID_VALUE, "artifacts")
        held.post(f"/job/{held.id}/artifacts", {"artifacts": twice}).refused(ErrorCode.INVALID_VALUE, "artifacts")


def test_an_artifact_of_an_earlier_attempt_does_not_count(api: Api, held: Held) -> None:
    declared = held.store_artifacts({"model.safetensors": MODEL})
    held.release().ok()
    second = api.claim()
    with api.unchanged():
        declare(second, *declared).refused(ErrorCode.NOT_STORED_YET, "artifacts.0")


def test_urls_are_given_only_for_what_is_missing(api: Api, held: Held) -> None:
    files = {"model.safetensors": MODEL, "extra.bin": b"x"}
    declared = [described(path, data) for path, data in files.items()]
    request = {"artifacts": declared}
    first = held.post(f"/job/{held.id}/artifacts", request).ok()["missing"]
    assert [item["name"] for item in first] == list(files)
    assert api.send("PUT", first[0]["url"], first[0]["headers"], MODEL).status == 200
    assert [item["name"] for item in held.post(f"/job/{held.id}/artifacts", request).ok()["missing"]] == ["extra.bin"]
    assert api.send("PUT", first[0]["url"], first[0]["headers"], MODEL).status == 412, "already there"


def test_a_failure_keeps_its_evidence(api: Api, held: Held) -> None:
    held.heartbeat(step=40, total_steps=500).ok()
    answer = held.fail(
        failure_class="out_of_memory", exit_code=137, signal=9, message="killed", log_tail=["a", "b"]
    ).ok()
    assert answer == {"status": "ok", "state": "pending", "not_before": NOW + 15}
    (attempt,) = api.attempts(held.id)
    assert attempt["end"] == "failed" and attempt["failure_class"] == "out_of_memory"
    assert (attempt["exit_code"], attempt["signal"], attempt["log_tail"]) == (137, 9, ["a", "b"])
    assert attempt["progress"]["step"] == 40 and attempt["reason"] == {"code": "out_of_memory", "message": "killed"}
    view = api.job(held.id)
    assert view["counters"] == {
        "attempts": 1,
        "failures": 1,
        "interruptions": 0,
        "node_faults": 0,
        "releases": 0,
        "runtime_s": 0,
    }
    assert view["reason"]["code"] == "out_of_memory"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"failure_class": "bored"}, "failure_class"),
        ({"exit_code": 2**40}, "exit_code"),
        ({"signal": 65}, "signal"),
        ({"log_tail": ["x"] * 101}, "log_tail"),
        ({"log_tail": ["x" * 2001]}, "log_tail.0"),
        ({"message": "x" * 1025}, "message"),
    ],
)
def test_a_report_that_makes_no_sense(api: Api, held: Held, body: dict[str, Any], field: str) -> None:
    with api.unchanged():
        held.fail(**body).refused(ErrorCode.INVALID_VALUE, field)


def test_the_last_failure_parks_the_job(api: Api) -> None:
    api.submit(policy={"max_failures": 2, "avoid_machine_s": 0})
    first = api.claim()
    assert first.fail().ok()["state"] == "pending"
    api.no_work()
    api.clock.advance(15)
    second = api.claim()
    assert second.fail().ok() == {"status": "ok", "state": "failed", "not_before": None}
    view = api.job(first.id)
    assert view["state"] == "failed" and view["reason"]["code"] == "failure_cap" and view["failed_at"] == NOW + 15
    api.clock.advance(10_000)
    api.no_work()
    assert api.events(first.id)[-2:] == ["attempt.failed", "job.failed"]


def test_a_released_job_is_ready_at_once_and_first(api: Api) -> None:
    api.submit()
    held = api.claim()
    api.submit(priority=100)
    assert held.release(reason="spot_notice", message="2 minutes").ok()["state"] == "pending"
    (attempt,) = api.attempts(held.id)
    assert attempt["end"] == "released" and attempt["reason"] == {"code": "spot_notice", "message": "2 minutes"}
    assert api.claim().id == held.id, "a job with sunk work comes before one of higher priority"
    assert api.job(held.id)["counters"]["releases"] == 1
