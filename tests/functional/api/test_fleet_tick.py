"""The function of the fleets' controller: machines for waiting jobs, keys that end with their machines, metrics."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.names import Scope
from functions.api.machines.enrolment_keys import EnrolmentKeys
from functions.api.operations.cloudwatch_metrics import CloudWatchMetrics
from functions.domain.access.api_keys import ApiKey, authenticate
from functions.domain.errors import WriteConflict
from functions.fleet.clock import FleetClock
from functions.fleet.records import Offer, StoredFleet
from functions.fleet.ticks.demand import MAX_WAITING, waiting_jobs
from functions.handlers import fleet
from tests.functional.api.test_sweeper import Invocation, metrics_in
from tests.kits.api.harness import NOW, TENANT, Api
from tests.twins.fleet import MemoryFleetStore
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.test_machine_states import make_machine


def make_fleet(**changes: Any) -> StoredFleet:
    document = {"name": "nights", "providers": ["loopback"], "max_usd_per_hour": 1, "budget": {"total_usd": 9}}
    spec = FleetSpec.model_validate({**document, **changes})
    return StoredFleet(tenant=TENANT, spec=spec, version=1, created_at=NOW, updated_at=NOW)


class Deployment:
    """The deployed function on an API's stores, with one provider and a clock."""

    def __init__(self, api: Api, patch: pytest.MonkeyPatch) -> None:
        self.api, self.log, self.store, self.provider = api, io.StringIO(), MemoryFleetStore(), VirtualProvider()
        for name, value in {
            "context": api.context,
            "store": self.store,
            "drivers": {"loopback": self.provider},
            "metrics": CloudWatchMetrics("prod", self.log, api.clock),
            "now": api.clock.now,
        }.items():
            patch.setattr(fleet, name, value)
        patch.setitem(api.context.settings.__dict__, "fleet_api_url", "https://api.example.com")

    def tick(self, minutes: int = 1) -> dict[str, Any]:
        for _ in range(minutes):
            self.api.clock.advance(60)
            self.provider.now = self.api.clock.now()
            report = fleet.handler({}, Invocation(55))
        return report


@pytest.fixture
def deployment(api: Api, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return Deployment(api, monkeypatch)


def key_of(deployment: Deployment) -> ApiKey:
    """Return the key in the environment of the newest machine."""
    environment = deployment.provider.creates[-1].environment
    assert environment.keys() == {"BATON_API_URL", "BATON_ENROLMENT_TOKEN"}
    assert environment["BATON_API_URL"] == "https://api.example.com"
    now = deployment.api.clock.now()
    found = authenticate(deployment.api.context.tokens, environment["BATON_ENROLMENT_TOKEN"], now)
    assert isinstance(found, ApiKey)
    return found


def test_a_waiting_job_rents_a_machine_whose_key_can_only_enrol(deployment: Deployment) -> None:
    deployment.store.put_fleet(make_fleet())
    deployment.api.submit(queue="elsewhere")
    assert deployment.tick()["created"] == 0
    deployment.api.submit()
    report = deployment.tick()
    assert (report["created"], report["finished"], report["failures"]) == (1, True, [])
    (machine,) = deployment.store.machines(TENANT, "nights")
    key = key_of(deployment)
    assert (key.tenant, key.scopes, key.machine) == (TENANT, (Scope.ENROLL,), f"nights/{machine.id}")
    assert (key.id, key.expires_at) == (machine.worker_key, deployment.api.clock.now() + 1800)
    metrics = metrics_in(deployment.log)
    assert (metrics["FleetTicks"], metrics["FleetStarting"], metrics["FleetUsdPerHour"]) == (1, 1, 0.2)
    assert "FleetBusy" not in metrics


def test_a_tick_that_leaves_a_fleet_out_is_counted_for_the_alarm(deployment: Deployment) -> None:
    deployment.store.put_fleet(make_fleet())
    deployment.store.damaged_fleets.add((TENANT, "nights"))
    assert deployment.tick()["finished"] is False
    metrics = metrics_in(deployment.log)
    assert metrics["FleetTicksUnfinished"] == 1 and "FleetTicks" not in metrics


def test_machines_with_a_status_that_their_driver_does_not_know_are_counted_for_the_alarm(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    deployment.store.put_fleet(make_fleet())
    deployment.api.submit()
    assert deployment.tick()["unknown_statuses"] == 0
    assert "FleetUnknownStatuses" not in metrics_in(deployment.log)
    (machine,) = deployment.provider.machines
    machine.unknown_status = "'hibernating'"
    assert deployment.tick()["unknown_statuses"] == 1
    assert metrics_in(deployment.log)["FleetUnknownStatuses"] == 1
    assert f"machine {machine.token} has the unknown status 'hibernating'" in caplog.text


def test_only_a_nudge_waits_for_another_tick_whose_end_is_not_its_own(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.store.put_fleet(make_fleet())
    deployment.api.submit()
    fence = deployment.store.acquire("another", deployment.api.clock.now(), 900)
    assert fence is not None
    monkeypatch.setattr(
        fleet, "FleetController", partial(fleet.FleetController, pause=lambda _: deployment.store.release(fence))
    )
    assert deployment.tick()["skipped"]
    assert not {"FleetTicks", "FleetTicksUnfinished"} & metrics_in(deployment.log).keys()
    assert fleet.handler({"Records": []}, Invocation(55))["created"] == 1
    assert metrics_in(deployment.log)["FleetTicks"] == 1


def test_the_key_of_a_machine_ends_with_the_machine(deployment: Deployment) -> None:
    deployment.store.put_fleet(make_fleet())
    deployment.api.submit()
    deployment.tick()
    key = key_of(deployment)
    stopped = make_fleet().model_copy(update={"stopped": True, "version": 2})
    deployment.store.put_fleet(stopped)
    deployment.tick(5)
    assert [one.state for one in deployment.store.ended(TENANT, "nights", limit=9)] == [State.GONE]
    found = deployment.api.context.tokens.get_key(key.id)
    assert found is not None and found.revoked_at is not None


def test_a_deployment_without_fleets_writes_nothing(deployment: Deployment) -> None:
    deployment.api.submit()
    assert deployment.tick()["finished"] is False
    assert deployment.log.getvalue() == ""
    assert deployment.store.acquire("first", NOW, 90) == 1


def test_a_deployment_without_the_api_s_address_rents_nothing(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(deployment.api.context.settings.__dict__, "fleet_api_url", None)
    deployment.store.put_fleet(make_fleet())
    deployment.api.submit()
    with pytest.raises(RuntimeError, match="BATON_FLEET_API_URL"):
        deployment.tick()
    assert deployment.provider.creates == []


def test_a_key_is_revoked_once_and_a_deleted_one_needs_no_revocation(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, machine = api.context.tokens, make_machine(State.PLANNED)
    keys = EnrolmentKeys(tokens, api.context.random, api.clock, FleetClock(), "https://a")
    key_id, _ = keys.issue(machine, NOW + 9)
    for _ in range(2):
        keys.revoke(key_id)
        api.clock.advance(5)
    found = tokens.get_key(key_id)
    assert found is not None and found.revoked_at == NOW
    keys.revoke("0" * 20)
    deleted, _ = keys.issue(machine, NOW + 9)

    def conflict(key: ApiKey) -> None:
        raise WriteConflict

    monkeypatch.setattr(tokens, "replace_key", conflict)
    keys.revoke(deleted)


def test_each_queue_and_shard_has_a_part_of_the_jobs_that_a_tick_reads(api: Api) -> None:
    for _ in range(6):
        api.submit(queue="long")
    api.submit(queue="short")
    one = make_fleet(queues=["long", "short", "long"])
    read = [job.queue for job in waiting_jobs(api.context.jobs, one, shards=1)]
    assert read == ["long"] * 6 + ["short"]
    read = [job.queue for job in waiting_jobs(api.context.jobs, one, shards=MAX_WAITING)]
    assert read == ["long", "short"]


def test_the_answer_of_a_tick_can_be_logged(deployment: Deployment) -> None:
    deployment.store.put_fleet(make_fleet())
    deployment.api.submit()
    assert json.loads(json.dumps(deployment.tick()))["machines"] == {"booting": 1}


def test_long_jobs_of_a_recipe_get_the_machine_that_is_cheap_by_the_hour(deployment: Deployment) -> None:
    """Running times of completed jobs decide whether a long boot pays."""
    slow = {"ref": "slow", "machine_ref": "h1", "usd_per_hour": 0.1, "boot_s": 1000}
    fast = {"ref": "fast", "machine_ref": "h2", "usd_per_hour": 0.11, "boot_s": 0}
    offers = [Offer(provider="loopback", disk_gib=80, **one) for one in (slow, fast)]
    deployment.provider.quote = lambda spec: offers  # type: ignore[method-assign]
    recipe = {"recipe": "command@1", "parameters": {"command": ["true"]}}
    for _ in range(3):
        job = deployment.api.submit(**recipe)  # type: ignore[arg-type]
        held = deployment.api.claim()
        for _ in range(130):
            deployment.api.clock.advance(80)
            held.heartbeat().ok()
        held.complete().ok()
        assert job["id"] == held.id
    deployment.store.put_fleet(make_fleet())
    deployment.api.submit(**recipe)  # type: ignore[arg-type]
    deployment.tick()
    assert [one.offer.ref for one in deployment.provider.creates] == ["slow"]
