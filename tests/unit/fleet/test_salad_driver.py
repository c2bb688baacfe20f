"""Test Salad's driver against the fake: its requests, its verdict on each answer, and what a machine costs when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetSpec
from fakes.salad.api import GTX_1060, MOST_GROUPS, RTX_3090, RTX_4090, FakeSalad
from fakes.server import FaultKind
from functions.fleet.drivers.protocol import (
    Ambiguous,
    Created,
    CreateIntent,
    CreateResult,
    NotCreated,
    ProviderRefused,
    ProviderUnavailable,
    RefusalKind,
)
from functions.fleet.drivers.salad.driver import SaladDriver
from functions.fleet.records import Sighting
from tests.conformance.drivers.driven_salad import SaladDriven, salad_account
from tests.kits.clock import Clock

TOKEN = "dep10000-nights-1"
GROUPS = "/api/public/organizations/acme/projects/training/containers"
ENVIRONMENT = {"BATON_API_URL": "http://control.plane", "BATON_ENROLMENT_TOKEN": "baton_enrolment_verysecret"}


def spec(**changes: Any) -> FleetSpec:
    document = {
        "name": "nights",
        "providers": ["salad"],
        "image": "me/trainer:1",
        "max_usd_per_hour": 0.3,
        "min_vram_gib": 20,
        "disk_gib": 50,
        "budget": {"total_usd": 10},
        **changes,
    }
    return FleetSpec.model_validate(document)


@pytest.fixture
def clock() -> Clock:
    return Clock(1_700_000_000)


@pytest.fixture
def fake(clock: Clock) -> Iterator[FakeSalad]:
    with FakeSalad(clock) as fake:
        yield fake


@pytest.fixture
def driver(fake: FakeSalad, clock: Clock) -> SaladDriver:
    return SaladDriver(salad_account(fake), now=clock)


def create(driver: SaladDriver, token: str = TOKEN, **changes: Any) -> CreateResult:
    offer = driver.quote(changes.pop("spec", spec()))[0]
    intent = {"token": token, "offer": offer, "image": "me/trainer:1", "disk_gib": 50, "environment": ENVIRONMENT}
    return driver.create(CreateIntent(**{**intent, "max_usd_per_hour": 1, **changes}))


def sighting(driver: SaladDriver, clock: Clock) -> Sighting:
    (seen,) = driver.inventory("dep10000-", int(clock())).sightings
    return seen


def posted(fake: FakeSalad, path: str = GROUPS) -> list[Any]:
    return [one.json() for one in fake.calls if (one.method, one.path) == ("POST", path)]


def test_each_class_is_an_offer_at_the_price_of_the_accounts_priority(fake: FakeSalad, driver: SaladDriver) -> None:
    offers = driver.quote(spec())
    assert [(one.gpu_model, one.vram_gib, one.usd_per_hour) for one in offers] == [
        ("RTX 3090", 24, 0.15),
        ("RTX 4090", 24, 0.25),
        ("GTX 1060", 6, 0.06),
    ]
    assert all(one.repeatable and not one.spot and one.machine_ref is None and one.disk_gib == 250 for one in offers)
    # Free nodes matter for the offers that suit the document alone.
    asked = posted(fake, "/api/public/organizations/acme/availability/sce-gpu-availability")
    assert [one["gpu_classes"] for one in asked] == [[RTX_3090], [RTX_4090]]
    assert asked[0]["storage_amount"] == 50 * 2**30


def test_a_class_without_free_nodes_is_not_offered(fake: FakeSalad, driver: SaladDriver) -> None:
    del fake.cloud.classes[GTX_1060]
    assert isinstance(create(driver), Created)
    fake.cloud.allocate_s = 0
    for kind, nodes in ((RTX_3090, 0), (RTX_4090, 1)):
        fake.cloud.classes[kind].nodes = nodes
    assert [one.gpu_model for one in driver.quote(spec())] == ["RTX 4090"]


def test_the_create_asks_for_one_replica_with_two_variables(fake: FakeSalad, driver: SaladDriver) -> None:
    assert create(driver, spec=spec(regions=["DE", "us-east-1", "at"])) == Created(handle=TOKEN)
    assert posted(fake) == [
        {
            "name": TOKEN,
            "display_name": TOKEN,
            "replicas": 1,
            "restart_policy": "always",
            "autostart_policy": True,
            "country_codes": ["de", "at"],
            "container": {
                "image": "me/trainer:1",
                "priority": "high",
                "resources": {
                    "cpu": 4,
                    "memory": 16_384,
                    "gpu_classes": [RTX_3090],
                    "shm_size": 8_192,
                    "storage_amount": 50 * 2**30,
                },
                "environment_variables": ENVIRONMENT,
            },
        }
    ]


def test_only_a_running_machine_costs_money(fake: FakeSalad, driver: SaladDriver, clock: Clock) -> None:
    create(driver)
    said = []
    for _ in range(4):
        seen = sighting(driver, clock)
        assert seen.running and seen.usd_per_hour == 0
        said.append(seen.message)
        clock.advance(110)
    assert said == ["allocating", "downloading the image, 27 %", "downloading the image, 63 %", "creating"]
    seen = sighting(driver, clock)
    assert (seen.message, seen.usd_per_hour, seen.machine_ref) == (
        "running",
        0.15,
        fake.environment(TOKEN)["SALAD_MACHINE_ID"],
    )
    clock.advance(3600 - 100)
    assert fake.usd() == pytest.approx(0.15)
    assert driver.destroy(TOKEN)
    # The container stops for a while, unbilled; until then the group is listed.
    assert (fake.billing(), sighting(driver, clock).usd_per_hour) == ([], 0)
    clock.advance(30)
    assert driver.inventory("dep10000-", 0).sightings == []
    assert (fake.usd(), driver.charged_usd(TOKEN)) == (pytest.approx(0.15), None)


def test_a_lost_node_is_another_host_for_the_same_machine(fake: FakeSalad, driver: SaladDriver, clock: Clock) -> None:
    create(driver)
    clock.advance(400)
    before = sighting(driver, clock)
    group = fake.group(TOKEN)
    fake.cloud.lose_node(group, group.instances[0])
    waiting = sighting(driver, clock)
    assert (waiting.running, waiting.usd_per_hour, waiting.message) == (True, 0, "allocating")
    clock.advance(400)
    after = sighting(driver, clock)
    assert after.usd_per_hour == 0.15 and after.machine_ref not in (None, before.machine_ref)
    assert fake.environment(TOKEN)["BATON_ENROLMENT_TOKEN"] == ENVIRONMENT["BATON_ENROLMENT_TOKEN"]


def test_a_machine_is_moved_away_from_the_named_host_alone(fake: FakeSalad, driver: SaladDriver, clock: Clock) -> None:
    create(driver)
    clock.advance(400)
    host = fake.environment(TOKEN)["SALAD_MACHINE_ID"]
    driver.reallocate(TOKEN, host)
    moved = fake.group(TOKEN).instances[0]
    assert (moved.state, moved.machine_id != host) == ("allocating", True)
    asked = [one for one in fake.calls if one.path.endswith("/reallocate")]
    assert [(one.method, one.raw) for one in asked] == [("POST", b"")]
    # The machine has left the host, and then its group has ended: nothing is asked for.
    driver.reallocate(TOKEN, host)
    driver.reallocate("dep10000-nights-gone", host)
    assert len([one for one in fake.calls if one.path.endswith("/reallocate")]) == 1


@pytest.mark.parametrize("fault", ["429", "500", "lost", "reset", "401"])
def test_a_move_that_salad_did_not_confirm_is_told(
    fake: FakeSalad, driver: SaladDriver, clock: Clock, fault: FaultKind
) -> None:
    create(driver)
    clock.advance(400)
    host = fake.environment(TOKEN)["SALAD_MACHINE_ID"]
    fake.inject(fault, f"POST {GROUPS}/{TOKEN}/instances/")
    with pytest.raises(ProviderRefused if fault == "401" else ProviderUnavailable):
        driver.reallocate(TOKEN, host)


def test_the_host_of_a_machine_that_moved_soon_is_the_new_one(
    fake: FakeSalad, driver: SaladDriver, clock: Clock
) -> None:
    create(driver)
    clock.advance(400)
    before = sighting(driver, clock).machine_ref
    fake.cloud.allocate_s = fake.cloud.download_s = 60
    driver.reallocate(TOKEN, str(before))
    for _ in range(3):
        clock.advance(60)
        after = sighting(driver, clock)
    assert (after.message, after.machine_ref) == ("running", fake.environment(TOKEN)["SALAD_MACHINE_ID"])


def test_a_container_that_crashes_at_its_start_costs_nothing(
    fake: FakeSalad, driver: SaladDriver, clock: Clock
) -> None:
    fake.cloud.crashing_images = {"me/trainer:1"}
    create(driver)
    hosts = set()
    for _ in range(10):
        clock.advance(200)
        hosts.add(sighting(driver, clock).machine_ref)
    assert len(hosts) >= 4 and len(fake.group(TOKEN).blocked) >= 4
    assert (fake.usd(), fake.billing()) == (0, [])


def test_a_group_that_was_stopped_has_ended(fake: FakeSalad, driver: SaladDriver, clock: Clock) -> None:
    create(driver)
    fake.cloud.stop(fake.group(TOKEN))
    assert (sighting(driver, clock).running, sighting(driver, clock).message) == (
        False,
        "the container group is stopped",
    )


def test_the_same_group_is_adopted_and_another_one_refused(fake: FakeSalad, driver: SaladDriver) -> None:
    assert create(driver) == create(driver) == Created(handle=TOKEN)
    for change, place in (
        ({"image": "me/trainer:2"}, "container.image"),
        ({"disk_gib": 60}, "container.resources.storage_amount"),
        ({"environment": {**ENVIRONMENT, "BATON_ENROLMENT_TOKEN": "other"}}, "container.environment_variables"),
        ({"environment": {"BATON_API_URL": "http://control.plane"}}, "container.environment_variables"),
    ):
        result = create(driver, **change)
        assert isinstance(result, NotCreated) and f"differs in {place}:" in result.reason and result.handle is None
    assert len(fake.cloud.groups) == 1 and fake.group(TOKEN).container["image"] == "me/trainer:1"


def test_a_group_that_cannot_be_compared_is_ambiguous(fake: FakeSalad, driver: SaladDriver) -> None:
    create(driver)
    fake.inject("500", f"GET {GROUPS}/", count=2)
    assert isinstance(create(driver), Ambiguous)


def refused_by_key(fake: FakeSalad) -> None:
    fake.inject("401", f"POST {GROUPS}")


def throttled(fake: FakeSalad) -> None:
    fake.inject("429", f"POST {GROUPS}")


def without_quota(fake: FakeSalad) -> None:
    fake.cloud.replicas_quota = 0


def without_credit(fake: FakeSalad) -> None:
    fake.has_credit = False


def without_class(fake: FakeSalad) -> None:
    fake.withdrawn_classes = 1


@pytest.mark.parametrize(
    ("refuse", "kind", "remedy"),
    [
        (refused_by_key, RefusalKind.KEY, "baton fleet login salad"),
        (throttled, RefusalKind.QUOTA, "the next tick"),
        (without_quota, RefusalKind.QUOTA, "page of quotas"),
        (without_credit, RefusalKind.CREDIT, "page of billing"),
        (without_class, None, "next offer"),
    ],
)
def test_a_refusal_names_its_kind_and_remedy(
    fake: FakeSalad, driver: SaladDriver, refuse: Any, kind: RefusalKind | None, remedy: str
) -> None:
    driver.quote(spec())
    refuse(fake)
    result = create(driver)
    assert isinstance(result, NotCreated) and (result.kind, result.handle) == (kind, None)
    assert remedy in result.reason.lower().replace("the next offer", "next offer")
    assert fake.cloud.groups == {}


@pytest.mark.parametrize("image", ["", "a" * 2049, "two\nlines"])
def test_an_impossible_image_is_the_images_fault(fake: FakeSalad, driver: SaladDriver, image: str) -> None:
    result = create(driver, image=image)
    assert isinstance(result, NotCreated) and result.kind is RefusalKind.IMAGE


@pytest.mark.parametrize("value", ["", "a" * 1001, "two\nlines"])
def test_a_variable_that_salad_would_refuse_is_not_sent(fake: FakeSalad, driver: SaladDriver, value: str) -> None:
    result = create(driver, environment={**ENVIRONMENT, "BATON_API_URL": value})
    assert isinstance(result, NotCreated) and result.kind is RefusalKind.INVALID and "BATON_API_URL" in result.reason
    assert posted(fake) == []


@pytest.mark.parametrize(
    ("fault", "exists"),
    [("lost", 1), ("truncated", 1), ("html", 1), ("slow", 1), ("reset", 0), ("500", 0)],
)
def test_an_answer_that_proves_nothing_is_ambiguous(
    fake: FakeSalad, driver: SaladDriver, clock: Clock, fault: FaultKind, exists: int
) -> None:
    fake.inject(fault, f"POST {GROUPS}")
    impatient = SaladDriver(salad_account(fake), now=clock, timeout_s=1)
    assert isinstance(create(impatient if fault == "slow" else driver), Ambiguous)
    assert len(posted(fake)) == 1
    assert len(driver.inventory("dep10000-", int(clock())).of(TOKEN)) == exists


def test_hosts_that_cannot_be_read_do_not_hide_machines(fake: FakeSalad, driver: SaladDriver, clock: Clock) -> None:
    create(driver)
    create(driver, "dep10000-nights-2")
    clock.advance(400)
    fake.throttled_instances = 2
    found = driver.inventory("dep10000-", int(clock()))
    assert found.complete and [one.usd_per_hour for one in found.sightings] == [0.15, 0.15]
    assert [one.machine_ref for one in found.sightings] == [None, None]
    # The provider throttles: the driver does not go on to ask.
    assert fake.throttled_instances == 1


def test_the_nodes_of_running_machines_are_asked_for_every_five_minutes(
    fake: FakeSalad, driver: SaladDriver, clock: Clock
) -> None:
    create(driver)
    clock.advance(400)
    hosts = {sighting(driver, clock).machine_ref for _ in range(5)}
    asked = [one for one in fake.calls if one.path.endswith("/instances")]
    assert (len(hosts), len(asked)) == (1, 1)
    clock.advance(300)
    sighting(driver, clock)
    assert len([one for one in fake.calls if one.path.endswith("/instances")]) == 2


def test_a_group_of_others_that_cannot_be_read_hides_none_of_ours(
    fake: FakeSalad, driver: SaladDriver, clock: Clock
) -> None:
    create(driver)
    for entry, complete in ({"name": "somebody-elses"}, True), ({"name": "dep10000-x"}, False), ("?", False):
        fake.unreadable_groups = [entry]
        found = driver.inventory("dep10000-", int(clock()))
        assert (found.complete, [one.token for one in found.sightings]) == (complete, [TOKEN])


def test_a_project_with_more_groups_than_one_list_proves_no_absence(
    fake: FakeSalad, driver: SaladDriver, clock: Clock
) -> None:
    create(driver)
    for number in range(MOST_GROUPS):
        fake.cloud.create({**fake.group(TOKEN).body, "name": f"other-{number}", "replicas": 0})
    assert not driver.inventory("dep10000-", int(clock())).complete
    report = driver.examine("dep10000-")
    assert "a project of its own" in report.problems[0] and len(report.foreign) == MOST_GROUPS - 1


def test_the_list_stays_complete_because_no_create_fills_the_project(
    fake: FakeSalad, driver: SaladDriver, clock: Clock
) -> None:
    """With one group more the list could lack a machine: no absence would be proved, and a stray would be billed."""
    create(driver)
    fake.cloud.replicas_quota = 2 * MOST_GROUPS
    for number in range(MOST_GROUPS - 3):
        fake.cloud.create({**fake.group(TOKEN).body, "name": f"other-{number}", "replicas": 0})
    driver.inventory("dep10000-", int(clock()))
    assert isinstance(create(driver, "dep10000-nights-2"), Created)
    sent = len(posted(fake))
    for made in (driver, SaladDriver(driver.account, now=clock)):
        refused = create(made, "dep10000-nights-3")
        assert isinstance(refused, NotCreated) and refused.kind is RefusalKind.QUOTA
        assert "delete groups that Baton did not make" in refused.reason
    assert len(posted(fake)) == sent
    assert driver.inventory("dep10000-", int(clock())).complete
    fake.cloud.delete(fake.group("other-0"))
    clock.advance(60)
    assert isinstance(create(driver, "dep10000-nights-3"), Created), "without a list in between"


def test_the_account_is_examined_without_a_change(fake: FakeSalad, driver: SaladDriver, clock: Clock) -> None:
    create(driver)
    create(driver, "somebody-elses")
    fake.cloud.replicas_quota = 2
    report = driver.examine("dep10000-")
    assert (report.account, [one.token for one in report.foreign]) == ("acme/training", ["somebody-elses"])
    assert report.problems[0].startswith("provider_quota_reached: all 2 replicas")
    assert sighting(driver, clock).token == TOKEN
    assert {one.method for one in fake.calls if one.path.startswith(GROUPS)} == {"GET", "POST"}
    assert len(posted(fake)) == 2


def test_an_unknown_project_is_refused_with_its_remedy(fake: FakeSalad, clock: Clock) -> None:
    account = salad_account(fake).model_copy(update={"project": "no-such"})
    driver = SaladDriver(account, now=clock)
    with pytest.raises(ProviderRefused, match="organization or the project does not exist"):
        driver.examine("dep10000-")
    result = create(driver)
    assert isinstance(result, NotCreated) and result.kind is RefusalKind.INVALID
    assert driver.destroy(TOKEN)


def test_a_destroy_without_an_answer_is_tried_again_later(fake: FakeSalad, driver: SaladDriver) -> None:
    create(driver)
    for fault in ("500", "429", "lost"):
        fake.inject(fault, f"DELETE {GROUPS}")  # type: ignore[arg-type]
        with pytest.raises(ProviderUnavailable):
            driver.destroy(TOKEN)
    fake.inject("401", f"DELETE {GROUPS}")
    with pytest.raises(ProviderRefused):
        driver.destroy(TOKEN)
    assert driver.destroy(TOKEN)
    assert fake.cloud.groups.get(TOKEN) is None or fake.group(TOKEN).deleted


def test_the_output_of_a_machine_has_the_events_of_its_nodes(
    fake: FakeSalad, driver: SaladDriver, clock: Clock
) -> None:
    """A container that never runs prints nothing, and its events name the cause."""
    create(driver)
    first = fake.group(TOKEN).instances[0].machine_id
    clock.advance(fake.cloud.allocate_s + fake.cloud.download_s)
    assert driver.logs(TOKEN) == "\n".join(
        f"[salad] Instance {name}, node {first}" for name in ("Allocated", "Downloading", "Creating")
    )
    clock.advance(fake.cloud.create_s)
    fake.write_log(TOKEN, "no CUDA device")
    clock.advance(1)
    fake.cloud.exit(fake.group(TOKEN), fake.group(TOKEN).instances[0], 137)
    found = (driver.logs(TOKEN) or "").splitlines()
    assert found[3:] == [
        f"[salad] Instance Running, node {first}",
        "no CUDA device",
        f"[salad] Instance Exited: 137, node {first}",
    ]


def test_the_last_lines_of_a_container_come_in_their_order(fake: FakeSalad, driver: SaladDriver, clock: Clock) -> None:
    create(driver)
    create(driver, "dep10000-nights-2")
    assert driver.logs(TOKEN) is None
    for number in range(120):
        fake.write_log(TOKEN, f"step {number}")
        clock.advance(1)
    fake.write_log("dep10000-nights-2", "another machine")
    found = [line for line in (driver.logs(TOKEN) or "").splitlines() if not line.startswith("[salad]")]
    assert found == [f"step {number}" for number in range(20, 120)]


@pytest.mark.parametrize("price", ["NaN", "-1", "1e9", ""])
def test_a_class_with_an_impossible_price_is_not_sold(fake: FakeSalad, driver: SaladDriver, price: str) -> None:
    fake.cloud.classes[RTX_3090].prices["high"] = price
    assert [one.gpu_model for one in driver.quote(spec())] == ["RTX 4090", "GTX 1060"]


def test_the_driven_provider_of_the_conformance_suite_bills_what_runs(tmp_path: Path) -> None:
    driven = SaladDriven(tmp_path)
    create(driven.driver)
    driven.advance(3600)
    assert driven.fake.usd() == pytest.approx(0.15)
    driven.close()
