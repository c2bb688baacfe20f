"""The host of a rented machine is not trusted: its key reaches one job, and nothing of a job that another one has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET, Scope
from functions.domain.access.api_keys import ApiKey, authenticate
from tests.functional.api.test_machines import beat, prepare
from tests.kits.api.fleets import make_machine, put_machine
from tests.kits.api.harness import TENANT, Answer, Api, Held, described


def issue(api: Api, machine: str = "m1") -> str:
    return api.issue(TENANT, Scope.WORKER, machine=f"nights/{machine}")


def claim(api: Api, key: str, machine: str = "m1") -> Held:
    """Submit a job, and claim the job as the worker of a machine."""
    api.submit()
    (work,) = api.get("/work", key=key, headers={"x-lease-aware": "1"}, query={"machine_id": machine}).ok()
    return Held(api, work)


def ask(api: Api, key: str, direction: str, bucket: str, name: str) -> Answer:
    return api.get(f"/{direction}/token", key=key, query={"bucket": bucket, "key": name})


def test_a_machine_reaches_the_objects_of_its_own_job_only(api: Api) -> None:
    key, other_key = issue(api), issue(api, "m2")
    own, other = claim(api, key), claim(api, other_key, "m2")
    for held, whose in ((own, key), (other, other_key)):
        held.commit(5).ok()
        urls = f"/job/{held.id}/checkpoints/5/urls"
        assert api.post(urls, {}, key=whose).ok()["urls"]
        ask(api, whose, "upload", CHECKPOINTS_BUCKET, f"jobs/{held.id}/epochs/{held.epoch}/a.zip").ok()
    with api.unchanged():
        api.post(f"/job/{other.id}/checkpoints/5/urls", {}, key=key).refused(ErrorCode.WRONG_SCOPE, "id")
        for direction in ("upload", "download"):
            for bucket, name in (
                (CHECKPOINTS_BUCKET, f"jobs/{other.id}/a.zip"),
                (CHECKPOINTS_BUCKET, "jobs/146683a1-cb76-4702-9fef-fcccd32594f1/a.zip"),
                (CHECKPOINTS_BUCKET, "elsewhere"),
                (DATA_BUCKET, "digits/1.png"),
            ):
                said = ask(api, key, direction, bucket, name).refused(ErrorCode.WRONG_SCOPE, "key")
                assert "GET /job/{id}/inputs" in said["message"]


def test_a_token_of_another_job_does_not_upload_with_the_key_of_a_machine(api: Api) -> None:
    key, user = issue(api), api.keys["worker"]
    held = claim(api, key)
    target = f"jobs/{held.id}/a.zip"
    other = claim(api, issue(api, "m2"), "m2")
    foreign = f"jobs/{other.id}/a.zip"
    token = ask(api, user, "upload", CHECKPOINTS_BUCKET, foreign).ok()["token"]
    own = ask(api, key, "upload", CHECKPOINTS_BUCKET, target).ok()["token"]
    path = f"/upload/{CHECKPOINTS_BUCKET}/%s?action=mpu-create"
    with api.unchanged():
        api.post(path % foreign, key=key, headers={"x-upload-token": token}).refused(ErrorCode.WRONG_SCOPE, "key")
    api.post(path % target, key=key, headers={"x-upload-token": own}).ok()


def test_the_key_of_a_machine_reaches_nothing_after_its_job(api: Api) -> None:
    key = issue(api)
    held = claim(api, key)
    held.commit(5).ok()
    held.complete().ok()
    with api.unchanged():
        api.post(f"/job/{held.id}/checkpoints/5/urls", {}, key=key).refused(ErrorCode.WRONG_SCOPE, "id")
        ask(api, key, "download", CHECKPOINTS_BUCKET, f"jobs/{held.id}/a.zip").refused(ErrorCode.WRONG_SCOPE, "key")


def test_a_zombie_whose_revoked_key_is_still_cached_changes_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host vanished with its job and comes back; the gateway remembers the authorization of its key for 60 s."""
    prepare(api, MachineState.BUSY)
    key = issue(api)
    held = claim(api, key)
    held.commit(5).ok()
    manifest = held.manifest(9, {"model.bin": b"zombie"})
    api.clock.advance(3600)
    assert api.sweep().reclaimed == 1
    put_machine(api, make_machine("m1", MachineState.LOST, version=2))
    (again,) = api.get("/work", headers={"x-lease-aware": "1"}, query={"machine_id": "m2"}).ok()
    keep_authorized(api, key, monkeypatch)
    mine: dict[str, Any] = {"headers": held.headers, "key": key}
    with api.unchanged():
        said = api.post(f"/heartbeat/{held.id}", None, **mine)
        assert said.status != 200 or said.json["directive"] == "abandon"
        for path, body in (
            (f"/job/{held.id}/checkpoints", manifest),
            (f"/job/{held.id}/artifacts", {"artifacts": [described("a.txt", b"zombie")]}),
            ("/complete", {"job_id": held.id, "artifacts": []}),
            ("/fail", {"job_id": held.id}),
        ):
            assert api.post(path, body, **mine).error["code"] == ErrorCode.LEASE_LOST
        urls = f"/job/{held.id}/checkpoints/5/urls"
        api.post(urls, {}, key=key).refused(ErrorCode.WRONG_SCOPE, "id")
    assert beat(api, key, held.id)["drain"]
    assert api.job(held.id)["state"] == "running" and again["epoch"] == held.epoch + 1


def keep_authorized(api: Api, key: str, patch: pytest.MonkeyPatch) -> None:
    """Revoke a key, and let the authorizer still answer as before the revocation."""
    found = authenticate(api.context.tokens, key, api.clock.now())
    assert isinstance(found, ApiKey)
    api.context.tokens.replace_key(replace(found, revoked_at=api.clock.now()))
    real = api.context.tokens.get_key
    patch.setattr(api.context.tokens, "get_key", lambda key_id: found if key_id == found.id else real(key_id))
