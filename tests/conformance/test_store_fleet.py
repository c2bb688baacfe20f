"""Fleets, machines, money and the controller's fence: every store keeps the same promises."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from functions.domain.errors import WriteConflict
from functions.domain.jobs.transaction import PutFleet
from functions.fleet.clock import ClockAnchor
from functions.fleet.ledger import DeploymentLedger, Ledger
from functions.fleet.records import FleetEvent, Machine, Offer, OrphanMachine, Quarantine, Reputation, StoredFleet
from functions.fleet.store import DamagedRecord, FenceLost, FleetStore
from functions.storage.dynamodb.items import fleet_items
from functions.storage.tables import FLEET
from tests.conformance.store_kit import NOW, TENANT, submission
from tests.kits.clouds.store_sets import Cloud, memory_cloud


def fleet(name: str = "nights", tenant: str = TENANT, **more: Any) -> StoredFleet:
    document = {"name": name, "providers": ["loopback"], "max_usd_per_hour": 0.1 + 0.2, "budget": {"total_usd": 9}}
    spec = FleetSpec.model_validate(document)
    return StoredFleet(**{"tenant": tenant, "spec": spec, "version": 1, "created_at": NOW, "updated_at": NOW, **more})


def machine(token: str = "dep-nights-1", state: State = State.BUSY, version: int = 1, **more: Any) -> Machine:
    values: dict[str, Any] = {
        "id": token,
        "tenant": TENANT,
        "fleet": "nights",
        "version": version,
        "state": state,
        "since": NOW,
        "offer": Offer(provider="loopback", ref="o", machine_ref="h", usd_per_hour=1 / 3),
        "cap_usd_per_hour": 0.5,
        "ends_by": NOW + 9,
        "usd_per_hour": 1e-7 / 3,
        "requested_at": NOW,
        "absences": [NOW, NOW + 60],
    }
    return Machine(**{**values, **more})


def acquired(store: FleetStore) -> int:
    fence = store.acquire("one", NOW, 90)
    assert fence is not None
    return fence


def test_the_deployment_is_made_once_and_the_clock_is_anchored(cloud: Cloud) -> None:
    store = cloud.fleet
    assert len(store.deployment()) == 8 and store.deployment().isalnum() and store.deployment()[0].isalpha()
    assert store.clock_anchor() is None
    for anchor in (ClockAnchor(server=NOW, fleet=NOW, speed=60), ClockAnchor(server=NOW + 9, fleet=NOW + 540)):
        store.put_clock_anchor(anchor)
        assert store.clock_anchor() == anchor
    if cloud.dynamodb is not None:
        again = type(store)(cloud.dynamodb, cloud.prefix)  # type: ignore[call-arg]
        assert again.deployment() == store.deployment()


def test_the_fence_rises_and_excludes_others_until_its_lease_ends(cloud: Cloud) -> None:
    store = cloud.fleet
    first = store.acquire("one", NOW, 90)
    assert first is not None
    assert store.acquire("two", NOW + 89, 90) is None
    second = store.acquire("two", NOW + 90, 90)
    assert second is not None and second > first
    store.release(first)
    assert store.acquire("one", NOW + 91, 90) is None, "an old fence releases nothing"
    repeated = store.acquire("two", NOW + 91, 90)
    assert repeated is not None and repeated > second, "a call repeated after a lost answer"
    store.release(repeated)
    third = store.acquire("one", NOW + 92, 90)
    assert third is not None and third > repeated


def test_the_store_remembers_the_last_finished_tick(cloud: Cloud) -> None:
    store, old = cloud.fleet, acquired(cloud.fleet)
    assert store.last_tick() is None
    store.release(old)
    assert store.last_tick() is None, "a tick whose time was over"
    newer = store.acquire("two", NOW + 91, 90)
    assert newer is not None
    store.release(old, finished_at=NOW + 92)
    assert store.last_tick() is None, "an old fence writes nothing"
    store.release(newer, finished_at=NOW + 93)
    assert store.last_tick() == NOW + 93
    again = store.acquire("two", NOW + 94, 90)
    assert again is not None and store.last_tick() == NOW + 93
    store.release(again)
    assert store.last_tick() == NOW + 93


def test_fleets_are_listed_by_tenant_and_replaced_by_version(cloud: Cloud) -> None:
    store = cloud.fleet
    assert not store.any_fleet()
    for one in (fleet("b"), fleet("a"), fleet("a", tenant="rival")):
        store.put_fleet(one)
    assert store.any_fleet()
    assert store.fleets() == [fleet("a"), fleet("b"), fleet("a", tenant="rival")]
    assert store.fleets("rival") == [fleet("a", tenant="rival")]
    assert store.fleets("riv") == []
    assert store.fleet(TENANT, "c") is None
    for stale in (1, 3):
        with pytest.raises(WriteConflict):
            store.put_fleet(fleet("a", version=stale, stopped=True))
    store.put_fleet(fleet("a", version=2, stopped=True))
    assert store.fleet(TENANT, "a") == fleet("a", version=2, stopped=True)


def test_a_job_and_its_fleet_are_stored_together_or_not_at_all(cloud: Cloud) -> None:
    store = cloud.fleet

    def put(version: int) -> PutFleet:
        return PutFleet(tenant=TENANT, name="nights", version=version, record=fleet(version=version))

    job = submission()
    cloud.jobs.apply(job.also(put(1)))
    assert cloud.jobs.get(job.job.id) == job.job and store.fleet(TENANT, "nights") == fleet()
    for version in (1, 3):
        other = submission()
        with pytest.raises(WriteConflict):
            cloud.jobs.apply(other.also(put(version)))
        assert cloud.jobs.get(other.job.id) is None and store.fleet(TENANT, "nights") == fleet()
    with pytest.raises(WriteConflict):
        cloud.jobs.apply(job.also(put(2)))
    cloud.jobs.apply(submission().also(put(2)))
    assert store.fleets(TENANT) == [fleet(version=2)]


def test_a_retired_fleet_leaves_the_list_and_can_return(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    assert store.spending() == DeploymentLedger()
    store.put_fleet(fleet())
    spending = DeploymentLedger(version=1, spent_usd=0.1 + 0.2, reserved_usd=0.7)
    store.write(fence, TENANT, "nights", spending=spending)
    gone = fleet(version=2, stopped=True, retired=True)
    refused: list[tuple[int, StoredFleet, int, type[Exception]]] = [
        (fence, fleet(version=3), 2, WriteConflict),
        (fence, gone, 3, WriteConflict),
        (fence + 1, gone, 2, FenceLost),
    ]
    for holder, later, version, error in refused:
        with pytest.raises(error):
            store.retire(holder, later, spending.model_copy(update={"version": version}))
    assert (store.fleets(), store.spending()) == ([fleet()], spending)
    store.retire(fence, gone, spending.model_copy(update={"version": 2}))
    assert (store.fleets(), store.fleet(TENANT, "nights"), store.spending().version) == ([], gone, 2)
    assert not store.any_fleet()
    back = fleet(version=3)
    cloud.jobs.apply(submission().also(PutFleet(tenant=TENANT, name="nights", version=3, record=back)))
    assert (store.fleets(), store.fleet(TENANT, "nights")) == ([back], back)


def test_a_machine_its_money_and_its_events_are_written_together_or_not_at_all(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    ledger = Ledger(version=1, spent_usd=0.1 + 0.2, warned=["day 2026-11-25"])
    events = [FleetEvent(at=NOW, type=name, machine="dep-nights-1", usd=1 / 3) for name in ("a", "b")]
    store.write(fence, TENANT, "nights", machine=machine(), ledger=ledger, events=events)
    assert store.machines(TENANT, "nights") == [machine()]
    assert store.machine(TENANT, "nights", "dep-nights-1") == machine()
    assert store.ledger(TENANT, "nights") == ledger
    assert store.events(TENANT, "nights", limit=9) == events[::-1]
    for machine_version, ledger_version in ((1, 2), (3, 2), (2, 1), (2, 3)):
        with pytest.raises(WriteConflict):
            store.write(
                fence,
                TENANT,
                "nights",
                machine=machine(version=machine_version, job_id="j"),
                ledger=Ledger(version=ledger_version),
                events=events,
            )
    assert store.machines(TENANT, "nights") == [machine()]
    assert store.ledger(TENANT, "nights") == ledger
    assert len(store.events(TENANT, "nights", limit=9)) == 2
    assert store.machine("rival", "nights", "dep-nights-1") is None
    assert store.holdings(TENANT, "nights") == (ledger, [machine()])
    assert store.holdings(TENANT, "night") == (Ledger(), [])
    assert store.ledger("rival", "nights") == Ledger()
    assert (store.machines(TENANT, "night"), store.events(TENANT, "night", limit=9)) == ([], [])


def test_a_controller_without_the_fence_writes_nothing(cloud: Cloud) -> None:
    store, old = cloud.fleet, acquired(cloud.fleet)
    assert store.acquire("two", NOW + 90, 90)
    with pytest.raises(FenceLost):
        store.write(old, TENANT, "nights", machine=machine(), ledger=Ledger(version=7))
    orphan = OrphanMachine(provider="loopback", handle="h", token="dep-x", first_seen_at=NOW, last_seen_at=NOW)
    with pytest.raises(FenceLost):
        store.put_orphan(old, orphan)
    assert store.machines(TENANT, "nights") == [] and store.orphans() == {}


def test_a_worker_writes_without_the_fence_and_by_version(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    store.write(fence, TENANT, "nights", machine=machine())
    store.update_machine(machine(version=2, seen_at=NOW + 5))
    told = FleetEvent(at=NOW + 6, type="machine.ready")
    store.update_machine(machine(version=3, state=State.READY), [told])
    for events in ([], [told]):
        with pytest.raises(WriteConflict):
            store.update_machine(machine(version=3), events)
    with pytest.raises(WriteConflict):
        store.write(fence, TENANT, "nights", machine=machine(version=3))
    assert store.machines(TENANT, "nights") == [machine(version=3, state=State.READY)]
    assert store.events(TENANT, "nights", limit=9) == [told]


def test_ended_machines_leave_the_tick_s_list_and_failed_ones_stay_while_watched(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    ends: dict[str, dict[str, Any]] = {
        "gone": {"state": State.GONE, "since": NOW + 3},
        "refused": {"state": State.FAILED, "requested_at": None, "since": NOW + 2},
        "late": {"state": State.FAILED, "since": NOW + 1},
    }
    for token, end in ends.items():
        store.write(fence, TENANT, "nights", machine=machine(token))
        store.write(fence, TENANT, "nights", machine=machine(token, version=2, **end))
    assert [one.id for one in store.machines(TENANT, "nights")] == ["late"]
    assert store.machine(TENANT, "nights", "gone") is None
    store.write(fence, TENANT, "nights", machine=machine("late", version=3, watch_over=True, **ends["late"]))
    assert store.machines(TENANT, "nights") == []
    assert [one.id for one in store.ended(TENANT, "nights", limit=9)] == ["gone", "refused", "late"]
    assert store.ended(TENANT, "nights", limit=1) == [machine("gone", version=2, **ends["gone"])]
    assert [one.id for one in store.ended(TENANT, "nights", limit=9, since=NOW + 2)] == ["gone", "refused"]
    with pytest.raises(WriteConflict):
        store.update_machine(machine("gone", version=3))


def test_a_history_begins_at_a_time_and_numbers_its_events_in_order(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    for at, names in ((NOW, "ab"), (NOW + 5, "c"), (NOW + 9, "de")):
        store.write(fence, TENANT, "nights", events=[FleetEvent(at=at, type=name) for name in names])
    store.write(fence, TENANT, "night", events=[FleetEvent(at=NOW, type="other")])
    found = store.history(TENANT, "nights", since=NOW + 1, limit=9)
    assert [one.type for _, one in found] == ["c", "d", "e"]
    assert [one.type for _, one in store.history(TENANT, "nights", since=0, limit=2)] == ["a", "b"]
    numbers = [number for number, _ in store.history(TENANT, "nights", since=0, limit=9)]
    assert numbers == sorted(set(numbers)) and numbers[2:] == [number for number, _ in found]
    assert store.history("rival", "nights", since=0, limit=9) == []


def test_the_newest_events_come_first(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    for at, name in ((NOW, "a"), (NOW + 1, "b"), (NOW, "c")):
        store.write(fence, TENANT, "nights", events=[FleetEvent(at=at, type=name)])
    assert {one.type for one in store.events(TENANT, "nights", limit=9)} == {"a", "b", "c"}
    assert store.events(TENANT, "nights", limit=1) == [FleetEvent(at=NOW + 1, type="b")]


def test_all_watched_machines_are_listed_however_many_there_are(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    reason = "x" * 20_000
    for number in range(60):
        store.write(fence, TENANT, "nights", machine=machine(f"dep-{number:03d}", reason=reason))
    assert [one.id for one in store.machines(TENANT, "nights")] == [f"dep-{number:03d}" for number in range(60)]


def test_calls_of_a_provider_keep_their_interval(cloud: Cloud) -> None:
    store = cloud.fleet
    assert store.allow("vast", "create", NOW, 2.5)
    assert not store.allow("vast", "create", NOW + 2, 2.5)
    assert store.allow("vast", "destroy", NOW + 2, 2.5) and store.allow("salad", "create", NOW + 2, 2.5)
    assert store.allow("vast", "create", NOW + 3, 2.5)
    assert not store.allow("vast", "create", NOW + 4, 2.5)


def test_quarantines_and_orphans_are_replaced(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    for until, failures in ((NOW + 5, 1), (NOW + 9, 2)):
        store.put_quarantine(Quarantine(host="vast:7", until=until, failures=failures, reason="no boot"))
    assert store.quarantined(NOW + 8) == {
        "vast:7": Quarantine(host="vast:7", until=NOW + 9, failures=2, reason="no boot")
    }
    assert store.quarantined(NOW + 9) == {} and set(store.quarantined(0)) == {"vast:7"}
    orphan = OrphanMachine(provider="vast", handle="7", token="dep-x", first_seen_at=NOW, last_seen_at=NOW)
    for found in (orphan, orphan.model_copy(update={"last_seen_at": NOW + 1})):
        store.put_orphan(fence, found)
        assert store.orphans() == {("vast", "7"): found}
    other = orphan.model_copy(update={"provider": "ssh"})
    store.put_orphan(fence, other)
    assert store.orphans() == {("vast", "7"): found, ("ssh", "7"): other}, "handles of two providers may be equal"


@pytest.mark.emulator
def test_a_record_that_cannot_be_read_is_named(ministack: Cloud) -> None:
    store, fence = ministack.fleet, acquired(ministack.fleet)
    for name in ("nights", "other"):
        store.put_fleet(fleet(name))
    store.write(fence, TENANT, "nights", machine=machine())
    for key in (fleet_items.fleet_key(TENANT, "other"), fleet_items.live_key(TENANT, "nights", machine().id)):
        ministack.dynamodb.put_item(
            TableName=FLEET.name(ministack.prefix), Item={**key, "doc": {"S": '{"secret": 1}'}, "version": {"N": "1"}}
        )
    damaged: list[DamagedRecord] = []
    assert (
        [one.spec.name for one in store.fleets(damaged=damaged)]
        == ["nights"]
        == [one.spec.name for one in store.fleets(TENANT)]
    )
    assert [(one.tenant, one.fleet) for one in damaged] == [(TENANT, "other")]
    for read in (store.machines, store.holdings):
        with pytest.raises(DamagedRecord, match="fleet nights") as caught:
            read(TENANT, "nights")
        assert "secret" not in str(caught.value)
    with pytest.raises(DamagedRecord, match="fleet other"):
        store.fleet(TENANT, "other")


def test_histories_are_replaced_by_the_holder_of_the_fence(cloud: Cloud) -> None:
    store, fence = cloud.fleet, acquired(cloud.fleet)
    for starts in (1, 2):
        store.put_reputation(fence, Reputation(kind="vast:RTX 4090", starts=starts, hours=1 / 3))
    assert store.reputations() == {"vast:RTX 4090": Reputation(kind="vast:RTX 4090", starts=2, hours=1 / 3)}
    with pytest.raises(FenceLost):
        store.put_reputation(fence - 1, Reputation(kind="vast:A100"))
    assert len(store.reputations()) == 1


def random_life(store: FleetStore, seed: int) -> list[object]:
    """Run a random life of two fleets; return every outcome and everything that the store answers at the end."""
    log: list[object] = []
    draw, now = random.Random(seed), NOW
    versions: dict[str, int] = {}
    tokens = ["m1", "m2"]
    fences: list[int] = [-1]

    def version(name: str) -> int:
        """Return the next version, or a wrong one."""
        return max(1, versions.get(name, 0) + draw.choice([1, 1, 1, 1, 0, 2]))

    def acquire() -> object:
        fence = store.acquire(draw.choice("ab"), now, 30)
        fences.extend([] if fence is None else [fence])
        return fence

    def write() -> object:
        token = draw.choice(tokens[-3:])
        name = "nights" if token in ("m1", "m4") else "days"
        state = draw.choice([State.BUSY, State.READY, State.GONE, State.FAILED])
        over = draw.random() < 0.5
        stored = machine(token, state, version(token), fleet=name, since=now, watch_over=over)
        ledger = draw.choice([None, Ledger(version=version(name))])
        told = draw.choice([[], [FleetEvent(at=now, type="t", machine=token)]])
        if draw.random() < 0.3:
            store.update_machine(stored, told)
            ledger = None
        else:
            store.write(draw.choice(fences[-2:]), TENANT, name, machine=stored, ledger=ledger, events=told)
        # No token is given to a second machine, therefore an ended machine is never written at version 1.
        versions[token] = stored.version + (not stored.watched)
        tokens.extend([] if stored.watched else [f"m{len(tokens) + 1}"])
        versions[name] = versions.get(name, 0) if ledger is None else ledger.version
        return None

    acts: list[Callable[[], object]] = [acquire, write, write, write, write]
    acts.append(lambda: store.release(draw.choice(fences)))
    acts.append(lambda: store.allow("p", draw.choice("xy"), now, 20))
    for _ in range(250):
        now += draw.choice([1, 1, 1, 20])
        try:
            log.append(draw.choice(acts)())
        except (FenceLost, WriteConflict) as refused:
            log.append(type(refused))
    for name in ("nights", "days"):
        log += [store.machines(TENANT, name), store.ended(TENANT, name, limit=99), store.holdings(TENANT, name)]
        log.append(store.events(TENANT, name, limit=99))
    return log


@pytest.mark.emulator
@pytest.mark.parametrize("seed", range(2))
def test_the_twin_and_the_emulated_cloud_live_the_same_life(ministack: Cloud, seed: int) -> None:
    assert random_life(ministack.fleet, seed) == random_life(memory_cloud().fleet, seed)
