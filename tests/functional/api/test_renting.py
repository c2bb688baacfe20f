"""Jobs that rent machines of their own: the fleet of a job is born with the job, and opened again with a retry."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.api.jobs import renting
from functions.domain.errors import StorageUnavailable
from functions.domain.worlds.seat_ids import seat_ids
from functions.fleet.records import StoredFleet
from tests.kits.api.fleets import DOCUMENT
from tests.kits.api.harness import NOW, TENANT, Api

RENT: dict[str, Any] = {"budget_usd": 5, "providers": ["loopback"]}


def rent(api: Api, **changes: Any) -> dict[str, Any]:
    view: dict[str, Any] = api.post("/job", {"command": ["train"], "rent": RENT, **changes}).ok()
    return view


def fleets(api: Api) -> list[StoredFleet]:
    assert api.context.fleet
    return list(api.context.fleet.fleets(TENANT))


def test_a_job_is_submitted_with_a_fleet_that_its_requirements_choose(api: Api) -> None:
    needs = {"min_vram_gib": 20, "min_disk_gib": 80, "gpu_models": ["RTX 4090"], "image": "acme/train:1"}
    job = rent(api, requirements=needs, rent={**RENT, "providers": ["vast", "loopback"], "max_usd_per_hour": 0.5})
    name = f"rent-{job['id'][:8]}"
    assert (job["queue"], job["rent"]["budget_usd"]) == (name, 5)
    (fleet,) = fleets(api)
    assert (fleet.spec.name, fleet.job_id, fleet.version, fleet.created_at) == (name, job["id"], 1, NOW)
    assert fleet.spec.model_dump(exclude_defaults=True) == {
        "name": name,
        "providers": ["vast", "loopback"],
        "gpu_models": ["RTX 4090"],
        "min_vram_gib": 20,
        "disk_gib": 80,
        "image": "acme/train:1",
        "queues": [name],
        "max_usd_per_hour": 0.5,
        "max_hours": 720,
        "budget": {"total_usd": 5},
    }
    view = api.get(f"/fleets/{name}").ok()
    assert (view["job_id"], [one["spec"]["name"] for one in api.get("/fleets").ok()["fleets"]]) == (job["id"], [name])


def test_no_other_job_can_wait_for_the_machine_of_a_job(api: Api) -> None:
    job = rent(api)
    with api.unchanged():
        api.post("/job", {"command": ["train"], "queue": job["queue"]}).refused(ErrorCode.INVALID_VALUE, "queue")
        batch = {"jobs": [{"command": ["train"], "queue": job["queue"]}]}
        api.post("/jobs/batch", batch).refused(ErrorCode.INVALID_VALUE, "jobs.0.queue")


def test_without_a_price_cap_the_budget_bounds_the_price_and_a_gpu_is_a_gpu(api: Api) -> None:
    rent(api, requirements={"min_gpus": 1})
    (fleet,) = fleets(api)
    assert (fleet.spec.max_usd_per_hour, fleet.spec.min_vram_gib, fleet.spec.disk_gib) == (5, 1, 40)


@pytest.mark.parametrize(
    ("changes", "field", "part"),
    [
        ({"queue": "default"}, "queue", "beside rent"),
        ({"rent": {"providers": ["loopback"]}}, "rent.budget_usd", "required"),
        ({"rent": {"budget_usd": 0, "providers": ["loopback"]}}, "rent.budget_usd", "greater than 0"),
        ({"rent": {"budget_usd": 5, "providers": ["loopback", "loopback"]}}, "rent.providers", "twice"),
        ({"rent": {"budget_usd": 5, "providers": ["aws"]}}, "rent.providers.0", "loopback"),
        ({"rent": {**RENT, "providers": ["vast"]}}, "requirements.image", "image is required"),
        ({"requirements": {"min_gpus": 2}}, "requirements.min_gpus", "one GPU"),
        ({"requirements": {"min_disk_gib": 500_000}}, "requirements", "disk_gib"),
    ],
)
def test_a_job_that_no_machine_can_be_rented_for_is_refused(
    api: Api, changes: dict[str, Any], field: str, part: str
) -> None:
    with api.unchanged():
        answer = api.post("/job", {"command": ["train"], "rent": RENT, **changes})
    assert answer.status == 422
    assert answer.error["field"] == field and part in answer.error["message"], answer.text


def test_a_repeat_finds_the_job_and_a_lost_write_leaves_neither_job_nor_fleet(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, key = {"command": ["train"], "rent": RENT}, {"idempotency-key": "k1"}

    def lost(_transaction: object) -> None:
        raise StorageUnavailable("the table is throttled")

    with monkeypatch.context() as patch, api.unchanged():
        patch.setattr(api.context.jobs, "apply", lost)
        assert api.post("/job", body, headers=key).status == 503
    monkeypatch.setattr(renting, "MAX_RENTING", 1)
    first = api.post("/job", body, headers=key).ok()
    with api.unchanged():
        assert api.post("/job", body, headers=key).ok() == first
        api.post("/job", {**body, "priority": 9}, headers=key).refused(
            ErrorCode.IDEMPOTENCY_MISMATCH, "idempotency-key"
        )


def test_a_tenant_rents_for_so_many_jobs_at_a_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renting, "MAX_RENTING", 2)
    body = {"command": ["train"], "rent": RENT}
    with api.unchanged():
        api.post("/jobs/batch", {"jobs": [body] * 3}).refused(ErrorCode.CONFLICT, "rent")
    jobs = api.post("/jobs/batch", {"jobs": [body] * 2}).ok()
    assert {fleet.job_id for fleet in fleets(api)} == {job["id"] for job in jobs}
    api.post("/job", body).refused(ErrorCode.CONFLICT, "rent")
    api.submit()


def test_fleets_of_jobs_do_not_count_and_keep_their_names(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functions.api.fleet.fleet_calls.MAX_FLEETS", 1)
    job = rent(api)
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    foreign = {**DOCUMENT, "name": "rent-0badcafe"}
    api.call("PUT", "/fleets/rent-0badcafe", foreign).refused(ErrorCode.INVALID_VALUE, "name")
    # A larger budget for a running job.
    own = {**DOCUMENT, "name": job["queue"], "queues": [job["queue"]], "budget": {"total_usd": 50}}
    assert api.call("PUT", f"/fleets/{job['queue']}", own).ok()["job_id"] == job["id"]


def test_a_name_that_another_job_has_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.context.random, "job_id", lambda: "0badcafe-0000-4000-8000-000000000000")
    rent(api)
    monkeypatch.setattr(api.context.random, "job_id", lambda: "0badcafe-0000-4000-8000-000000000001")
    with api.unchanged():
        api.post("/job", {"command": ["train"], "rent": RENT}).refused(ErrorCode.CONFLICT)


def test_a_retry_opens_the_fleet_again_wherever_it_is(api: Api) -> None:
    job, store = rent(api), api.context.fleet
    assert store
    api.post(f"/job/{job['id']}/stop").ok()
    (fleet,) = fleets(api)
    stopped = fleet.model_copy(update={"stopped": True, "version": 2})
    store.put_fleet(stopped)
    assert api.get("/fleets").ok()["fleets"] == []
    api.post(f"/job/{job['id']}/retry").ok()
    assert [(one.stopped, one.version) for one in fleets(api)] == [(False, 3)]
    api.post(f"/job/{job['id']}/stop").ok()
    fence = store.acquire("test", NOW, 1)
    assert fence
    retired = stopped.model_copy(update={"retired": True, "version": 4})
    store.retire(fence, retired, store.spending().model_copy(update={"version": 1}))
    assert fleets(api) == [] and api.get(f"/fleets/{job['queue']}").ok()["stopped"]
    own = {**DOCUMENT, "name": job["queue"]}
    api.call("PUT", f"/fleets/{job['queue']}", own).refused(ErrorCode.CONFLICT, "name")
    api.post(f"/job/{job['id']}/retry").ok()
    assert [(one.stopped, one.retired, one.version) for one in fleets(api)] == [(False, False, 5)]


def test_an_elastic_job_rents_a_machine_for_each_node_with_one_budget(api: Api) -> None:
    job = rent(api, nodes={"min": 2, "max": 3})
    (fleet,) = fleets(api)
    assert (fleet.job_id, fleet.spec.max, fleet.spec.min) == (job["id"], 3, 0)
    assert fleet.spec.budget.total_usd == 5 and job["queue"] == fleet.spec.name
    seats = api.context.jobs.get_many(seat_ids(job["id"], 3))
    assert [(seat.queue, seat.claimable) for seat in seats] == [(fleet.spec.name, True)] * 3
    (batched,) = api.post("/jobs/batch", {"jobs": [{"command": ["train"], "rent": RENT, "nodes": {"max": 2}}]}).ok()
    assert {one.job_id: one.spec.max for one in fleets(api)}[batched["id"]] == 2
    api.post(f"/job/{job['id']}/stop").ok()
    stopped = fleet.model_copy(update={"stopped": True, "version": 2})
    assert api.context.fleet
    api.context.fleet.put_fleet(stopped)
    api.post(f"/job/{job['id']}/retry").ok()
    assert {one.job_id: one.stopped for one in fleets(api)}[job["id"]] is False
