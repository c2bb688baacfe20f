"""Unregistered zips of original clients are deleted, and zips that may be registered stay."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.names import CHECKPOINTS_BUCKET
from functions.domain.errors import StorageUnavailable
from tests.functional.api.original_calls import JOB, Original
from tests.kits.api.harness import Api

LEASE_S = 90


@pytest.fixture
def job_id(api: Api) -> str:
    return str(api.submit(**JOB)["id"])


def stored(api: Api, job_id: str) -> list[str]:
    """Names of the job's objects, as in `1/checkpoint-50.zip`."""
    prefix = f"jobs/{job_id}/attempt-"
    return sorted(key.removeprefix(prefix) for key in api.objects(prefix=prefix))


def successor_of(api: Api, lost: Original) -> Original:
    api.clock.advance(LEASE_S)
    assert api.sweep().reclaimed == 1
    successor = Original(api, "m-2")
    successor.taken()
    assert lost.holds.keys() == successor.holds.keys()
    return successor


def test_a_zip_goes_that_a_later_attempt_has_stored_anew(api: Api, job_id: str) -> None:
    first, second = Original(api, "m-1"), Original(api, "m-2")
    first.taken()
    first.checkpoint(job_id, 50).ok()
    first.checkpoint(job_id, 100).ok()
    api.post(f"/job/{job_id}/stop").ok()
    api.post(f"/job/{job_id}/retry", {"from_step": 50}).ok()
    second.taken()
    second.checkpoint(job_id, 100, b"of the second").ok()
    assert stored(api, job_id) == ["1/checkpoint-50.zip", "2/checkpoint-100.zip"]


def test_a_zip_of_a_lost_attempt_that_was_never_registered_goes(api: Api, job_id: str) -> None:
    first = Original(api, "m-1")
    first.taken()
    first.checkpoint(job_id, 50).ok()
    first.upload(first.zip_key(job_id, 100), b"lost").ok()
    second = successor_of(api, first)
    assert second.holds[job_id]["resume_from"] == first.zip_key(job_id, 50)
    second.upload(second.zip_key(job_id, 90), b"under way").ok()
    second.checkpoint(job_id, 75).ok()
    assert stored(api, job_id) == ["1/checkpoint-50.zip", "2/checkpoint-75.zip", "2/checkpoint-90.zip"]


def test_of_a_job_that_has_ended_nothing_stays_but_its_checkpoints_and_its_model(api: Api, job_id: str) -> None:
    client = Original(api, "m-1")
    client.taken()
    client.checkpoint(job_id, 50).ok()
    client.upload(client.zip_key(job_id, 100), b"too late").ok()
    client.upload(client.model_key(job_id), b"trained").ok()
    client.report("complete", job_id, client.model_key(job_id)).ok()
    assert stored(api, job_id) == ["1/checkpoint-50.zip", "1/pytorch_lora_weights.safetensors"]


def test_a_revoked_attempt_that_comes_back_finds_its_zip(api: Api, job_id: str) -> None:
    client = Original(api, "m-1")
    client.taken()
    client.upload(client.zip_key(job_id, 50), b"zip").ok()
    api.clock.advance(LEASE_S)
    assert api.sweep().reclaimed == 1
    client.heartbeat(job_id).ok()
    client.report("progress", job_id, client.zip_key(job_id, 50)).ok()
    assert stored(api, job_id) == ["1/checkpoint-50.zip"]


def test_what_could_not_be_deleted_goes_later(api: Api, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Original(api, "m-1")
    first.taken()
    first.upload(first.zip_key(job_id, 100), b"lost").ok()
    second = successor_of(api, first)

    def away(*_: Any) -> None:
        raise StorageUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(api.context.objects, "delete_many", away)
        second.checkpoint(job_id, 50).ok()
    assert stored(api, job_id) == ["1/checkpoint-100.zip", "2/checkpoint-50.zip"]
    second.report("fail", job_id).ok()
    api.post(f"/job/{job_id}/stop")
    api.clock.advance(7200)
    api.sweep()
    assert stored(api, job_id) == ["2/checkpoint-50.zip"]


def test_a_zip_that_a_client_may_still_read_is_spared_and_goes_later(api: Api, job_id: str) -> None:
    first, second = Original(api, "m-1"), Original(api, "m-2")
    first.taken()
    for step in (50, 100):
        first.checkpoint(job_id, step).ok()
    api.post(f"/job/{job_id}/stop").ok()
    key = first.zip_key(job_id, 100)
    token = first.token(key, "download")
    api.post(f"/job/{job_id}/retry", {"from_step": 50}).ok()
    second.taken()
    second.checkpoint(job_id, 100, b"of the second").ok()
    read = first.call("GET", f"/download/{CHECKPOINTS_BUCKET}/{key}", headers={"x-download-token": token})
    assert (read.status, read.body) == (200, b"zip 100")
    second.upload(second.model_key(job_id), b"trained").ok()
    second.report("complete", job_id, second.model_key(job_id)).ok()
    assert "1/checkpoint-100.zip" in stored(api, job_id)
    api.clock.advance(api.context.settings.read_protection_s + 1)
    api.sweep()
    assert "1/checkpoint-100.zip" not in stored(api, job_id) and "2/checkpoint-100.zip" in stored(api, job_id)
