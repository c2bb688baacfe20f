"""Drive EC2's driver over HTTP against moto, with what moto lacks: ClientToken, prices, refusals, faults, a bill."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import botocore.loaders
import botocore.session
from botocore.awsrequest import AWSPreparedRequest
from moto.core.botocore_stubber import BotocoreStubber
from moto.ec2 import ec2_backends
from pydantic import SecretStr

from baton.contract.fleets.providers import Ec2Account
from fakes.server import FakeAnswer, FakeCall, FakeProvider, InjectedFault
from functions.fleet.drivers.ec2.driver import Ec2Driver

REGION = "us-east-1"
ACCOUNT = "123456789012"
"""Account of moto."""
LOADER = botocore.loaders.create_loader()
XML = {"Content-Type": "text/xml;charset=UTF-8"}
LIST_USD = {"g6.xlarge": 0.8048, "g4dn.xlarge": 0.526}
SPOT_USD = {
    ("g6.xlarge", "us-east-1a"): "0.3219",
    ("g6.xlarge", "us-east-1b"): "0.2950",
    ("g4dn.xlarge", "us-east-1a"): "0.21",
}
ERROR = "<Response><Errors><Error><Code>{}</Code><Message>Amazon says no.</Message></Error></Errors></Response>"


class FakeEc2(FakeProvider):
    """EC2, STS and the price list of one account. `allowed`: reading the price list, launching machines."""

    def __init__(self, clock: LiveClock) -> None:
        super().__init__(clock)
        self.allowed = {"pricing", "launch"}
        self.refusals: list[tuple[str, int]] = []
        """Codes and statuses of the next launches."""
        self.broken_pages = 0
        """Lists whose second page fails."""
        self.ignored_ends = 0
        self.zones: dict[str, str] = {}
        """Availability zones by subnet."""
        self.launches: dict[str, tuple[Mapping[str, str], FakeAnswer]] = {}

    def answer(self, call: FakeCall) -> FakeAnswer:
        service = re.search(rf"/{REGION}/(\w+)/aws4_request", call.headers["authorization"])
        assert service is not None, call.headers
        if service[1] == "pricing":
            return self._prices(call.json())
        form = dict(parse_qsl(call.raw.decode(), keep_blank_values=True))
        match form["Action"]:
            case "RunInstances":
                return self._launch(call, form)
            case "DescribeSpotPriceHistory":
                return self._spot(form)
            case "TerminateInstances":
                return self._terminate(call, form)
            case "DescribeInstances" if form.get("NextToken") == "second":
                return refusal("InternalError", 500)
            case "DescribeInstances" if self.broken_pages:
                self.broken_pages -= 1
                found = self._moto(call, service[1])
                assert isinstance(found.body, str)
                more = found.body.replace("</reservationSet>", "</reservationSet><nextToken>second</nextToken>")
                return FakeAnswer(found.status, more, XML)
        return self._moto(call, service[1])

    def take_fault(self, call: FakeCall) -> InjectedFault | None:
        """Find the fault by the action of the call, since all calls have one path."""
        action = dict(parse_qsl(call.raw.decode())).get("Action", "")
        return super().take_fault(replace(call, path=f"/{action}"))

    def throttled(self) -> FakeAnswer:
        return refusal("RequestLimitExceeded", 503)

    def refused(self) -> FakeAnswer:
        return refusal("AuthFailure", 401)

    def _launch(self, call: FakeCall, form: dict[str, str]) -> FakeAnswer:
        if form.get("DryRun") == "true":
            return refusal("DryRunOperation" if "launch" in self.allowed else "UnauthorizedOperation", 412)
        if self.refusals:
            return refusal(*self.refusals.pop())
        known = self.launches.get(form["ClientToken"])
        if known is not None:
            return known[1] if known[0] == form else refusal("IdempotentParameterMismatch", 400)
        spot, type_ = form.get("InstanceMarketOptions.MarketType") == "spot", form["InstanceType"]
        usd = float(SPOT_USD[type_, self.zones[form["SubnetId"]]]) if spot else LIST_USD[type_]
        if spot and usd > float(form["InstanceMarketOptions.SpotOptions.MaxPrice"]):
            return refusal("SpotMaxPriceTooLow", 400)
        made = self._moto(call, "ec2")
        self.meter.rate(instance_id(made), "machine", usd)
        self.meter.rate(instance_id(made), "disk", int(form["BlockDeviceMapping.1.Ebs.VolumeSize"]) * 0.1 / 730)
        self.launches[form["ClientToken"]] = form, made
        return made

    def _terminate(self, call: FakeCall, form: dict[str, str]) -> FakeAnswer:
        if self.ignored_ends:
            self.ignored_ends -= 1
            return FakeAnswer(200, "<TerminateInstancesResponse><instancesSet/></TerminateInstancesResponse>", XML)
        self.meter.end(form["InstanceId.1"])
        return self._moto(call, "ec2")

    def _spot(self, form: dict[str, str]) -> FakeAnswer:
        wanted = {value for name, value in form.items() if name.startswith("InstanceType.")}
        at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        # An older price beside each present one, as at the edge of the asked time.
        items = [
            f"<item><instanceType>{type_}</instanceType><availabilityZone>{zone}</availabilityZone>"
            f"<spotPrice>{usd}</spotPrice><timestamp>{when}</timestamp></item>"
            for (type_, zone), present in SPOT_USD.items()
            for usd, when in ((present, at), ("9.99", "2026-01-01T00:00:00.000Z"))
            if type_ in wanted
        ]
        body = f"<spotPriceHistorySet>{''.join(items)}</spotPriceHistorySet>"
        return FakeAnswer(200, f"<DescribeSpotPriceHistoryResponse>{body}</DescribeSpotPriceHistoryResponse>", XML)

    def _prices(self, body: dict[str, list[dict[str, str]]]) -> FakeAnswer:
        if "pricing" not in self.allowed:
            return FakeAnswer(400, {"__type": "AccessDeniedException", "Message": "not authorized"})
        fields = {one["Field"]: one["Value"] for one in body["Filters"]}
        assert fields["regionCode"] == REGION and fields["operatingSystem"] == "Linux"
        price = {"unit": "Hrs", "pricePerUnit": {"USD": str(LIST_USD.get(fields["instanceType"], 1.006))}}
        product = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": price}}}}}
        return FakeAnswer(200, {"FormatVersion": "aws_v1", "PriceList": [json.dumps(product)]})

    def _moto(self, call: FakeCall, service: str) -> FakeAnswer:
        url = f"https://{service}.{REGION}.amazonaws.com/"
        request = AWSPreparedRequest(call.method, url, dict(call.headers), call.raw, False)
        found = BotocoreStubber().process_request(request)
        assert found is not None, url
        status, _, body = found
        return FakeAnswer(status, body.decode() if isinstance(body, bytes) else str(body), XML)


class LiveClock:
    """The time of this machine, which moto uses, and the seconds that a test has skipped."""

    def __init__(self) -> None:
        self.skipped = 0

    def __call__(self) -> float:
        return time.time() + self.skipped


def refusal(code: str, status: int) -> FakeAnswer:
    return FakeAnswer(status, ERROR.format(code), XML)


def instance_id(made: FakeAnswer) -> str:
    found = ElementTree.fromstring(made.body).find(".//{*}instanceId")
    assert found is not None and found.text
    return found.text


def client(service: str, address: str) -> Any:
    """Return a client of the fake with another key than the driver's."""
    session = botocore.session.Session()
    session.register_component("data_loader", LOADER)
    return session.create_client(
        service,
        region_name=REGION,
        endpoint_url=address,
        aws_access_key_id="AKIAOTHER",
        aws_secret_access_key="other",
    )


class Ec2Driven:
    """Amazon's bill comes a day late, therefore a receipt has no charge."""

    charges = False

    def __init__(self, directory: Path) -> None:
        self.clock = LiveClock()
        self.fake = FakeEc2(self.clock)
        self.fake.__enter__()
        self.ec2 = client("ec2", self.fake.url)
        self.account = self.make_account()
        self.driver = Ec2Driver(self.account, now=self.clock)

    def make_account(self) -> Ec2Account:
        self.fake.zones = {one["SubnetId"]: one["AvailabilityZone"] for one in self.ec2.describe_subnets()["Subnets"]}
        subnets = {zone: subnet for subnet, zone in self.fake.zones.items()}
        return Ec2Account(
            access_key_id="AKIAFAKE",
            secret_access_key=SecretStr("fake-secret"),
            region=REGION,
            image_id=self.make_image(),
            subnet_ids=[subnets[f"{REGION}a"], subnets[f"{REGION}b"]],
            security_group_ids=[self.ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]],
            instance_types=["g6.xlarge", "g4dn.xlarge"],
            address=self.fake.url,
        )

    def make_image(self) -> str:
        """Return a machine image, to which moto gives a root disk of 15 GiB."""
        made = self.ec2.register_image(Name=f"baton-{secrets.token_hex(4)}", RootDeviceName="/dev/sda1")
        return str(made["ImageId"])

    def now(self) -> int:
        return int(self.clock())

    def advance(self, seconds: int) -> None:
        self.clock.skipped += seconds

    def inject(self, fault: str) -> None:
        match fault:
            case "lost_answers":
                self.fake.inject("lost", "POST /RunInstances")
            case "unreadable":
                self.fake.inject("500", "POST /DescribeInstances", count=2)
            case "snatched":
                self.fake.refusals.append(("InsufficientInstanceCapacity", 500))
            case "incomplete":
                self.fake.broken_pages = 1
            case "ignored_destroys":
                self.fake.ignored_ends = 1

    def all_machines(self) -> list[dict[str, Any]]:
        return [one for group in self.ec2.describe_instances()["Reservations"] for one in group["Instances"]]

    def machines(self) -> dict[str, str]:
        """Return the ids of the existing machines by token, from moto's memory, because a call takes 20 ms."""
        return {
            next(tag["value"] for tag in one.get_tags() if tag["key"] == "Name"): one.id
            for one in _instances()
            if one.state not in ("shutting-down", "terminated", "stopping", "stopped")
        }

    def existing(self) -> list[str]:
        return sorted(self.machines())

    def end(self, token: str) -> None:
        handle = self.machines()[token]
        self.ec2.stop_instances(InstanceIds=[handle])
        self.fake.meter.end(handle)

    def close(self) -> None:
        # moto also remembers the ended machines of all earlier tests.
        for one in _instances():
            if one.state != "terminated":
                self.driver.destroy(one.id)
        self.fake.__exit__()
        assert self.fake.meter.billing() == []


def _instances() -> list[Any]:
    return [one for group in ec2_backends[ACCOUNT][REGION].all_reservations() for one in group.instances]
