"""Checkpoints of an elastic job: all nodes write and read one chain, and no end of a node deletes a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.jobs.transaction import Transaction
from tests.functional.api.test_elastic_jobs import claim
from tests.kits.api.harness import Api, Held


def submit(api: Api, nodes: int = 2, **policy: Any) -> str:
    return str(api.submit(nodes={"max": nodes}, policy=policy)["id"])


def resume(node: Held) -> list[tuple[int, int]]:
    return [(one["step"], one["epoch"]) for one in node.item["resume"]]


def stored(api: Api, job: str) -> list[tuple[int, int]]:
    return [(step, one["epoch"]) for step, one in api.checkpoints(job).items()]


def damage(api: Api, node: Held, step: int, epoch: int) -> None:
    node.post(f"/job/{node.id}/checkpoints/{step}/damaged", {"epoch": epoch, "message": "m"}).ok()


def test_all_nodes_write_one_chain(api: Api) -> None:
    job = submit(api, 3)
    nodes = claim(api, 2)
    first, second = sorted(nodes, key=lambda one: int(one.item["world"]["epoch"]))
    second.commit(100, tag="best").ok()
    assert second.commit(100, tag="best").ok()["committed"]
    first.commit(100, {"a": b"other"}).refused(ErrorCode.STEP_NOT_NEWER, "step")
    first.commit(200).ok()
    assert stored(api, job) == [(200, 2), (100, 2)] and api.job(job)["checkpoint_step"] == 200
    assert api.checkpoints(job)[100]["tag"] == "best" and api.checkpoints(job)[200]["current"]
    assert {key.split("/")[1] for key in api.objects(prefix="jobs/")} == {job}
    assert [one for one in api.events(job) if one == "checkpoint.committed"] == ["checkpoint.committed"] * 2
    (third,) = claim(api, 1, machine_id="m-9")
    assert resume(third) == [(200, 1), (100, 2)] and third.item["last_step"] == 200
    assert third.item["checkpoint_prefix"] == f"jobs/{job}/"
    urls = third.post(f"/job/{third.id}/checkpoints/100/urls").ok()["urls"]
    assert [api.send("GET", url).text for url in urls.values()] == ["weights at 100"]
    attempts = {one["seat"]: one for one in api.attempts(job)}
    assert attempts[third.item["world"]["seat"]]["resumed_step"] == 200
    third.commit(300).ok()
    assert stored(api, job) == [(300, 3), (200, 2), (100, 2)]


def test_manifests_that_name_another_attempt(api: Api) -> None:
    submit(api)
    first, second = claim(api, 2)
    with api.unchanged():
        for change, code, field in (
            ({"job_id": first.id}, ErrorCode.INVALID_VALUE, "job_id"),
            ({"epoch": second.item["world"]["epoch"]}, ErrorCode.LEASE_LOST, "epoch"),
        ):
            body = {**first.manifest(100, {"a": b"b"}), **change}
            first.post(f"/job/{first.id}/checkpoints", body).refused(code, field)
        first.post(f"/job/{second.id}/checkpoints", second.manifest(100, {"a": b"b"})).refused(
            ErrorCode.LEASE_LOST, "x-lease-token"
        )


def test_a_commit_may_name_the_elastic_job(api: Api) -> None:
    """The agent posts a manifest to the job that the manifest names."""
    job = submit(api)
    first, second = claim(api, 2)
    body = second.manifest(100, {"a": b"b"})
    for held, epoch, field in ((first, body["epoch"], "x-lease-token"), (second, 9, "epoch")):
        held.post(f"/job/{job}/checkpoints", {**body, "epoch": epoch}).refused(ErrorCode.LEASE_LOST, field)
    second.upload_missing(second.post(f"/job/{job}/checkpoints", body), {body["packs"][0]["blake3"]: b"b"})
    assert second.post(f"/job/{job}/checkpoints", body).ok()["committed"]
    assert stored(api, job) == [(100, 2)]


def test_a_lease_that_ends_before_the_write_refuses_the_commit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The elastic job's own revision does not change with the lease of a seat."""
    job = submit(api)
    first, _ = claim(api, 2)
    first.commit(100).ok()
    write = api.context.jobs.apply

    def apply(change: Transaction) -> None:
        monkeypatch.undo()
        lease = api.context.leases.get(first.id)
        assert lease is not None and api.memory is not None
        api.memory.state.leases[first.id] = lease.model_copy(update={"closed": "released"})
        write(change)

    body = first.manifest(200, {"model.bin": b"weights at 100"})
    monkeypatch.setattr(api.context.jobs, "apply", apply)
    first.post(f"/job/{first.id}/checkpoints", body).refused(ErrorCode.LEASE_LOST)
    assert list(api.checkpoints(job)) == [100] and api.job(job)["checkpoint_step"] == 100


def test_damage_that_another_node_finds(api: Api) -> None:
    job = submit(api, 3)
    first, second = claim(api, 2)
    first.commit(100).ok()
    first.commit(200).ok()
    epoch = int(first.item["world"]["epoch"])
    damage(api, second, 200, epoch)
    damage(api, second, 200, epoch)
    assert (api.job(job)["checkpoint_step"], api.events(job)[-1]) == (100, "checkpoint.damaged")
    missing = second.post(f"/job/{second.id}/checkpoints/200/damaged", {"epoch": epoch + 9})
    missing.refused(ErrorCode.CHECKPOINT_NOT_FOUND, "step")
    (third,) = claim(api, 1, machine_id="m-9")
    assert resume(third) == [(100, epoch)]
    first.commit(200).ok()
    assert api.job(job)["checkpoint_step"] == 200 and not api.checkpoints(job)[200]["damaged"]


def test_retention_is_the_jobs_and_the_end_of_a_node_deletes_nothing(api: Api) -> None:
    job = submit(api, 2, retention={"keep_last": 2}, max_failures=1)
    first, second = claim(api, 2)
    for step, node in ((100, first), (200, second), (300, first)):
        node.commit(step).ok()
    assert list(api.checkpoints(job)) == [300, 200]
    packs = {bytes(data) for key, data in api.objects(prefix="packs/").items()}
    assert packs == {b"weights at 200", b"weights at 300"}
    second.release().ok()
    first.fail().ok()
    api.claim(machine_id="m-8").fail().ok()
    assert api.job(job)["state"] == "failed"
    api.clock.advance(2 * LATE_AFTER_S)
    api.sweep()
    assert list(api.checkpoints(job)) == [300, 200]
    assert {bytes(data) for data in api.objects(prefix="packs/").values()} == packs
    api.post(f"/job/{job}/retry").ok()
    assert [step for step, _ in resume(api.claim(machine_id="m-9"))] == [300, 200]


def test_an_upload_of_one_node_survives_the_first_commit_of_another(api: Api) -> None:
    """The first commit after a claim removes what former attempts left behind."""
    job = submit(api, 3)
    first, second = claim(api, 2)
    manifest = first.manifest(200, {"model.bin": b"slow"})
    answer = first.post(f"/job/{first.id}/checkpoints", manifest)
    first.upload_missing(answer, {one["blake3"]: b"slow" for one in answer.json["missing"]})
    claim(api, 1, machine_id="m-9")
    second.commit(100).ok()
    assert first.post(f"/job/{first.id}/checkpoints", manifest).ok()["committed"]
    assert list(api.checkpoints(job)) == [200, 100]


def test_a_retry_from_an_older_checkpoint_continues_the_chain_there(api: Api) -> None:
    job = submit(api, 2)
    nodes = claim(api, 2)
    older, newer = sorted(nodes, key=lambda one: int(one.item["world"]["epoch"]))
    for step, node in ((100, newer), (200, older), (300, newer)):
        node.commit(step).ok()
    api.post(f"/job/{job}/stop").ok()
    api.post(f"/job/{job}/retry", {"from_step": 200}).ok()
    first, second = claim(api, 2, machine_id="m-9")
    assert [step for step, _ in resume(first)] == [200, 100] == [step for step, _ in resume(second)]
    older.commit(400).refused(ErrorCode.LEASE_LOST, "epoch")
    first.commit(300, {"a": b"anew"}).ok()
    assert list(api.checkpoints(job)) == [300, 200, 100] and api.checkpoints(job)[300]["epoch"] == 4


def test_a_commit_ends_a_row_of_fruitless_interruptions(api: Api) -> None:
    job = submit(api, 1, max_fruitless_interruptions=2, retention={"keep_last": 1})
    for step in (100, 200, 300):
        node = api.claim(machine_id=f"m-{step}")
        node.commit(step).ok()
        api.clock.advance(1000)
        api.sweep()
    assert api.job(job)["state"] == "pending" and api.job(job)["counters"]["interruptions"] == 3


def test_a_commit_settles_a_job_that_does_not_run_yet(api: Api) -> None:
    """A heartbeat recovered the attempt, and no sweep has settled the elastic job since."""
    job = submit(api, 1)
    node = api.claim()
    api.clock.advance(1000)
    api.sweep()
    node.heartbeat().ok()
    assert api.job(job)["state"] == "pending"
    node.commit(100).ok()
    assert (api.job(job)["state"], api.job(job)["checkpoint_step"]) == ("running", 100)
