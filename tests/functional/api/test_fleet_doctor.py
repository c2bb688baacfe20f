"""The doctor of the fleets: what costs money without a use is found and ended, what is not Baton's is left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState
from functions.domain.errors import WriteConflict
from functions.fleet import doctor
from functions.fleet.drivers.protocol import AccountReport, Leftover, ProviderRefused, ProviderUnavailable, RefusalKind
from functions.fleet.records import STRAYS_NAME, STRAYS_TENANT, OrphanMachine, Sighting
from tests.functional.api.test_sweeper import Invocation
from tests.kits.api.accounts import KEY, AccountProvider, log_in, market
from tests.kits.api.fleets import DOCUMENT, OFFER, deploy_controller, make_machine, put_machine
from tests.kits.api.harness import NOW, TENANT, Api
from tests.twins.provider import VirtualMachine, VirtualProvider

VAST_OFFER = OFFER.model_copy(update={"provider": "vast"})


@pytest.fixture
def vast(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[AccountProvider]:
    with market(api, monkeypatch) as made:
        log_in(api)
        yield made.accounts[KEY]


def token(api: Api, name: str) -> str:
    assert api.context.fleet is not None
    return f"{api.context.fleet.deployment()}-{name}"


def findings(api: Api) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in api.get("/fleet-doctor").ok()["findings"]}


def apply(api: Api, **changes: Any) -> None:
    api.call("PUT", "/fleets/nights", {**DOCUMENT, "providers": ["vast"], "image": "i", **changes}).ok()


def finish_tick(api: Api) -> None:
    store = api.context.fleet
    assert store is not None
    fence = store.acquire("tick", api.clock.now(), 90)
    assert fence is not None
    store.release(fence, finished_at=api.clock.now())


def test_nothing_is_found_where_nothing_is_wrong(api: Api, vast: AccountProvider) -> None:
    apply(api)
    put_machine(api, make_machine(token(api, "m1"), MachineState.READY, offer=VAST_OFFER))
    vast.machines.append(VirtualMachine("h-1", token(api, "m1"), 0.4, NOW, "host"))
    with api.unchanged():
        assert api.get("/fleet-doctor").ok() == {"providers": ["vast"], "findings": [], "strays": [], "at": NOW}


def test_a_stray_is_destroyed_and_a_foreign_machine_is_not_touched(api: Api, vast: AccountProvider) -> None:
    stray = VirtualMachine("h-2", token(api, "lost"), 0.4, NOW, "host")
    foreign = VirtualMachine("h-3", "my-own-work", 2.0, NOW, "host")
    vast.machines += [stray, foreign]
    seen = Sighting(token="my-own-work", handle="h-3")
    vast.report = AccountReport(account="me", foreign=[seen] * 9)
    found = findings(api)
    assert list(found) == ["stray_machine/vast/h-2", "foreign_machines/vast"], "the urgent ones first"
    assert found["stray_machine/vast/h-2"]["fix"] == "destroys the machine h-2"
    others = found["foreign_machines/vast"]
    assert others["fix"] == "" and "9 machines" in others["detail"] and "and 1 more" in others["detail"]
    outcomes = api.post("/fleet-doctor/fix", {"findings": [*found, *found, "stray_machine/vast/h-3"]}).ok()["outcomes"]
    assert [(one["id"], one["fixed"]) for one in outcomes] == [
        ("stray_machine/vast/h-2", True),
        ("foreign_machines/vast", False),
        ("stray_machine/vast/h-3", False),
    ]
    assert (stray.ended_at is None, foreign.ended_at) == (False, None)
    assert list(findings(api)) == ["foreign_machines/vast"]


def test_a_stray_is_recorded_at_its_provider_beside_a_machine_with_the_same_handle(
    api: Api, vast: AccountProvider
) -> None:
    """Another provider's inventory would prove at once that the machine is gone."""
    store = api.context.fleet
    assert store is not None
    lease = store.acquire("tick", NOW, 60)
    assert lease is not None
    other = OrphanMachine(provider="ssh", handle="h-2", token=token(api, "other"), first_seen_at=NOW, last_seen_at=NOW)
    store.put_orphan(lease, other)
    vast.machines.append(VirtualMachine("h-2", token(api, "lost"), 0.4, NOW, "host"))
    body = {"findings": ["stray_machine/vast/h-2"]}
    assert [one["fixed"] for one in api.post("/fleet-doctor/fix", body).ok()["outcomes"]] == [True]
    (recorded,) = store.machines(STRAYS_TENANT, STRAYS_NAME)
    assert (recorded.id, recorded.provider, recorded.billed) == (token(api, "lost"), "vast", True)


def test_a_stray_that_the_doctor_ends_is_paid_by_the_deployment_and_has_a_receipt(
    api: Api, vast: AccountProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fleet exists: the fix itself lets the ticks follow that prove the absence."""
    from functions.handlers import fleet

    drivers = api.context.drivers
    deploy_controller(api, monkeypatch)
    monkeypatch.setattr(fleet, "drivers", drivers)
    api.context = replace(api.context, drivers=drivers)
    for number in (2, 3):
        vast.machines.append(VirtualMachine(f"h-{number}", token(api, f"lost-{number}"), 0.6, NOW - 1800, "host"))
    vast.now = NOW
    body = {"findings": ["stray_machine/vast/h-2", "stray_machine/vast/h-3"]}
    assert [one["fixed"] for one in api.post("/fleet-doctor/fix", body).ok()["outcomes"]] == [True, True]
    for _ in range(4):
        api.clock.advance(60)
        vast.now = api.clock.now()
        fleet.handler({}, Invocation(55))
    strays = api.get("/fleet-doctor").ok()["strays"]
    assert [(one["state"], one["reason"]) for one in strays] == [("gone", "no record explained the machine")] * 2
    assert all(one["receipt"]["charged_usd"] == pytest.approx(0.3) for one in strays)
    store = api.context.fleet
    assert store is not None and store.fleets() == []
    assert store.spending().spent_usd == pytest.approx(sum(one["spent_usd"] for one in strays)) == pytest.approx(0.62)


def test_a_machine_with_a_record_is_no_stray_until_the_record_has_ended(api: Api, vast: AccountProvider) -> None:
    apply(api)
    vast.machines.append(VirtualMachine("h-1", token(api, "m1"), 0.4, NOW, "host"))
    put_machine(api, make_machine(token(api, "m1"), MachineState.AMBIGUOUS, handle=None, offer=VAST_OFFER))
    assert findings(api) == {}
    gone = make_machine(token(api, "m1"), MachineState.GONE, offer=VAST_OFFER, version=2)
    put_machine(api, gone)
    assert list(findings(api)) == ["stray_machine/vast/h-1"]


def test_a_status_that_the_driver_does_not_know_is_a_finding_that_names_the_machines(
    api: Api, vast: AccountProvider
) -> None:
    apply(api)
    for number in range(3):
        put_machine(api, make_machine(token(api, f"m{number}"), MachineState.BUSY, offer=VAST_OFFER))
        vast.machines.append(VirtualMachine(f"h-{number}", token(api, f"m{number}"), 0.4, NOW, "host"))
    vast.machines[0].unknown_status = vast.machines[2].unknown_status = "'hibernating'"
    (found,) = findings(api).values()
    assert (found["id"], found["fix"]) == ("status_unknown/vast/'hibernating'", "")
    assert found["detail"] == (
        f"vast gives 2 machines the status 'hibernating', which Baton does not know: {token(api, 'm0')}, "
        f"{token(api, 'm2')}; they count as running and are paid: look at the provider, and update Baton"
    )


@pytest.mark.parametrize("part", ["damaged_fleets", "damaged_machines"])
def test_machines_of_a_damaged_record_are_no_strays(api: Api, vast: AccountProvider, part: str) -> None:
    apply(api)
    finish_tick(api)
    vast.machines.append(VirtualMachine("h-1", token(api, "nights-0123456789ab"), 0.4, NOW, "host"))
    vast.machines.append(VirtualMachine("h-2", token(api, "days-0123456789ab"), 0.4, NOW, "host"))
    getattr(api.context.fleet, part).add((TENANT, "nights"))
    found = findings(api)
    assert set(found) == {f"damaged_record/{TENANT}.nights", "stray_machine/vast/h-2"}
    assert found[f"damaged_record/{TENANT}.nights"]["fix"] == ""


def test_leftovers_are_deleted_except_those_of_live_machines(api: Api, vast: AccountProvider) -> None:
    apply(api)
    put_machine(api, make_machine(token(api, "m1"), MachineState.READY, offer=VAST_OFFER))
    disk = Leftover(kind="disk", handle="d-1", token=token(api, "old"), usd_per_hour=0.01)
    used = Leftover(kind="disk", handle="d-2", token=token(api, "m1"))
    vast.machines.append(VirtualMachine("h-9", token(api, "m1"), 0.4, NOW, "host"))
    stopped = Leftover(kind="stopped instance", handle="h-9", token=token(api, "old"))
    vast.report = AccountReport(account="me", leftovers=[disk, used, stopped])
    (found,) = findings(api).values()
    assert (found["id"], found["fix"]) == ("leftover/vast/d-1", "deletes the disk d-1")
    assert "0.01 USD/h" in found["detail"]
    (outcome,) = api.post("/fleet-doctor/fix", {"findings": [found["id"]]}).ok()["outcomes"]
    assert outcome["fixed"] and vast.removed == [disk]


def test_a_machine_that_does_not_end_is_ended_again(api: Api, vast: AccountProvider) -> None:
    apply(api)
    machine = VirtualMachine("h-m1", token(api, "m1"), 0.4, NOW, "host")
    vast.machines.append(machine)
    put_machine(api, make_machine(token(api, "m1"), MachineState.TERMINATING, offer=VAST_OFFER, handle="h-m1"))
    api.clock.advance(599)
    finish_tick(api)
    assert findings(api) == {}
    api.clock.advance(1)
    (found,) = findings(api).values()
    assert found["code"] == "lingering_machine" and "10 minutes" in found["detail"]
    vast.min_interval_s = {"destroy": 3.0}
    vast.refusal = None
    body = {"findings": [found["id"]]}
    vast.faults.ignored_destroys = 1
    assert api.post("/fleet-doctor/fix", body).ok()["outcomes"][0]["fixed"]
    (early,) = api.post("/fleet-doctor/fix", body).ok()["outcomes"]
    assert (early["fixed"], early["later"]) == (False, True)
    api.clock.advance(3)
    assert api.post("/fleet-doctor/fix", body).ok()["outcomes"][0]["fixed"] and machine.ended_at is not None


def test_a_key_that_stopped_working_is_found_beside_the_others(api: Api, vast: AccountProvider) -> None:
    vast.refusal = ProviderRefused(RefusalKind.KEY, "GET /x was answered 401.")
    (found,) = findings(api).values()
    assert found["code"] == "account_refused" and "provider_key_refused" in found["detail"]
    assert "`baton fleet login vast`" in found["detail"] and found["fix"] == ""
    vast.refusal = ProviderUnavailable("GET /x was answered 502")
    (found,) = findings(api).values()
    assert found["code"] == "provider_silent" and "502" in found["detail"]
    vast.refusal = None
    vast.report = AccountReport(account="me", problems=["lacks instance_write", "has team_write"])
    assert [one["detail"] for one in findings(api).values()] == ["lacks instance_write", "has team_write"]
    vast.faults.incomplete = 1
    assert "provider_silent/vast" in findings(api)


def test_a_provider_that_hangs_does_not_hide_the_others(
    api: Api, vast: AccountProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_WITHIN_S", 0.05)
    over = threading.Event()
    monkeypatch.setattr(vast, "examine", lambda prefix: over.wait(5))
    (found,) = findings(api).values()
    over.set()
    assert found["code"] == "provider_silent" and "no answer within" in found["detail"]


def test_a_driver_that_fails_does_not_hide_the_other_providers(api: Api, vast: AccountProvider) -> None:
    ssh = VirtualProvider(name="ssh")
    ssh.machines.append(VirtualMachine("h-2", token(api, "lost"), 0.4, NOW, "host"))
    api.context = replace(api.context, drivers={"vast": vast, "ssh": ssh})
    vast.refusal = KeyError("machines")  # type: ignore[assignment]
    found = findings(api)
    assert list(found) == ["stray_machine/ssh/h-2", "provider_silent/vast"]
    assert "its driver failed with KeyError" in found["provider_silent/vast"]["detail"]


def test_a_fix_in_which_the_driver_fails_does_not_hide_the_other_fixes(
    api: Api, vast: AccountProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    vast.machines += [VirtualMachine(f"h-{at}", token(api, f"lost-{at}"), 0.4, NOW, "host") for at in range(2)]
    destroy = vast.destroy

    def fail_once(handle: str) -> bool:
        if handle == "h-0":
            raise KeyError("success")
        return destroy(handle)

    monkeypatch.setattr(vast, "destroy", fail_once)
    body = {"findings": [f"stray_machine/vast/h-{at}" for at in range(2)]}
    outcomes = api.post("/fleet-doctor/fix", body).ok()["outcomes"]
    assert [one["fixed"] for one in outcomes] == [False, True]
    assert "its driver failed with KeyError" in outcomes[0]["detail"]


def test_a_fix_that_the_provider_refuses_says_so_and_leaves_the_machine_to_the_ticks(
    api: Api, vast: AccountProvider, monkeypatch: Any
) -> None:
    ids = [f"stray_machine/vast/h-{number}" for number in range(3)]
    for number in range(3):
        vast.machines.append(VirtualMachine(f"h-{number}", token(api, f"lost-{number}"), 0.4, NOW, "host"))

    def refuse(handle: str) -> bool:
        raise ProviderUnavailable("429")

    monkeypatch.setattr(vast, "destroy", refuse)
    (outcome,) = api.post("/fleet-doctor/fix", {"findings": ids[:1]}).ok()["outcomes"]
    assert (outcome["fixed"], outcome["detail"]) == (False, "429")
    monkeypatch.setattr(vast, "destroy", lambda handle: False)
    assert not api.post("/fleet-doctor/fix", {"findings": ids[1:2]}).ok()["outcomes"][0]["fixed"]
    monkeypatch.setattr(doctor, "BEGIN_WITHIN_S", 0.0)
    assert api.post("/fleet-doctor/fix", {"findings": ids[2:]}).ok()["outcomes"][0]["later"]
    assert list(findings(api)) == ids[2:]
    assert api.context.fleet is not None
    recorded = api.context.fleet.machines(STRAYS_TENANT, STRAYS_NAME)
    assert [(one.handle, one.state) for one in recorded] == [(f"h-{at}", MachineState.TERMINATING) for at in range(2)]


def test_a_stray_that_a_tick_adopts_at_the_same_moment_is_fixed_by_the_next_call(
    api: Api, vast: AccountProvider, monkeypatch: Any
) -> None:
    vast.machines.append(VirtualMachine("h-2", token(api, "lost"), 0.4, NOW, "host"))

    def conflict(*_: object) -> None:
        raise WriteConflict

    with monkeypatch.context() as patch:
        patch.setattr(api.context.fleet, "update_machine", conflict)
        body = {"findings": ["stray_machine/vast/h-2"]}
        (outcome,) = api.post("/fleet-doctor/fix", body).ok()["outcomes"]
    assert (outcome["fixed"], outcome["later"], vast.machines[0].ended_at) == (False, True, None)
    assert api.post("/fleet-doctor/fix", body).ok()["outcomes"][0]["fixed"]


@pytest.mark.parametrize(
    ("balance", "usd_per_hour", "part"),
    [
        (0.8, 0.4, "lasts 2.0 h at 0.40 USD/h"),
        (0.81, 0.4, ""),
        (0.0, None, "rents nothing"),
        (None, 0.4, ""),
        (9, 0, ""),
    ],
)
def test_a_credit_for_two_hours_is_low(
    api: Api, vast: AccountProvider, balance: float | None, usd_per_hour: float | None, part: str
) -> None:
    apply(api)
    if usd_per_hour is not None:
        machine = make_machine(token(api, "m1"), MachineState.READY, offer=VAST_OFFER, usd_per_hour=usd_per_hour)
        put_machine(api, machine)
    vast.report = AccountReport(account="me", balance_usd=balance)
    found = [one["detail"] for one in findings(api).values()]
    assert (part in found[0]) if part else found == []


def test_a_controller_that_is_late_is_found(api: Api, vast: AccountProvider) -> None:
    api.clock.advance(1000)
    assert findings(api) == {}, "without fleets there is no tick"
    apply(api)
    api.clock.advance(299)
    assert findings(api) == {}
    api.clock.advance(1)
    (found,) = findings(api).values()
    assert found["id"] == "controller_late" and "5 minutes" in found["detail"]
    finish_tick(api)
    assert findings(api) == {}
    api.clock.advance(300)
    assert list(findings(api)) == ["controller_late"]


def test_a_fleet_whose_provider_has_no_account_is_found(api: Api, vast: AccountProvider) -> None:
    apply(api, providers=["vast", "salad"])
    (found,) = findings(api).values()
    assert (found["code"], found["provider"]) == ("account_missing", "salad")
    assert found["detail"] == "salad: no account is stored; run 'baton fleet login salad' (fleets: nights)"
    api.post("/fleets/nights/stop").ok()
    assert findings(api) == {}


def test_a_deployment_without_providers_can_be_examined(api: Api) -> None:
    assert api.get("/fleet-doctor").ok() == {"providers": [], "findings": [], "strays": [], "at": NOW}
