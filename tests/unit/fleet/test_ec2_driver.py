"""EC2's driver over HTTP: offers, what a launch asks for, refusals by code, lost answers, and what the report shows."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from functions.fleet.drivers.ec2.driver import Ec2Driver
from functions.fleet.drivers.ec2.prices import extra_usd
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
from functions.fleet.records import Offer
from tests.conformance.drivers.driven_ec2 import LIST_USD, Ec2Driven
from tests.conformance.drivers.driver_kit import ENVIRONMENT, IMAGE, PREFIX, SPEC, create, inventory

TOKEN = f"{PREFIX}nights-1"
DISK_GIB = 1 + 15 + 20
"""The rented disk, the machine image, room for the container image."""


@pytest.fixture
def ec2(tmp_path: Path) -> Iterator[Ec2Driven]:
    driven = Ec2Driven(tmp_path)
    yield driven
    driven.close()


def offers(ec2: Ec2Driven, market: str = "either") -> dict[str, Offer]:
    spec = SPEC.model_copy(update={"market": market})
    return {one.ref: one for one in ec2.driver.quote(spec)}


def launch(ec2: Ec2Driven, ref: str = "g6.xlarge@us-east-1b@spot", **changes: Any) -> CreateResult:
    intent = CreateIntent(
        token=TOKEN,
        offer=offers(ec2)[ref],
        image=IMAGE,
        disk_gib=1,
        environment=ENVIRONMENT,
        max_usd_per_hour=1,
    )
    return ec2.driver.create(replace(intent, **changes))


def test_offers_are_pools_with_a_subnet_at_the_present_price_of_machine_disk_and_address(ec2: Ec2Driven) -> None:
    found = offers(ec2)
    assert {one: round(offer.usd_per_hour - extra_usd(DISK_GIB), 4) for one, offer in found.items()} == {
        "g4dn.xlarge@us-east-1a@on-demand": LIST_USD["g4dn.xlarge"],
        "g4dn.xlarge@us-east-1b@on-demand": LIST_USD["g4dn.xlarge"],
        "g6.xlarge@us-east-1a@on-demand": LIST_USD["g6.xlarge"],
        "g6.xlarge@us-east-1b@on-demand": LIST_USD["g6.xlarge"],
        "g4dn.xlarge@us-east-1a@spot": 0.21,
        "g6.xlarge@us-east-1a@spot": 0.3219,
        "g6.xlarge@us-east-1b@spot": 0.295,
    }
    t4, l4 = found["g4dn.xlarge@us-east-1a@spot"], found["g6.xlarge@us-east-1b@spot"]
    assert (t4.gpu_model, t4.gpus, t4.vram_gib, t4.spot) == ("T4", 1, 15, True)
    assert (l4.gpu_model, round(l4.vram_gib), l4.repeatable) == ("L4", 22, True)
    assert l4.regions == ["us-east-1", "us-east-1b", "US"]
    assert {one.spot for one in offers(ec2, "spot").values()} == {True}
    assert {one.spot for one in offers(ec2, "on-demand").values()} == {False}


def test_without_the_permission_for_the_price_list_spot_machines_are_offered_alone(ec2: Ec2Driven) -> None:
    ec2.fake.allowed = {"launch"}
    assert {one.spot for one in offers(ec2).values()} == {True}
    with pytest.raises(ProviderRefused) as refused:
        offers(ec2, "on-demand")
    assert refused.value.kind is RefusalKind.PERMISSION and "docs/providers/ec2.md" in str(refused.value)


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_a_machine_ends_with_its_script_and_leaves_neither_disk_nor_metadata_without_a_session(
    ec2: Ec2Driven, market: str
) -> None:
    created = launch(ec2, f"g6.xlarge@us-east-1b@{market}")
    assert isinstance(created, Created)
    (machine,) = [one for one in ec2.all_machines() if one["InstanceId"] == created.handle]
    assert machine.get("InstanceLifecycle", "on-demand") == market
    assert machine["Placement"]["AvailabilityZone"] == "us-east-1b" and machine["SecurityGroups"]
    options = machine["MetadataOptions"]
    assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 2)
    behaviour, script = (
        ec2.ec2.describe_instance_attribute(InstanceId=created.handle, Attribute=name)[name[:1].upper() + name[1:]]
        for name in ("instanceInitiatedShutdownBehavior", "userData")
    )
    assert behaviour["Value"] == "terminate" and IMAGE in base64.b64decode(script["Value"]).decode()
    (disk,) = ec2.ec2.describe_volumes(Filters=[{"Name": "tag:Name", "Values": [TOKEN]}])["Volumes"]
    assert (disk["Size"], disk["VolumeType"]) == (DISK_GIB, "gp3")
    expected = {"Name": TOKEN, "baton:deployment": "dep10000", "baton:disk-gib": str(DISK_GIB)}
    for thing in (machine, disk):
        assert {one["Key"]: one["Value"] for one in thing["Tags"]} == expected
    form, _ = ec2.fake.launches[TOKEN]
    assert form["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true" and "KeyName" not in form
    if market == "spot":
        # The cap of the machine is the fleet's cap without disk and address.
        most = float(form["InstanceMarketOptions.SpotOptions.MaxPrice"])
        assert most == pytest.approx(1 - extra_usd(DISK_GIB), abs=1e-6)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InsufficientInstanceCapacity", 500, None),
        ("SpotMaxPriceTooLow", 400, None),
        ("Unsupported", 400, None),
        ("MaxSpotInstanceCountExceeded", 400, None),
        ("VcpuLimitExceeded", 400, None),
        ("VolumeLimitExceeded", 400, RefusalKind.QUOTA),
        ("RequestLimitExceeded", 503, "ambiguous"),
        ("UnauthorizedOperation", 403, RefusalKind.PERMISSION),
        ("AuthFailure", 401, RefusalKind.KEY),
        ("OptInRequired", 401, RefusalKind.CREDIT),
        ("InvalidAMIID.NotFound", 400, RefusalKind.IMAGE),
        ("InvalidSubnetID.NotFound", 400, RefusalKind.INVALID),
        ("IdempotentParameterMismatch", 400, "ambiguous"),
        ("InternalError", 500, "ambiguous"),
        ("Unavailable", 503, "ambiguous"),
    ],
)
def test_refusals_of_a_launch_are_judged_by_their_code(
    ec2: Ec2Driven, code: str, status: int, kind: RefusalKind | str | None
) -> None:
    ec2.fake.refusals.append((code, status))
    result = launch(ec2)
    assert not isinstance(result, Created) and code in result.reason
    if kind == "ambiguous":
        assert isinstance(result, Ambiguous)
    else:
        assert isinstance(result, NotCreated) and (result.kind, result.handle) == (kind, None)
        assert "fake-secret" not in result.reason and "\n" not in result.reason
    limited = code in ("MaxSpotInstanceCountExceeded", "VcpuLimitExceeded")
    assert result.reason.startswith(RefusalKind.QUOTA) == limited
    assert (ec2.existing(), ec2.fake.meter.usd()) == ([], 0)
    assert isinstance(launch(ec2), Created)


@pytest.mark.parametrize("fault", ["lost", "reset", "500", "html", "truncated"])
def test_a_launch_without_a_usable_answer_is_sent_once_and_ambiguous(ec2: Ec2Driven, fault: str) -> None:
    wanted = launch(ec2, token="dep20000-other")
    assert isinstance(wanted, Created)
    ec2.fake.inject(fault, "POST /RunInstances")  # type: ignore[arg-type] - a row of the table
    assert isinstance(launch(ec2), Ambiguous)
    assert sum(b"Action=RunInstances" in one.raw for one in ec2.fake.calls) == 2
    effect = [] if fault in ("reset", "500") else [TOKEN]
    assert [one.token for one in inventory(ec2).sightings] == effect
    # The token makes even a repetition safe.
    assert isinstance(launch(ec2), Created) and ec2.existing().count(TOKEN) == 1


def test_a_price_cap_below_the_market_or_the_disk_makes_nothing(ec2: Ec2Driven) -> None:
    for cap in (0.2, 0.001):
        assert isinstance(launch(ec2, max_usd_per_hour=cap), NotCreated)
    assert ec2.existing() == [] and ec2.fake.meter.usd() == 0


def test_the_money_of_a_machine_ends_with_its_destroy(ec2: Ec2Driven) -> None:
    created = launch(ec2)
    assert isinstance(created, Created)
    (seen,) = inventory(ec2).of(TOKEN)
    assert seen.usd_per_hour == pytest.approx(0.295 + extra_usd(DISK_GIB))
    ec2.advance(3600)
    assert ec2.driver.destroy(created.handle) and ec2.driver.destroy("i-0123456789abcdef0")
    ec2.advance(3600)
    # Amazon bills the address apart.
    assert ec2.fake.meter.usd() == pytest.approx(seen.usd_per_hour - extra_usd(0), rel=1e-3)
    assert ec2.driver.charged_usd(created.handle) is None


def test_a_list_keeps_the_machines_of_its_first_pages_and_survives_missing_prices(ec2: Ec2Driven) -> None:
    launch(ec2)
    ec2.fake.broken_pages = 1
    found = inventory(ec2)
    assert ([one.token for one in found.sightings], found.complete) == ([TOKEN], False)
    ec2.fake.inject("500", "POST /DescribeSpotPriceHistory", count=2)
    found = inventory(ec2)
    assert ([one.usd_per_hour for one in found.sightings], found.complete) == ([None], True)


def test_a_stopped_machine_does_not_run_and_says_why(ec2: Ec2Driven) -> None:
    launch(ec2)
    ec2.end(TOKEN)
    (seen,) = inventory(ec2).of(TOKEN)
    assert not seen.running and seen.message.startswith("the machine is stopped")
    assert [one.kind for one in ec2.driver.examine(PREFIX).leftovers] == ["stopped machine"]


def test_the_report_names_foreign_machines_lost_disks_and_missing_permissions(ec2: Ec2Driven) -> None:
    create(ec2, "dep20000-nights-1")
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "Name", "Value": TOKEN}]}]
    ec2.ec2.create_volume(AvailabilityZone="us-east-1a", Size=100, TagSpecifications=tags)
    report = ec2.driver.examine(PREFIX)
    assert "arn:aws:" in report.account and report.problems == []
    assert [one.token for one in report.foreign] == ["dep20000-nights-1"]
    (disk,) = report.leftovers
    assert (disk.kind, disk.token, disk.usd_per_hour) == ("disk", TOKEN, pytest.approx(100 * 0.1 / 730))
    ec2.driver.remove_leftover(disk)
    ec2.driver.remove_leftover(disk)
    assert ec2.driver.examine(PREFIX).leftovers == []
    assert ec2.existing() == ["dep20000-nights-1"]
    for lacking in ("launch", "pricing"):
        ec2.fake.allowed = {"launch", "pricing"} - {lacking}
        (problem,) = Ec2Driver(ec2.account, now=ec2.clock).examine(PREFIX).problems
        assert "docs/providers/ec2.md" in problem


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("image_id", "ami-00000000000000000", RefusalKind.IMAGE),
        ("instance_types", ["zz9.large"], RefusalKind.INVALID),
        ("subnet_ids", ["subnet-00000000"], RefusalKind.INVALID),
    ],
)
def test_an_account_that_names_an_unknown_part_rents_nothing(
    ec2: Ec2Driven, field: str, value: object, kind: RefusalKind
) -> None:
    driver = Ec2Driver(ec2.account.model_copy(update={field: value}), now=ec2.clock)
    with pytest.raises(ProviderRefused) as refused:
        driver.quote(SPEC)
    assert refused.value.kind is kind
    assert len(driver.examine(PREFIX).problems) == 1


def test_a_refused_key_and_a_throttled_call_are_not_a_machines_end(ec2: Ec2Driven) -> None:
    launch(ec2)
    handle = ec2.machines()[TOKEN]
    for fault, error in (("401", ProviderRefused), ("429", ProviderUnavailable), ("500", ProviderUnavailable)):
        ec2.fake.inject(fault, "POST /TerminateInstances")  # type: ignore[arg-type] - a row of the table
        with pytest.raises(error):
            ec2.driver.destroy(handle)
        ec2.fake.inject(fault, "POST /DescribeInstances", count=2)  # type: ignore[arg-type]
        with pytest.raises(error):
            inventory(ec2)
        ec2.fake.faults.clear()
    assert ec2.existing() == [TOKEN]
    assert (ec2.driver.logs(handle) or "").startswith("Linux version")
