"""Read the prices of EC2: spot prices by pool, and the price list of Amazon for on-demand machines."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from functions.fleet.drivers.ec2.calls import Ec2Calls
from functions.fleet.drivers.protocol import ProviderRefused, RefusalKind

DISK_USD_PER_GIB_HOUR = 0.10 / 730
"""Price of gp3 disks: 0.08 to 0.152 USD per GiB and month by region (aws.amazon.com/ebs/pricing, 2026-11)."""
ADDRESS_USD_PER_HOUR = 0.005
"""Price of a public IPv4 address."""


def extra_usd(disk_gib: float) -> float:
    """Return the price per hour of the disk and the address of a machine."""
    return disk_gib * DISK_USD_PER_GIB_HOUR + ADDRESS_USD_PER_HOUR


class Ec2Prices:
    """Prices of one region in USD per hour, of machines without disk and address."""

    def __init__(self, calls: Ec2Calls, region: str) -> None:
        self._calls = calls
        self._region = region
        self._listed: dict[str, float] = {}
        """On-demand prices by type, which change at most a few times a year."""

    def spot(self, types: Collection[str]) -> dict[tuple[str, str], float]:
        """Return the present spot prices by type and availability zone."""
        newest: dict[tuple[str, str], tuple[datetime, float]] = {}
        for page in self._calls.pages(
            "describe_spot_price_history",
            InstanceTypes=sorted(types),
            ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
            StartTime=datetime.now(UTC),
        ):
            for one in page["SpotPriceHistory"]:
                pool = one["InstanceType"], one["AvailabilityZone"]
                known = newest.get(pool)
                if known is None or one["Timestamp"] > known[0]:
                    newest[pool] = one["Timestamp"], float(one["SpotPrice"])
        return {pool: usd for pool, (_, usd) in newest.items()}

    def on_demand(self, types: Collection[str], *, needed: bool) -> dict[str, float]:
        """Return the on-demand prices by type.

        Without the permission for the price list, and if spot machines serve as well, there are none.
        """
        for type_ in sorted(set(types) - set(self._listed)):
            fields = {
                "instanceType": type_,
                "regionCode": self._region,
                "operatingSystem": "Linux",
                "tenancy": "Shared",
                "preInstalledSw": "NA",
                "capacitystatus": "Used",
            }
            filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in fields.items()]
            try:
                answer = self._calls.read("get_products", "pricing", ServiceCode="AmazonEC2", Filters=filters)
            except ProviderRefused as error:
                if needed or error.kind is not RefusalKind.PERMISSION:
                    raise
                return {}
            prices = [usd for text in answer["PriceList"] for usd in _hourly_usd(json.loads(text))]
            if prices:
                self._listed[type_] = max(prices)
        return {type_: usd for type_, usd in self._listed.items() if type_ in types}


def _hourly_usd(product: Mapping[str, Any]) -> Iterable[float]:
    """Return the hourly prices in USD of one entry of the price list."""
    for term in product["terms"]["OnDemand"].values():
        for dimension in term["priceDimensions"].values():
            if dimension["unit"] == "Hrs":
                yield float(dimension["pricePerUnit"]["USD"])
