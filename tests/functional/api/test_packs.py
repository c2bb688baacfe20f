"""Packs of a tenant: shared by jobs, taken over from lost jobs, checked again when suspect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from blake3 import blake3

from baton.contract.checkpoints.manifest import MAX_MANIFEST_CHUNKS
from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.api.http.dispatch import MAX_BODY_BYTES
from functions.domain.checkpoints.packs import DEAD_AFTER_S
from functions.domain.errors import StorageUnavailable
from gpu_client.transport.retry import RETRIED_CODES
from tests.kits.api.harness import TENANT, Api, Held

LAMBDA_EVENT_BYTES = 6 * 1024 * 1024


def two_jobs(api: Api) -> tuple[Held, Held]:
    for name in ("one", "two"):
        api.submit(queue=name, policy={"retention": {"keep_last": 1}})
    return api.claim(queue="one"), api.claim(queue="two")


def packs(api: Api) -> set[bytes]:
    return set(api.objects(prefix="packs/").values())


def test_what_one_job_stored_another_does_not_send_again(api: Api) -> None:
    one, two = two_jobs(api)
    one.commit(10, {"base": b"frozen", "own": b"1"}).ok()
    answer = two.post(f"/job/{two.id}/checkpoints", two.manifest(10, {"base": b"frozen", "own": b"2"})).ok()
    assert [item["blake3"] for item in answer["missing"]] == [blake3(b"2").hexdigest()]
    two.commit(10, {"base": b"frozen", "own": b"2"}).ok()
    one.commit(20, {"own": b"3"}).ok()
    assert packs(api) == {b"frozen", b"2", b"3"}, "the other job still names it"
    two.commit(20, {"own": b"4"}).ok()
    assert packs(api) == {b"3", b"4"}


def test_another_tenant_shares_nothing(api: Api) -> None:
    one, _ = two_jobs(api)
    one.commit(10, {"base": b"frozen"}).ok()
    assert api.objects(prefix="packs/", tenant="rival") == {}
    assert api.context.packs.get_many("rival", [blake3(b"frozen").hexdigest()]) == {}


def test_a_pack_whose_deletion_has_died_is_taken_over(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = two_jobs(api)
    one.commit(10, {"a": b"shared"}).ok()

    def fail(*_: Any) -> None:
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(api.context.objects, "delete_many", fail)
        one.commit(20, {"a": b"other"}).ok()
    manifest = two.manifest(10, {"a": b"shared"})
    with api.unchanged():
        two.post(f"/job/{two.id}/checkpoints", manifest).refused(ErrorCode.CONFLICT)
        api.clock.advance(DEAD_AFTER_S - 1)
        two.post(f"/job/{two.id}/checkpoints", manifest).refused(ErrorCode.CONFLICT)
    assert ErrorCode.CONFLICT in RETRIED_CODES, "the client comes again by itself"
    api.clock.advance(1)
    assert two.post(f"/job/{two.id}/checkpoints", manifest).ok()["committed"] is True
    one.complete().ok()
    assert packs(api) == {b"shared", b"other"}


def test_a_doubted_pack_is_looked_at_and_replaced_once(api: Api) -> None:
    one, two = two_jobs(api)
    one.commit(10, {"a": b"weights"}).ok()
    two.commit(10, {"a": b"weights"}).ok()
    key = f"packs/{blake3(b'weights').hexdigest()}"
    api.put_object(CHECKPOINTS_BUCKET, key, b"rotten.")
    one.post(f"/job/{one.id}/checkpoints/10/damaged", {"epoch": 1}).ok()
    answer = two.post(f"/job/{two.id}/checkpoints", two.manifest(20, {"a": b"weights"})).ok()
    assert len(answer["missing"]) == 1
    two.commit(20, {"a": b"weights"}).ok()
    assert api.objects()[key] == b"weights"
    (record,) = api.context.packs.get_many(TENANT, [key.removeprefix("packs/")]).values()
    assert (record.doubted, record.jobs) == (False, {one.id, two.id})


def chunked(held: Held, chunks: int) -> bytes:
    """A manifest of that many chunks of one pack, as the client sends it: compact, without defaults."""
    listed = [
        {"blake3": blake3(b"%d" % n).hexdigest(), "size_bytes": 8_388_608, "pack": 0, "offset": 8_388_608 * (n % 8)}
        for n in range(chunks)
    ]
    pack = {"blake3": "a" * 64, "size_bytes": 8_388_608 * 8, "crc64nvme": "UvieJR3alJI="}
    file = {"path": "model.safetensors", "size_bytes": 8_388_608 * chunks, "chunks": list(range(chunks))}
    base = {"version": 2, "job_id": held.id, "step": 1, "epoch": held.epoch}
    return json.dumps({**base, "packs": [pack], "chunks": listed, "files": [file]}, separators=(",", ":")).encode()


def test_the_largest_manifest_fits_into_a_request(api: Api) -> None:
    held, _ = two_jobs(api)
    body = chunked(held, MAX_MANIFEST_CHUNKS)
    assert len(body) <= MAX_BODY_BYTES
    assert len(json.dumps(body.decode())) <= LAMBDA_EVENT_BYTES
    assert held.post(f"/job/{held.id}/checkpoints", body).ok()["committed"] is False


def test_a_larger_one_is_refused_clearly(api: Api) -> None:
    held, _ = two_jobs(api)
    with api.unchanged():
        held.post(f"/job/{held.id}/checkpoints", b" " * (MAX_BODY_BYTES + 1)).refused(ErrorCode.PAYLOAD_TOO_LARGE)
        body = chunked(held, MAX_MANIFEST_CHUNKS + 1)
        held.post(f"/job/{held.id}/checkpoints", body).refused(ErrorCode.INVALID_VALUE, "chunks")
