"""Test the list of fleets that rent machines for a job, and the cost of the machines."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState
from functions.fleet.ledger import Ledger
from functions.fleet.records import Machine
from tests.kits.api.fleets import DOCUMENT, make_machine, put_machine, write
from tests.kits.api.harness import NOW, TENANT, Answer, Api


def token(api: Api, number: int) -> str:
    assert api.context.fleet
    return f"{api.context.fleet.deployment()}-nights-{number:012x}"


def rented(api: Api, number: int, state: MachineState = MachineState.BUSY, **changes: Any) -> Machine:
    machine = make_machine(token(api, number), state, **changes)
    put_machine(api, machine)
    return machine


def ask(api: Api, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"/job/{job['id']}/machines").ok()
    return found


def test_a_job_that_no_fleet_serves_has_no_machines(api: Api) -> None:
    job = api.submit(queue="elsewhere")
    assert ask(api, job) == {"fleets": [], "attempts": [], "usd": 0, "at": NOW}
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    assert ask(api, job)["fleets"] == []
    api.get("/job/00000000-0000-4000-8000-000000000000/machines").refused(ErrorCode.JOB_NOT_FOUND, "id")
    api.get(f"/job/{job['id']}/machines", key="rival_submit").refused(ErrorCode.JOB_NOT_FOUND, "id")


def test_the_machines_of_a_job_are_sent_again_only_if_they_or_their_cost_changed(api: Api) -> None:
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    job = api.submit()
    machine = rented(api, 1)
    held = api.claim(machine_id=machine.id)

    def read(etag: str = "") -> Answer:
        return api.get(f"/job/{job['id']}/machines", headers={"if-none-match": etag} if etag else {})

    api.clock.advance(20)
    running = read().headers["etag"]
    api.clock.advance(20)
    costs_more = read(running)
    assert costs_more.status == 200 and costs_more.json["usd"] == pytest.approx(40 / 3600 * 0.4, abs=1e-6)
    held.post("/release", {"job_id": held.id}).ok()
    ended = read().headers["etag"]
    api.clock.advance(60)
    assert read(ended).status == 304
    put_machine(api, machine.model_copy(update={"state": MachineState.TERMINATING, "version": 2}))
    assert read(ended).json["attempts"][0]["machine"]["state"] == "terminating"


def test_the_fleets_of_a_waiting_job_say_why_it_waits(api: Api) -> None:
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    api.call("PUT", "/fleets/days", {**DOCUMENT, "name": "days", "min_vram_gib": 48}).ok()
    write(api, ledger=Ledger(version=1, waits="no offer is left"))
    job = api.submit(requirements={"min_vram_gib": 24})
    days, nights = ask(api, job)["fleets"]
    assert (days["fleet"]["spec"]["name"], days["cannot"], days["fleet"]["waits"]) == ("days", "", "")
    assert nights["cannot"] == "needs 24 GiB VRAM, fleet nights guarantees 0 (min_vram_gib)"
    assert nights["fleet"]["waits"] == "no offer is left"


def test_an_elastic_job_costs_the_machines_of_all_its_nodes(api: Api) -> None:
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    job = api.submit(nodes={"max": 3})
    for number in (1, 2):
        rented(api, number, usd_per_hour=0.6)
    nodes = [api.claim(machine_id=token(api, number)) for number in (1, 2)]
    api.clock.advance(600)
    found = ask(api, job)
    assert sorted((one["seat"], one["epoch"], one["usd"]) for one in found["attempts"]) == sorted(
        (node.item["world"]["seat"], 1, 0.1) for node in nodes
    )
    assert found["usd"] == 0.2


def test_a_job_costs_the_price_of_each_machine_for_the_time_that_the_machine_held_the_job(api: Api) -> None:
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    job = api.submit()
    rented(api, 1, MachineState.GONE, usd_per_hour=0.6)
    first = api.claim(machine_id=token(api, 1))
    api.clock.advance(60)
    first.post("/release", {"job_id": first.id, "reason": "drain"}).ok()
    # A worker that its owner started.
    own = api.claim(machine_id="desk")
    own.post("/release", {"job_id": own.id, "reason": "drain"}).ok()
    machine = rented(api, 2, usd_per_hour=0.3, job_id=job["id"])
    api.claim(machine_id=machine.id)
    api.clock.advance(20)
    found = ask(api, job)
    assert [(one["epoch"], one["machine"]["id"], one["held_s"], one["usd"]) for one in found["attempts"]] == [
        (1, token(api, 1), 60, 0.01),
        (3, token(api, 2), 20, 0.001667),
    ]
    assert found["usd"] == pytest.approx(0.011667)
    assert [one["machine"]["state"] for one in found["attempts"]] == ["gone", "busy"]


def test_the_money_of_a_job_whose_fleet_has_retired_is_still_known(api: Api) -> None:
    job = api.post("/job", {"command": ["train"], "rent": {"budget_usd": 5, "providers": ["loopback"]}}).ok()
    store = api.context.fleet
    assert store
    (fleet,) = store.fleets(TENANT)
    name = f"{store.deployment()}-{job['queue']}-000000000001"
    fence = store.acquire("test", NOW, 1)
    assert fence
    store.write(fence, TENANT, job["queue"], machine=make_machine(name, MachineState.GONE, fleet=job["queue"]))
    api.claim(queue=job["queue"], machine_id=name)
    api.clock.advance(30)
    api.post(f"/job/{job['id']}/stop").ok()
    retired = fleet.model_copy(update={"stopped": True, "retired": True, "version": 2})
    store.retire(fence, retired, store.spending().model_copy(update={"version": 1}))
    found = ask(api, job)
    assert [one["fleet"]["stopped"] for one in found["fleets"]] == [True]
    assert found["usd"] == pytest.approx(30 / 3600 * 0.4, abs=1e-6)
