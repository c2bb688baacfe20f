"""Rent machines of Amazon EC2 in one region, spot and on-demand, one RunInstances call each.

The token of a machine is the ClientToken of its create, its name, and the owner's mark of its disk. An offer is one
instance type in one availability zone, therefore the choice of the pool is Baton's ranking, and no fleet of Amazon with
its launch template is needed: the template would keep the machine's enrolment token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.providers import Ec2Account
from functions.fleet.drivers.ec2.calls import KINDS, Ec2Calls, Ec2Refusal
from functions.fleet.drivers.ec2.launch import DISK_TAG, MachineImage, disk_size_gib, launch
from functions.fleet.drivers.ec2.prices import DISK_USD_PER_GIB_HOUR, Ec2Prices, extra_usd
from functions.fleet.drivers.protocol import (
    AccountReport,
    Ambiguous,
    Created,
    CreateIntent,
    CreateResult,
    Leftover,
    NotCreated,
    ProviderRefused,
    ProviderUnavailable,
    RefusalKind,
    SshTarget,
    quote_unknown,
)
from functions.fleet.drivers.provider_http import TIMEOUT_S, AnswerLost, CallNotSent
from functions.fleet.records import Inventory, Offer, Sighting

BOOT_S = 300
"""Time until the agent runs, which is above all the download of an image of some GB."""
LOG_TAIL_BYTES = 16 * 1024
VISIBLE_MIB = {"T4": 15_360}
"""Memory that the driver shows where it differs from EC2's number: error correction takes a sixteenth of a T4."""
COUNTRIES = {
    "af-south": "ZA", "ap-east": "HK", "ap-northeast-1": "JP", "ap-northeast-2": "KR", "ap-northeast-3": "JP",
    "ap-south-": "IN", "ap-southeast-1": "SG", "ap-southeast-2": "AU", "ap-southeast-3": "ID", "ca-": "CA",
    "eu-central-1": "DE", "eu-central-2": "CH", "eu-north": "SE", "eu-south-1": "IT", "eu-south-2": "ES",
    "eu-west-1": "IE", "eu-west-2": "GB", "eu-west-3": "FR", "il-": "IL", "me-central": "AE", "me-south": "BH",
    "mx-": "MX", "sa-east": "BR", "us-": "US",
}  # fmt: skip
"""Countries by the beginning of a region's name."""
ENDED = frozenset({"shutting-down", "stopping", "stopped"})
"""States in which a machine does not run, and its disk may be billed."""
GONE = "terminated"
"""State of an ended machine, which stays listed for an hour, unbilled."""
STATES = frozenset({"pending", "running", *ENDED, GONE})
"""Every state that Amazon documents. No list is filtered by states, because the filter would hide a new one."""
NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientCapacity",
        "InsufficientHostCapacity",
        "InsufficientFreeAddressesInSubnet",
        "SpotMaxPriceTooLow",
        "Unsupported",
    }
)
"""Refusals of one pool. Amazon answers some with 500, although nothing was made."""
LIMITS = frozenset({"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded"})
"""Quotas of one market and one family of types: the other offers can still serve."""
DONE_BEFORE = "IdempotentParameterMismatch"
NO_MACHINE = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"})


@dataclass(frozen=True)
class Ec2Market:
    """Offers within reach of the account: machine image, hardware by instance type, subnet by availability zone."""

    image: MachineImage
    types: Mapping[str, Mapping[str, Any]]
    subnets: Mapping[str, str]


class Ec2Driver:
    """Driver of Amazon EC2. now: unused, since Amazon's answers carry all times."""

    name = "ec2"
    min_interval_s: Mapping[str, float] = {}

    def __init__(self, account: Ec2Account, *, now: Callable[[], float], timeout_s: float = TIMEOUT_S) -> None:
        self._account = account
        self._calls = Ec2Calls(account, timeout_s=timeout_s)
        self._known: Ec2Market | None = None
        self._prices = Ec2Prices(self._calls, account.region)

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        """Return one offer for each instance type, availability zone and market, at the price of machine and disk."""
        market = self._market()
        prices: dict[tuple[str, str, bool], float] = {}
        if spec.market != "on-demand":
            spot = self._prices.spot(market.types)
            prices.update({(type_, zone, True): usd for (type_, zone), usd in spot.items()})
        if spec.market != "spot":
            for type_, usd in self._prices.on_demand(market.types, needed=spec.market == "on-demand").items():
                prices.update({(type_, zone, False): usd for zone in market.subnets})
        extra = extra_usd(disk_size_gib(spec.disk_gib, market.image))
        return [
            self._offer(market.types[type_], zone, usd + extra, spot, spec)
            for (type_, zone, spot), usd in sorted(prices.items())
            if type_ in market.types and zone in market.subnets
        ]

    def create(self, intent: CreateIntent) -> CreateResult:
        """Launch a machine. A repetition with the same token would return the same machine."""
        type_, zone = intent.offer.ref.split("@")[:2]
        try:
            market = self._market()
        except ProviderRefused as error:
            return NotCreated(reason=str(error), kind=error.kind)
        except ProviderUnavailable as error:
            return NotCreated(reason=f"nothing was asked for: {error}")
        max_usd = intent.max_usd_per_hour - extra_usd(disk_size_gib(intent.disk_gib, market.image))
        subnet = market.subnets.get(zone)
        if subnet is None or max_usd <= 0:
            return NotCreated(reason=f"no subnet in {zone}, or a price cap below the price of the disk")
        parameters = launch(self._account, intent, market.image, subnet, type_=type_, max_usd=max_usd)
        try:
            (made,) = self._calls.send("run_instances", **parameters)["Instances"]
            return Created(handle=made["InstanceId"])
        except CallNotSent as error:
            return NotCreated(reason=str(error))
        except (AnswerLost, KeyError, ValueError) as error:
            return Ambiguous(reason=f"run_instances: no usable answer: {error}")
        except Ec2Refusal as error:
            return self._refused(error)

    def inventory(self, prefix: str, now: int) -> Inventory:
        """List the machines whose names begin with the prefix, page by page."""
        found: list[Mapping[str, Any]] = []
        complete = True
        try:
            for page in self._pages("describe_instances", prefix):
                found += _existing(page)
        except (ProviderUnavailable, ProviderRefused):
            if not found:
                raise
            complete = False
        prices = self._prices_of(found)
        return Inventory(
            provider=self.name, at=now, complete=complete, sightings=[_sighting(one, prices) for one in found]
        )

    def destroy(self, handle: str) -> bool:
        """Terminate a machine; its disk ends with it. A machine that EC2 does not know yet is asked for again later."""
        return self._end("terminate_instances", NO_MACHINE, InstanceIds=[handle])

    def accept_price(self, handle: str, usd_per_hour: float) -> None:
        """Do nothing, because EC2 announces no prices."""

    def logs(self, handle: str) -> str | None:
        """Return the end of the console, to which the boot script writes."""
        try:
            answer = self._calls.read("get_console_output", InstanceId=handle, Latest=True)
        except Ec2Refusal as error:
            if error.code in NO_MACHINE:
                return None
            raise ProviderUnavailable(str(error)) from error
        return answer.get("Output", "")[-LOG_TAIL_BYTES:] or None

    def ssh_target(self, handle: str) -> SshTarget | None:
        """Return None, because a machine is launched without a key pair."""
        return None

    def examine(self, prefix: str) -> AccountReport:
        """Report what the key may not do, machines of others in the region, and disks without a machine."""
        caller = self._calls.read("get_caller_identity", "sts")
        found = [one for page in self._pages("describe_instances", "") for one in _existing(page)]
        ours = [one for one in found if _tag(one, "Name").startswith(prefix)]
        disks = [
            one for page in self._pages("describe_volumes", prefix, status=["available"]) for one in page["Volumes"]
        ]
        return AccountReport(
            account=f"{caller['Arn']} in {self._account.region}",
            problems=self._problems(),
            foreign=[seen for one in found if one not in ours and (seen := _sighting(one, {})).running],
            leftovers=[
                *(
                    Leftover(
                        kind="disk",
                        handle=one["VolumeId"],
                        token=_tag(one, "Name"),
                        usd_per_hour=one["Size"] * DISK_USD_PER_GIB_HOUR,
                    )
                    for one in disks
                ),
                *(
                    Leftover(kind="stopped machine", handle=one["InstanceId"], token=_tag(one, "Name"))
                    for one in ours
                    if one["State"]["Name"] == "stopped"
                ),
            ],
        )

    def remove_leftover(self, leftover: Leftover) -> None:
        """Delete a disk, or terminate a stopped machine."""
        if leftover.kind == "disk":
            self._end("delete_volume", {"InvalidVolume.NotFound"}, VolumeId=leftover.handle)
        else:
            self.destroy(leftover.handle)

    def charged_usd(self, handle: str) -> float | None:
        """Return None, because Amazon's own record (Cost Explorer) comes a day late and costs 0.01 USD a call."""
        return None

    def _market(self) -> Ec2Market:
        """Return what the account names, read once. Raises ProviderRefused if EC2 does not know a part."""
        if self._known is None:
            account = self._account
            try:
                images = self._calls.read("describe_images", ImageIds=[account.image_id])["Images"]
                types = self._calls.read("describe_instance_types", InstanceTypes=account.instance_types)
                subnets = self._calls.read("describe_subnets", SubnetIds=account.subnet_ids)["Subnets"]
            except Ec2Refusal as error:
                raise ProviderRefused(
                    RefusalKind.INVALID, f"{error}. Name parts that {account.region} has: `baton fleet login ec2`."
                ) from error
            if not images:
                raise ProviderRefused(*KINDS["InvalidAMIID.NotFound"])
            self._known = Ec2Market(
                image=_root_disk(images[0]),
                types={one["InstanceType"]: one for one in types["InstanceTypes"]},
                subnets={one["AvailabilityZone"]: one["SubnetId"] for one in subnets},
            )
        return self._known

    def _offer(self, hardware: Mapping[str, Any], zone: str, usd_per_hour: float, spot: bool, spec: FleetSpec) -> Offer:
        gpus = [one for one in hardware.get("GpuInfo", {}).get("Gpus", []) if one.get("Manufacturer") == "NVIDIA"]
        model = gpus[0]["Name"] if gpus else None
        region, market = self._account.region, "spot" if spot else "on-demand"
        return Offer(
            provider=self.name,
            ref=f"{hardware['InstanceType']}@{zone}@{market}",
            repeatable=True,
            gpu_model=model,
            gpus=gpus[0]["Count"] if gpus else 0,
            vram_gib=round(VISIBLE_MIB.get(model or "", gpus[0]["MemoryInfo"]["SizeInMiB"]) / 1024, 1) if gpus else 0,
            disk_gib=spec.disk_gib,
            spot=spot,
            regions=[region, zone, *{code for name, code in COUNTRIES.items() if region.startswith(name)}],
            usd_per_hour=usd_per_hour,
            boot_s=BOOT_S,
        )

    def _refused(self, error: Ec2Refusal) -> CreateResult:
        """Return the outcome of a launch that Amazon answered with an error."""
        if error.code in NO_CAPACITY:
            return NotCreated(reason=str(error))
        if error.code in LIMITS:
            return NotCreated(reason=f"{RefusalKind.QUOTA}: {error}. Remedy: {KINDS['VolumeLimitExceeded'][1]}.")
        if not error.sure or error.code == DONE_BEFORE:
            return Ambiguous(reason=str(error))
        kind, remedy = KINDS.get(error.code, (RefusalKind.INVALID, "compare the account with docs/providers/ec2.md"))
        self._known = None
        return NotCreated(reason=f"{error}. Remedy: {remedy}.", kind=kind)

    def _end(self, call: str, gone: Collection[str], **parameters: Any) -> bool:
        """Send a destroying call; `gone`: codes of a thing that does not exist."""
        try:
            self._calls.send(call, **parameters)
        except (AnswerLost, CallNotSent) as error:
            raise ProviderUnavailable(str(error)) from error
        except Ec2Refusal as error:
            if error.code in gone:
                return True
            kind, remedy = KINDS.get(error.code, (None, ""))
            if kind in (RefusalKind.KEY, RefusalKind.PERMISSION):
                raise ProviderRefused(kind, f"{error}. Remedy: {remedy}.") from error
            raise ProviderUnavailable(str(error)) from error
        return True

    def _pages(self, call: str, prefix: str, **filters: Sequence[str]) -> Iterable[dict[str, Any]]:
        wanted = {**filters, **({"tag:Name": [f"{prefix}*"]} if prefix else {})}
        return self._calls.pages(
            call, MaxResults=500, Filters=[{"Name": name, "Values": list(values)} for name, values in wanted.items()]
        )

    def _prices_of(self, machines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
        """Return the spot prices of the running machines; none if they cannot be read: then the earlier prices hold."""
        types = {one["InstanceType"] for one in machines if _is_spot(one) and one["State"]["Name"] not in ENDED}
        try:
            return self._prices.spot(types) if types else {}
        except (ProviderUnavailable, ProviderRefused, Ec2Refusal):
            return {}

    def _problems(self) -> list[str]:
        """Return what would hinder a launch, found without a launch."""
        try:
            market = self._market()
            type_, zone = min(market.types), min(market.subnets)
            offer = Offer(provider=self.name, ref=f"{type_}@{zone}", spot=True, usd_per_hour=0)
            intent = CreateIntent(
                token="examine",  # noqa: S106 - a name
                offer=offer,
                image="none",
                disk_gib=1,
                environment={},
                max_usd_per_hour=1,
            )
            parameters = launch(self._account, intent, market.image, market.subnets[zone], type_=type_, max_usd=1)
            self._calls.read("run_instances", **parameters, DryRun=True)
        except ProviderRefused as error:
            return [str(error)]
        except Ec2Refusal as error:
            if error.code != "DryRunOperation":
                return [str(error)]
        try:
            self._prices.on_demand(market.types, needed=True)
        except ProviderRefused as error:
            return [f"no on-demand machines are offered: {error}"]
        return []


def _root_disk(image: Mapping[str, Any]) -> MachineImage:
    """Return the root disk of a machine image. Raises ProviderRefused for an image without one."""
    device = image.get("RootDeviceName")
    for one in image.get("BlockDeviceMappings", []):
        if one.get("DeviceName") == device and "VolumeSize" in one.get("Ebs", {}):
            return MachineImage(id=image["ImageId"], device=one["DeviceName"], gib=one["Ebs"]["VolumeSize"])
    raise ProviderRefused(RefusalKind.IMAGE, f"{image['ImageId']} has no root disk in EBS: name another machine image")


def _existing(page: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the machines of a page that may still be billed."""
    return [one for group in page["Reservations"] for one in group["Instances"] if one["State"]["Name"] != GONE]


def _sighting(machine: Mapping[str, Any], spot_prices: Mapping[tuple[str, str], float]) -> Sighting:
    running = machine["State"]["Name"] not in ENDED
    usd = spot_prices.get((machine["InstanceType"], machine["Placement"]["AvailabilityZone"]))
    disk = _tag(machine, DISK_TAG)
    reason = machine.get("StateReason", {}).get("Message") or machine.get("StateTransitionReason", "")
    return Sighting(
        token=_tag(machine, "Name") or machine["InstanceId"],
        handle=machine["InstanceId"],
        running=running,
        usd_per_hour=usd + extra_usd(float(disk)) if usd is not None and _is_spot(machine) and disk else None,
        message="" if running else f"the machine is {machine['State']['Name']}: {reason}".rstrip(": "),
        unknown_status=quote_unknown(machine["State"]["Name"], STATES),
        created_at=int(machine["LaunchTime"].timestamp()),
    )


def _is_spot(machine: Mapping[str, Any]) -> bool:
    return machine.get("InstanceLifecycle") == "spot"


def _tag(thing: Mapping[str, Any], name: str) -> str:
    return next((str(one["Value"]) for one in thing.get("Tags", []) if one["Key"] == name), "")
