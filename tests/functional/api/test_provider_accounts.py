"""The calls about accounts: a key that does not work is refused, and no answer shows a stored key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import FleetSpec, MachineState
from baton.contract.fleets.providers import ACCOUNTS
from functions.api.machines.enrolment_keys import EnrolmentKeys
from functions.domain.records import Job
from functions.fleet.accounts import RELOAD_S, CachedAccounts, StoredSecrets
from functions.fleet.clock import FleetClock
from functions.fleet.drivers import configured
from functions.fleet.drivers.configured import ConfiguredDrivers
from functions.fleet.drivers.protocol import AccountReport, Driver, ProviderRefused, ProviderUnavailable, RefusalKind
from functions.fleet.records import StoredFleet
from functions.fleet.ticks.controller import FleetController
from functions.fleet.ticks.tick import TickReport
from tests.kits.api.accounts import KEY, Market, log_in, market
from tests.kits.api.factories import make_job
from tests.kits.api.fleets import DOCUMENT, OFFER, make_machine, put_machine
from tests.kits.api.harness import NOW, TENANT, Api
from tests.twins.accounts import MemoryAccounts
from tests.twins.fleet import MemoryFleetStore
from tests.twins.provider import VirtualMachine

SSH = {
    "private_key": KEY,
    "hosts": [{"name": "desk", "address": "10.0.0.7", "user": "u", "host_key": "ssh-ed25519 AAAA"}],
}


@pytest.fixture
def vast(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Market]:
    with market(api, monkeypatch) as made:
        yield made


def machine_in(api: Api, vast: Market, key: str) -> VirtualMachine:
    assert api.context.fleet is not None
    made = VirtualMachine("h-1", f"{api.context.fleet.deployment()}-nights-1", 0.4, NOW, "host")
    vast.accounts[key].machines.append(made)
    return made


def test_a_login_checks_the_key_stores_the_account_and_shows_no_secret(api: Api, vast: Market) -> None:
    assert api.get("/providers").ok() == {"providers": []}
    vast.accounts[KEY].report = AccountReport(account="me@example.com", balance_usd=7.5, problems=["lacks read"])
    view = log_in(api)
    assert view == {
        "provider": "vast",
        "account": "me@example.com",
        "balance_usd": 7.5,
        "problems": ["lacks read"],
        "checked_at": NOW,
    }
    answer = api.get("/providers")
    assert answer.ok() == {"providers": [view]} and KEY not in answer.text
    assert set(api.context.drivers) == {"vast"}, "in force at once"
    assert api.call("DELETE", "/providers/vast").status == 204
    assert api.get("/providers").ok() == {"providers": []} and not api.context.drivers
    api.call("DELETE", "/providers/vast").refused(ErrorCode.PROVIDER_NOT_FOUND, "provider")
    api.call("DELETE", "/providers/gcp").refused(ErrorCode.PROVIDER_NOT_FOUND, "provider")


@pytest.mark.parametrize("kind", RefusalKind)
def test_an_account_that_its_provider_refuses_is_not_stored(api: Api, vast: Market, kind: RefusalKind) -> None:
    vast.accounts[KEY].refusal = ProviderRefused(kind, "the reason")
    error = api.call("PUT", "/providers/vast", {"api_key": KEY}).refused(ErrorCode(kind.value))
    assert error["message"].startswith("vast: the reason. ") and KEY not in json.dumps(error)
    assert vast.store.read() == StoredSecrets()


def test_a_provider_that_does_not_answer_is_no_reason_to_store_a_key(api: Api, vast: Market) -> None:
    vast.accounts[KEY].refusal = ProviderUnavailable("GET /users/current was answered 502")
    api.call("PUT", "/providers/vast", {"api_key": KEY}).refused(ErrorCode.PROVIDER_UNAVAILABLE)
    assert vast.store.read() == StoredSecrets()


@pytest.mark.parametrize(
    ("provider", "body", "field"),
    [
        ("vast", {}, "api_key"),
        ("vast", {"api_key": ""}, "api_key"),
        ("vast", {"api_key": [KEY]}, "api_key"),
        ("vast", {"api_key": KEY * 1000}, "api_key"),
        ("vast", {"api_key": KEY, "organization": KEY}, "organization"),
        ("vast", {"api_key": KEY, "address": f"ftp://{KEY}"}, "address"),
        ("salad", {"api_key": KEY, "project": KEY}, "organization"),
        ("runpod", {"api_key": KEY, "cloud": KEY}, "cloud"),
        ("ec2", {"access_key_id": "A", "secret_access_key": {"x": KEY}}, "secret_access_key"),
        ("ssh", {**SSH, "hosts": []}, "hosts"),
        ("ssh", {**SSH, "hosts": [{**SSH["hosts"][0], "host_key": KEY}]}, "hosts.0.host_key"),  # type: ignore[dict-item]
    ],
)
def test_a_malformed_account_is_refused_without_its_values(
    api: Api, vast: Market, provider: str, body: dict[str, Any], field: str
) -> None:
    answer = api.call("PUT", f"/providers/{provider}", body)
    assert answer.status == 422 and answer.error["field"] == field, answer.text
    assert KEY not in answer.text
    broken = api.call("PUT", f"/providers/{provider}", json.dumps({"api_key": KEY}).encode()[:-2])
    assert broken.status == 400 and KEY not in broken.text
    assert vast.store.read() == StoredSecrets()


def test_only_admins_see_and_change_accounts(api: Api, vast: Market) -> None:
    log_in(api)
    for key in ("submit", "worker"):
        api.get("/providers", key=key).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        api.call("PUT", "/providers/vast", {"api_key": KEY}, key=key).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        api.call("DELETE", "/providers/vast", key=key).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        api.get("/fleet-doctor", key=key).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
        fix = {"findings": ["x"]}
        api.post("/fleet-doctor/fix", fix, key=key).refused(ErrorCode.WRONG_SCOPE, "x-api-key")


def test_an_account_whose_machines_run_is_neither_removed_nor_hidden_by_another(api: Api, vast: Market) -> None:
    log_in(api)
    machine = machine_in(api, vast, KEY)
    error = api.call("DELETE", "/providers/vast").refused(ErrorCode.CONFLICT, "provider", "top the fleet")
    assert f"The machine {machine.token} runs at vast".lower() in error["message"].lower()
    error = api.call("PUT", "/providers/vast", {"api_key": "another-key"}).refused(
        ErrorCode.CONFLICT, remedy="top the fleet"
    )
    assert "not in this one" in error["message"]
    assert log_in(api)["account"] == "owner of canary", "the same account again"
    vast.accounts["another-key"].machines.append(machine)
    assert log_in(api, "another-key")["account"] == "owner of anothe", "a new key of the same account"
    machine.ended_at = NOW
    assert api.call("DELETE", "/providers/vast").status == 204


def test_an_account_with_a_revoked_key_can_be_replaced_and_removed(api: Api, vast: Market) -> None:
    log_in(api)
    machine_in(api, vast, KEY)
    vast.accounts[KEY].refusal = ProviderUnavailable("502")
    api.call("PUT", "/providers/vast", {"api_key": "another-key"}).refused(ErrorCode.PROVIDER_UNAVAILABLE)
    api.call("DELETE", "/providers/vast").refused(ErrorCode.PROVIDER_UNAVAILABLE)
    vast.accounts[KEY].refusal = ProviderRefused(RefusalKind.KEY, "revoked")
    log_in(api, "another-key")
    vast.accounts["another-key"].refusal = ProviderRefused(RefusalKind.KEY, "revoked")
    assert api.call("DELETE", "/providers/vast").status == 204


def put_record(api: Api, state: MachineState, name: str = "m1") -> str:
    """Store a machine at Vast that no list names yet; return its token."""
    assert api.context.fleet is not None
    token = f"{api.context.fleet.deployment()}-{name}"
    put_machine(api, make_machine(token, state, handle=None, offer=OFFER.model_copy(update={"provider": "vast"})))
    return token


@pytest.mark.parametrize("state", [MachineState.REQUESTED, MachineState.AMBIGUOUS, MachineState.BOOTING])
def test_a_machine_that_no_list_names_yet_keeps_its_account(api: Api, vast: Market, state: MachineState) -> None:
    """The provider can list and bill a machine after the removal of the account, which no call could end."""
    log_in(api)
    api.call("PUT", "/fleets/nights", {**DOCUMENT, "providers": ["vast"], "image": "i"}).ok()
    api.post("/fleets/nights/stop").ok()
    token = put_record(api, state)
    error = api.call("DELETE", "/providers/vast").refused(ErrorCode.CONFLICT, "provider", "top the fleet")
    assert token in error["message"]
    error = api.call("PUT", "/providers/vast", {"api_key": "another-key"}).refused(
        ErrorCode.CONFLICT, remedy="top the fleet"
    )
    assert token in error["message"]
    vast.accounts[KEY].refusal = ProviderRefused(RefusalKind.KEY, "revoked")
    error = api.call("PUT", "/providers/vast", {"api_key": "another-key"}).refused(
        ErrorCode.CONFLICT, remedy="top the fleet"
    )
    assert "baton fleet logout vast" in error["message"], "the way out for an account that is lost"
    vast.accounts["another-key"].report = vast.accounts[KEY].report
    log_in(api, "another-key")
    vast.accounts["another-key"].refusal = ProviderRefused(RefusalKind.KEY, "revoked")
    assert api.call("DELETE", "/providers/vast").status == 204


def test_a_fleet_that_rents_at_a_provider_keeps_its_account(api: Api, vast: Market) -> None:
    """A controller that read the accounts a moment ago could rent a machine without a way to end the machine."""
    log_in(api)
    api.call("PUT", "/fleets/nights", {**DOCUMENT, "providers": ["vast"], "image": "i"}).ok()
    error = api.call("DELETE", "/providers/vast").refused(ErrorCode.CONFLICT, "provider", "top the fleet")
    assert error["message"].startswith("The fleet nights rents at vast. First stop")
    api.call("PUT", "/providers/vast", {"api_key": "another-key"}).refused(
        ErrorCode.CONFLICT, "provider", "top the fleet"
    )
    vast.accounts["another-key"].machines.append(machine_in(api, vast, KEY))
    log_in(api, "another-key")
    vast.accounts["another-key"].machines.clear()
    api.post("/fleets/nights/stop").ok()
    assert api.call("DELETE", "/providers/vast").status == 204


def test_a_damaged_secret_is_named_with_the_remedy(api: Api, vast: Market) -> None:
    assert isinstance(vast.store, MemoryAccounts)
    vast.store.damaged = True
    for method, path, body in (
        ("GET", "/providers", None),
        ("PUT", "/providers/vast", {"api_key": KEY}),
        ("DELETE", "/providers/vast", None),
        ("GET", "/fleet-doctor", None),
        ("POST", "/fleet-doctor/fix", {"findings": ["x"]}),
        ("PUT", "/fleets/nights", {**DOCUMENT, "providers": ["vast"], "image": "i"}),
    ):
        error = api.call(method, path, body).refused(ErrorCode.CONFLICT)
        assert "the secret x holds no JSON object" in error["message"] and "delete it" in error["message"]


def test_a_secret_that_is_damaged_later_is_named_while_the_known_accounts_stay_in_use(api: Api, vast: Market) -> None:
    document = {**DOCUMENT, "providers": ["vast"], "image": "i"}
    log_in(api)
    assert isinstance(vast.store, MemoryAccounts)
    vast.store.damaged = True
    api.clock.advance(RELOAD_S)
    assert api.call("PUT", "/fleets/nights", document).ok()["warnings"] == []
    for path in ("/providers", "/fleet-doctor"):
        assert "delete it" in api.get(path).refused(ErrorCode.CONFLICT)["message"]
    vast.store.damaged = False
    assert [one["provider"] for one in api.get("/providers").ok()["providers"]] == ["vast"]


def test_a_deployment_without_a_place_for_accounts_says_so(api: Api) -> None:
    api.get("/providers").refused(ErrorCode.CONFLICT)
    api.call("PUT", "/providers/vast", {"api_key": KEY}).refused(ErrorCode.CONFLICT)
    api.call("DELETE", "/providers/vast").refused(ErrorCode.CONFLICT)


def test_a_fleet_names_the_providers_that_have_no_account(api: Api, vast: Market) -> None:
    document = {**DOCUMENT, "providers": ["vast", "salad"], "image": "i"}
    log_in(api)
    stored = api.call("PUT", "/fleets/nights", document).ok()
    assert stored["warnings"] == ["salad: no account is stored; run 'baton fleet login salad'"]
    assert api.get("/fleets/nights").ok()["warnings"] == []


def test_a_tick_reads_the_accounts_only_with_a_fleet_and_every_five_minutes(api: Api, vast: Market) -> None:
    log_in(api)
    store = vast.store
    assert isinstance(store, MemoryAccounts)
    drivers = ConfiguredDrivers(CachedAccounts(store, api.clock.now), loopback_directory=None, now=api.clock.now)
    fleets, before = MemoryFleetStore(), store.reads
    tick(api, fleets, drivers)
    assert store.reads == before
    fleets.put_fleet(a_fleet("vast"))
    for _ in range(11):
        assert tick(api, fleets, drivers).failures == []
    assert store.reads == before + 3


def test_a_fleet_waits_for_an_account(api: Api, vast: Market) -> None:
    fleets = MemoryFleetStore()
    fleets.put_fleet(a_fleet("salad"))
    tick(api, fleets, api.context.drivers, make_job())
    waits = fleets.ledger(TENANT, "nights").waits
    assert waits.startswith("salad: no account is stored; run 'baton fleet login salad'")


def a_fleet(provider: str) -> StoredFleet:
    spec = FleetSpec.model_validate({**DOCUMENT, "providers": [provider], "image": "i"})
    return StoredFleet(tenant=TENANT, spec=spec, version=1, created_at=NOW, updated_at=NOW)


def tick(api: Api, fleets: MemoryFleetStore, drivers: Mapping[str, Driver], *waiting: Job) -> TickReport:
    api.clock.advance(60)
    random = api.context.random
    return FleetController(
        fleets,
        drivers,
        waiting=lambda _: waiting,
        keys=EnrolmentKeys(api.context.tokens, random, api.clock, FleetClock(), "https://a"),
        now=api.clock.now,
        random_token=random.token,
        time_left_s=lambda: 55.0,
    ).tick()


def test_every_provider_with_an_account_has_a_driver() -> None:
    for provider, (module, name) in configured.DRIVERS.items():
        assert getattr(import_module(module), name).name == provider
    assert configured.DRIVERS.keys() == ACCOUNTS.keys()
