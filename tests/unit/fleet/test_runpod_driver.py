"""RunPod's driver over the fake of RunPod: refusals, lost answers, money, and what the account report shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.providers import RunpodAccount
from functions.fleet.drivers.protocol import (
    Ambiguous,
    Created,
    CreateIntent,
    NotCreated,
    ProviderRefused,
    ProviderUnavailable,
    RefusalKind,
)
from functions.fleet.drivers.runpod import DISK_USD_PER_GB_HOUR, RunpodDriver
from functions.fleet.offers.offer_ranking import rejection
from functions.fleet.records import Offer
from tests.conformance.drivers.driven_runpod import RunpodDriven, runpod_account
from tests.conformance.drivers.driver_kit import ENVIRONMENT, IMAGE, PREFIX, SPEC, create, inventory

TOKEN = f"{PREFIX}nights-1"
RTX = "NVIDIA GeForce RTX 4090"


@pytest.fixture
def runpod(tmp_path: Path) -> Iterator[RunpodDriven]:
    driven = RunpodDriven(tmp_path)
    yield driven
    driven.close()


def intent(offer: Offer, **changes: object) -> CreateIntent:
    found = CreateIntent(
        token=TOKEN, offer=offer, image=IMAGE, disk_gib=40, environment=ENVIRONMENT, max_usd_per_hour=1
    )
    return replace(found, **changes)  # type: ignore[arg-type] - each test changes one field


def offers(runpod: RunpodDriven, spec: FleetSpec = SPEC, cloud: str = "SECURE") -> dict[str, Offer]:
    account = runpod_account(runpod.fake).model_copy(update={"cloud": cloud})
    return {one.ref: one for one in RunpodDriver(account, now=runpod.clock).quote(spec)}


def test_offers_are_gpus_with_stock_in_a_data_center_at_the_price_of_gpu_and_disk(runpod: RunpodDriven) -> None:
    found = offers(runpod, SPEC.model_copy(update={"disk_gib": 100}))
    assert set(found) == {f"{RTX}@US-KS-2", f"{RTX}@EU-RO-1", "NVIDIA A40@CA-MTL-1"}
    one = found[f"{RTX}@EU-RO-1"]
    assert (one.gpu_model, one.vram_gib, one.spot, one.machine_ref) == (RTX, 24, False, None)
    # 100 GiB are 108 GB.
    assert one.usd_per_hour == pytest.approx(0.69 + 108 * DISK_USD_PER_GB_HOUR) and one.disk_gib == 100
    assert set(offers(runpod, cloud="COMMUNITY")) == {f"{RTX}@US-KS-2", f"{RTX}@EU-RO-1"}


@pytest.mark.parametrize(("region", "ref"), [("RO", "EU-RO-1"), ("us", "US-KS-2"), ("ca-mtl-1", "CA-MTL-1")])
def test_regions_of_a_fleet_are_countries_and_data_centers(runpod: RunpodDriven, region: str, ref: str) -> None:
    spec = SPEC.model_copy(update={"regions": [region]})
    assert [one.partition("@")[2] for one, offer in offers(runpod).items() if not rejection(offer, spec, ())] == [ref]


def test_a_gpu_whose_place_the_provider_hides_is_placed_by_the_provider(runpod: RunpodDriven) -> None:
    runpod.fake.hides_places = True
    offer = offers(runpod)[f"{RTX}@"]
    assert isinstance(runpod.driver.create(intent(offer)), Created) and offer.regions == []


def test_a_pod_gets_the_intent_and_nothing_else(runpod: RunpodDriven) -> None:
    created = runpod.driver.create(intent(offers(runpod)[f"{RTX}@US-KS-2"]))
    assert isinstance(created, Created)
    assert runpod.fake.calls[-1].json() == {
        "name": TOKEN,
        "image": IMAGE,
        "gpu": {"id": RTX, "count": 1},
        "cloud": "SECURE",
        "disk": 43,
        "env": dict(ENVIRONMENT),
        "dataCenterIds": ["US-KS-2"],
    }
    runpod.driver.create(intent(offers(runpod)[f"{RTX}@US-KS-2"], token=f"{TOKEN}2", port=47100))
    assert runpod.fake.calls[-1].json()["ports"] == ["47100/tcp"]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("snatched", None),
        ("read-only key", RefusalKind.PERMISSION),
        ("pool", None),
        ("no credit", RefusalKind.CREDIT),
        ("401", RefusalKind.KEY),
        ("429", RefusalKind.QUOTA),
        ("unknown gpu", None),
        ("field", RefusalKind.INVALID),
    ],
)
def test_a_certain_refusal_makes_no_pod_and_names_its_kind(
    runpod: RunpodDriven, cause: str, kind: RefusalKind | None
) -> None:
    offer = offers(runpod)[f"{RTX}@US-KS-2"]
    wanted = intent(offer)
    match cause:
        case "snatched":
            runpod.inject("snatched")
        case "read-only key":
            runpod.fake.scopes = {"billing"}
        case "pool":
            runpod.fake.closed_gpus = {RTX}
        case "no credit":
            runpod.fake.credit_usd = 0.1
        case "401" | "429":
            runpod.fake.inject("401" if cause == "401" else "429", "POST")
        case "unknown gpu":
            wanted = intent(offer.model_copy(update={"ref": "NVIDIA Q1@US-KS-2"}))
        case "field":
            wanted = intent(offer, environment={"PORT": 1})
    result = runpod.driver.create(wanted)
    assert isinstance(result, NotCreated) and (result.kind, result.handle) == (kind, None), result
    assert ("provider_permission_missing" in result.reason) == (cause == "pool"), "the tick adds the code of a kind"
    assert (runpod.existing(), runpod.fake.meter.usd()) == ([], 0)
    assert runpod.fake.key not in result.reason and "\n" not in result.reason


@pytest.mark.parametrize(("fault", "kind"), [("500", None), ("401", RefusalKind.KEY), ("gone", None)])
def test_nothing_is_created_without_the_price_of_the_moment(
    runpod: RunpodDriven, fault: str, kind: RefusalKind | None
) -> None:
    offer = offers(runpod)[f"{RTX}@US-KS-2"]
    if fault == "gone":
        runpod.fake.gpus[0].stock["US-KS-2"] = "NONE"
    else:
        runpod.fake.inject(fault, "GET", count=2)  # type: ignore[arg-type] - a row of the table
    result = runpod.driver.create(intent(offer))
    assert isinstance(result, NotCreated) and result.kind is kind
    assert "POST" not in [one.method for one in runpod.fake.calls]


@pytest.mark.parametrize("fault", ["lost", "reset", "slow", "500", "html", "truncated"])
def test_a_create_without_a_usable_answer_is_sent_once_and_ambiguous(runpod: RunpodDriven, fault: str) -> None:
    offer = offers(runpod)[f"{RTX}@US-KS-2"]
    driver = RunpodDriver(runpod_account(runpod.fake), now=runpod.clock, timeout_s=1 if fault == "slow" else 5)
    runpod.fake.inject(fault, "POST")  # type: ignore[arg-type] - a row of the table
    assert isinstance(driver.create(intent(offer)), Ambiguous)
    assert [one.method for one in runpod.fake.calls].count("POST") == 1
    effect = [] if fault in ("reset", "500") else [TOKEN]
    assert [one.token for one in inventory(runpod).sightings] == runpod.existing() == effect


def test_a_provider_that_cannot_be_reached_made_nothing() -> None:
    account = RunpodAccount.model_validate({"api_key": "k", "address": "http://127.0.0.1:9/v2"})
    driver = RunpodDriver(account, now=lambda: 0.0)
    assert isinstance(driver.create(intent(Offer(provider="runpod", ref=f"{RTX}@", usd_per_hour=1))), NotCreated)
    with pytest.raises(ProviderUnavailable):
        driver.destroy("pod1")


def test_a_pod_whose_answer_was_lost_is_found_by_its_name_and_costs_no_more_than_its_life(runpod: RunpodDriven) -> None:
    runpod.inject("lost_answers")
    create(runpod)
    runpod.advance(600)
    (seen,) = inventory(runpod).of(TOKEN)
    assert seen.usd_per_hour and runpod.fake.meter.billing() == [seen.handle]
    assert runpod.driver.destroy(seen.handle)
    runpod.advance(3600)
    assert runpod.fake.meter.usd() == pytest.approx(seen.usd_per_hour / 6)
    assert runpod.driver.charged_usd(seen.handle) == pytest.approx(runpod.fake.meter.usd())


@pytest.mark.parametrize("status", ["EXITED", "ERROR"])
def test_a_pod_whose_container_ended_does_not_run_and_is_a_leftover(runpod: RunpodDriven, status: str) -> None:
    create(runpod, "dep20000-nights-1")
    create(runpod)
    pod = runpod.pod(TOKEN)
    pod.request["mounts"] = {"persistent": {"size": 100, "path": "/workspace"}}
    runpod.fake.end(pod, status)
    (seen,) = inventory(runpod).of(TOKEN)
    assert (seen.running, seen.message) == (False, f"the pod is {status}")
    report = runpod.driver.examine(PREFIX)
    assert [one.token for one in report.foreign] == ["dep20000-nights-1"] and report.problems == []
    (left,) = report.leftovers
    assert left.token == TOKEN and left.usd_per_hour == seen.usd_per_hour == pytest.approx(100 * 0.2 / 730)
    runpod.driver.remove_leftover(left)
    runpod.driver.remove_leftover(left)
    assert runpod.existing() == ["dep20000-nights-1"] and runpod.driver.examine(PREFIX).leftovers == []


def test_the_price_of_a_pod_without_one_and_an_unknown_status_prove_nothing(runpod: RunpodDriven) -> None:
    create(runpod)
    runpod.pod(TOKEN).usd_per_hour = 0.0
    runpod.pod(TOKEN).ended = "MIGRATING"
    (seen,) = inventory(runpod).of(TOKEN)
    assert (seen.running, seen.usd_per_hour) == (True, None)


def test_an_impossible_price_makes_the_list_incomplete(runpod: RunpodDriven) -> None:
    create(runpod)
    runpod.pod(TOKEN).usd_per_hour = float("nan")
    assert (inventory(runpod).complete, inventory(runpod).sightings) == (False, [])
    assert "unreadable" in runpod.driver.examine(PREFIX).problems[0]


def test_a_key_that_is_refused_or_lacks_a_permission_is_told_with_its_remedy(runpod: RunpodDriven) -> None:
    create(runpod)
    handle = runpod.pod(TOKEN).id
    runpod.fake.scopes = set()
    write, charge = runpod.driver.examine(PREFIX).problems
    assert "no pod can be rented or given back" in write and "read/write" in write
    assert "charge" in charge and "baton fleet login" in charge
    for call, kind in (("403", RefusalKind.PERMISSION), ("401", RefusalKind.KEY)):
        if call == "401":
            runpod.fake.inject("401", "DELETE")
        with pytest.raises(ProviderRefused) as refused:
            runpod.driver.destroy(handle)
        assert refused.value.kind is kind and runpod.fake.key not in str(refused.value)
    runpod.fake.inject("401", "GET", count=2)
    with pytest.raises(ProviderRefused):
        runpod.driver.examine(PREFIX)
    runpod.fake.inject("429", "DELETE")
    with pytest.raises(ProviderUnavailable):
        runpod.driver.destroy(handle)


def test_logs_are_read_from_a_stream_that_stays_open(runpod: RunpodDriven) -> None:
    create(runpod)
    pod = runpod.pod(TOKEN)
    pod.log = ["step 1: loss 0.5", "step 2"]
    assert runpod.driver.logs(pod.id) == "step 1: loss 0.5\nstep 2"
    runpod.fake.log_open_s = 3
    impatient = RunpodDriver(runpod_account(runpod.fake), now=runpod.clock, timeout_s=1)
    assert impatient.logs(pod.id) == "step 1: loss 0.5\nstep 2"
    runpod.fake.inject("500", "GET")
    with pytest.raises(ProviderUnavailable):
        runpod.driver.logs(pod.id)
