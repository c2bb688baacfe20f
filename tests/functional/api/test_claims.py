"""Claims: requirements, patience, time limits, lost machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.contract.names import Scope
from functions.api.operations.sweeper import sweep
from functions.settings import ControlPlaneSettings
from tests.kits.api.harness import NOW, TENANT, Api, memory_api

A100 = {"vram_gib": "80", "disk_gib": "500", "gpus": "8", "gpu_model": "NVIDIA A100-SXM4-80GB"}


def test_nothing_to_do(api: Api) -> None:
    with api.unchanged():
        assert api.get("/work").ok() == []
        assert api.get("/work", headers={"x-lease-aware": "1"}).ok() == []
        assert api.get("/work/peek").ok() == []


def test_a_claim_says_everything_that_a_worker_needs(api: Api) -> None:
    job = api.submit(
        command=["train", "--fast"],
        parameters={"a": 1},
        environment={"E": "1"},
        inputs=[{"prefix": "d/", "into": "d"}],
        outputs=["model"],
        policy={"heartbeat_interval_s": 10, "no_progress_timeout_s": 600, "stop_grace_s": 5},
    )
    item = api.claim().item
    assert item["id"] == job["id"] and item["epoch"] == 1 and item["status"] == "running"
    assert (item["lease_duration_s"], item["heartbeat_interval_s"]) == (30, 10)
    assert (item["lease_expires_at"], item["server_time"]) == (NOW + 30, NOW)
    assert (item["no_progress_timeout_s"], item["stop_grace_s"], item["last_step"]) == (600, 5, None)
    assert item["command"] == ["train", "--fast"] and item["parameters"] == {"a": 1}
    assert item["environment"] == {"E": "1"} and item["outputs"] == ["model"]
    assert item["inputs"] == [{"prefix": "d/", "into": "d"}] and item["resume"] == []
    assert item["checkpoint_prefix"] == f"jobs/{job['id']}/"
    assert len(item["lease_token"]) >= 43
    assert item["lease_token"] not in str(api.snapshot()), "only a digest is kept"
    (attempt,) = api.attempts(job["id"])
    assert attempt["machine_id"] == "m-1" and attempt["key_id"] == api.keys["worker"].split("_")[1]


def test_one_job_goes_to_one_of_two_workers(api: Api) -> None:
    api.submit()
    api.claim(machine_id="m-1")
    api.no_work(machine_id="m-2")


@pytest.mark.parametrize("lost", [True, False], ids=["its machine is lost", "it was released"])
def test_stale_first_then_priority_then_age(api: Api, lost: bool) -> None:
    """A job with sunk work comes before all that have none."""
    old = api.submit()["id"]
    held = api.claim()
    api.clock.advance(1)
    urgent = api.submit(priority=90)["id"]
    api.clock.advance(1)
    young = api.submit()["id"]
    if lost:
        api.clock.advance(90)
        assert api.sweep().reclaimed == 1
    else:
        held.release().ok()
    assert [api.claim().id for _ in range(3)] == [old, urgent, young]


def test_a_peek_takes_nothing(api: Api) -> None:
    job_id = api.submit(priority=70)["id"]
    with api.unchanged():
        peeked = api.get("/work/peek", headers={"x-lease-aware": "1"}).ok()
        assert peeked == [{"id": job_id, "status": "pending", "queue": "default", "priority": 70}]
        assert api.get("/work/peek", headers={"x-lease-aware": "1"}, query={"queue": "other"}).ok() == []
        assert api.get("/work/peek", headers={"x-lease-aware": "1"}, key="rival_worker").ok() == []
    assert api.claim().id == job_id


def test_queues_and_tenants_do_not_mix(api: Api) -> None:
    api.submit(queue="big")
    api.no_work()
    assert api.get("/work", headers={"x-lease-aware": "1"}, query={"queue": "big"}, key="rival_worker").ok() == []
    api.claim(queue="big")


@pytest.mark.parametrize(
    ("needs", "worker", "fits"),
    [
        ({"min_vram_gib": 24}, {}, False),
        ({"min_vram_gib": 24}, {"vram_gib": "23.9"}, False),
        ({"min_vram_gib": 24}, {"vram_gib": "24"}, True),
        ({"min_disk_gib": 500.5}, A100, False),
        ({"min_gpus": 9}, A100, False),
        ({"gpu_models": ["A10"]}, A100, False),
        ({"gpu_models": ["H100", "a100"]}, A100, True),
        ({"min_vram_gib": 80, "min_disk_gib": 500, "min_gpus": 8, "gpu_models": ["A100"]}, A100, True),
        ({"min_vram_gib": 0}, {}, True),
    ],
)
def test_a_job_goes_to_a_machine_that_has_what_it_needs(
    api: Api, needs: dict[str, Any], worker: dict[str, str], fits: bool
) -> None:
    demanding = api.submit(requirements=needs, priority=90)["id"]
    modest = api.submit()["id"]
    assert api.claim(**worker).id == (demanding if fits else modest)


def test_after_a_failure_the_job_waits_longer_each_time_and_avoids_the_machine(api: Api) -> None:
    api.submit(policy={"max_failures": 5, "backoff_s": 10, "avoid_machine_s": 100})
    first = api.claim(machine_id="m-1")
    assert first.fail().ok()["not_before"] == NOW + 10
    api.clock.advance(9)
    api.no_work(machine_id="m-2")
    api.clock.advance(1)
    api.no_work(machine_id="m-1")
    assert api.claim(machine_id="m-2").fail().ok()["not_before"] == NOW + 10 + 20
    api.clock.advance(89)
    api.no_work(machine_id="m-1")
    api.clock.advance(1)
    assert api.claim(machine_id="m-1").epoch == 3, "bans expire"


def test_a_worker_without_a_machine_id_is_not_banned_with_all_its_like(api: Api) -> None:
    api.submit(policy={"backoff_s": 0})
    held = api.claim(machine_id="")
    held.fail().ok()
    assert api.claim(machine_id="").epoch == 2


def test_a_banned_job_does_not_hide_those_behind_it(api: Api) -> None:
    """The original skipped jobs that had nothing to do with the ban."""
    banned = api.submit(policy={"backoff_s": 0, "max_failures": 9}, priority=90)["id"]
    held = api.claim(machine_id="m-1")
    assert held.id == banned
    held.fail().ok()
    others = [api.submit(priority=priority)["id"] for priority in (80, 70, 60)]
    assert [api.claim(machine_id="m-1").id for _ in range(3)] == others
    api.no_work(machine_id="m-1")


def test_a_faulty_machine_costs_the_job_no_patience(api: Api) -> None:
    api.submit(policy={"max_failures": 1})
    held = api.claim(machine_id="m-1")
    assert held.fail(failure_class="disk_full").ok() == {"status": "ok", "state": "pending", "not_before": None}
    view = api.job(held.id)
    assert (view["counters"]["failures"], view["counters"]["node_faults"]) == (0, 1)
    api.no_work(machine_id="m-1")
    assert api.claim(machine_id="m-2").epoch == 2


def test_a_lost_machine_is_no_failure(api: Api) -> None:
    api.submit(policy={"max_failures": 1, "max_interruptions": 2})
    held = api.claim()
    held.heartbeat(step=7).ok()
    api.clock.advance(90)
    api.sweep()
    second = api.claim(machine_id="m-2")
    assert (second.id, second.epoch, second.item["last_step"]) == (held.id, 2, 7)
    view = api.job(held.id)
    assert (view["counters"]["failures"], view["counters"]["interruptions"]) == (0, 1)
    assert api.attempts(held.id)[0]["end"] == "interrupted"
    api.clock.advance(90)
    api.sweep()
    view = api.job(held.id)
    assert view["state"] == "failed" and view["reason"]["code"] == "interruption_cap"


def test_a_lost_machine_does_not_hide_behind_live_ones(api: Api) -> None:
    """The index shows nearly all leases: more than a sweep ends."""
    helds = {held.id: held for held in (api.claim() for _ in range(6) if api.submit())}
    jobs, leases = api.context.jobs, api.context.leases
    api.clock.advance(89)
    for held in helds.values():
        held.heartbeat().ok()
    ((*live, lost),) = leases.due_pages(api.clock.now() + 90, size=10)
    api.clock.advance(89)
    for job_id in live:
        helds[job_id].heartbeat().ok()
    api.clock.advance(1)
    swept = sweep(jobs, leases, api.clock, page=2, sweep_interval_s=1)
    assert (swept.reclaimed, swept.left, swept.more) == (1, 0, False)
    assert [job_id for job_id in helds if api.job(job_id)["state"] == "pending"] == [lost]


def test_more_partitions_hide_no_job_that_waits_running_or_not() -> None:
    """Jobs stay in the partition they had when the deployment had fewer."""
    few = memory_api(settings=ControlPlaneSettings(ready_shards=2))
    waiting = {few.submit()["id"] for _ in range(20)}
    held = few.claim()
    many = replace(few, context=replace(few.context, settings=ControlPlaneSettings(ready_shards=8)))
    held.release().ok()
    spread = {many.submit()["id"] for _ in range(40)}
    assert {many.context.jobs.get(job_id).shard for job_id in waiting} == {0, 1}  # type: ignore[union-attr]
    assert {many.context.jobs.get(job_id).shard for job_id in spread} == set(range(8))  # type: ignore[union-attr]
    assert {many.claim().id for _ in range(60)} == waiting | spread
    many.no_work()


def test_a_job_that_kills_every_machine_is_parked_with_the_reason(api: Api) -> None:
    api.submit(policy={"max_fruitless_interruptions": 3, "backoff_s": 0})
    for _ in range(3):
        api.claim()
        api.clock.advance(90)
        api.sweep()
    (view,) = api.get("/jobs").ok()
    assert view["state"] == "failed" and view["reason"]["code"] == "fruitless_interruption_cap"


def test_a_checkpoint_shows_that_the_machine_was_not_lost_in_vain(api: Api) -> None:
    api.submit(policy={"max_fruitless_interruptions": 2, "backoff_s": 0})
    for step in (10, 20, 30, 40):
        api.claim().commit(step).ok()
        api.clock.advance(90)
        assert api.sweep().reclaimed == 1
    (view,) = api.get("/jobs").ok()
    assert view["state"] == "pending" and view["counters"]["interruptions"] == 4


def test_max_runtime_is_told_before_it_ends_the_job(api: Api) -> None:
    api.submit(policy={"max_runtime_s": 300})
    held = api.claim()
    seen = []
    for _ in range(10):
        api.clock.advance(30)
        answer = held.heartbeat().ok()
        seen.append(answer["directive"])
    assert seen == ["continue"] * 7 + ["checkpoint"] * 2 + ["cancel"]
    assert answer["reason"] == "max_runtime"
    view = api.job(held.id)
    assert view["state"] == "failed" and view["reason"]["code"] == "max_runtime"
    assert view["counters"]["runtime_s"] == 300 and api.attempts(held.id)[0]["end"] == "failed"
    with api.unchanged():
        assert held.heartbeat().ok()["directive"] == "cancel"


def test_runtime_is_summed_over_attempts(api: Api) -> None:
    api.submit(policy={"max_runtime_s": 100})
    held = api.claim()
    api.clock.advance(60)
    held.release().ok()
    api.clock.advance(1000)
    second = api.claim()
    api.clock.advance(39)
    assert second.heartbeat().ok()["directive"] == "checkpoint"
    api.clock.advance(1)
    assert second.heartbeat().ok()["directive"] == "cancel"
    assert api.job(held.id)["counters"]["runtime_s"] == 100


@pytest.mark.parametrize("state", ["pending", "running"])
def test_a_deadline_ends_the_job_wherever_it_stands(api: Api, state: str) -> None:
    job_id = api.submit(policy={"deadline_at": NOW + 60})["id"]
    if state == "running":
        held = api.claim()
        api.clock.advance(60)
        assert held.heartbeat().ok()["directive"] == "cancel"
    else:
        api.clock.advance(60)
        api.no_work()
    view = api.job(job_id)
    assert view["state"] == "failed" and view["reason"]["code"] == "deadline"
    api.no_work()


@pytest.mark.parametrize(
    ("machine", "policy", "limit_s", "restarts"),
    [
        ("nights/m1", {}, None, True),
        ("nights/m1", {"no_progress_timeout_s": 0}, None, False),
        ("nights/m1", {"no_progress_timeout_s": 900}, 900, False),
        (None, {}, None, False),
    ],
)
def test_on_a_rented_machine_a_training_that_stands_still_is_ended(
    api: Api, machine: str | None, policy: dict[str, Any], limit_s: int | None, restarts: bool
) -> None:
    api.submit(policy=policy)
    key = api.issue(TENANT, Scope.WORKER, machine=machine)
    (item,) = api.get("/work", key=key, headers={"x-lease-aware": "1"}, query={"machine_id": "m1"}).ok()
    assert (item["no_progress_timeout_s"], item["restart_on_stall"]) == (limit_s, restarts)
