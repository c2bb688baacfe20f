"""Read Vast.ai's rows: asks as offers, instances as sightings, price increases, charges.

Vast.ai's documentation (docs.vast.ai/api-reference) and its own client `vastai` 1.9.1 are the sources. Numbers that are
negative, infinite or NaN fail.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from baton.contract.fleets.fleet import FleetSpec
from functions.fleet.drivers.protocol import quote_unknown
from functions.fleet.records import HIGHEST_PRICE, Offer, Price, Sighting

PROVIDER = "vast"
LEAST_DISK_GB = 8
HOURS_PER_MONTH = 720
VRAM_SHARE = 0.93
"""Least share of the wanted VRAM: with error correction an A40 reports 45 of its 48 GiB."""
BID_MARGIN = 1.1
"""Factor by which a bid exceeds the lowest one, because the next renter outbids an equal one."""
BID_STEP = 10_000
"""Steps of a bid for one USD."""
BID_INTERRUPTIONS_PER_HOUR = 0.1
"""Assumed, as Vast.ai publishes no rate: any renter on demand outranks every bid."""
IMAGE_GB = 6
"""Assumed size of the image, for the time of a boot."""
START_S = 90
SLOWEST_MBIT_S = 20.0
MB_PER_GIB = 1024
RENAMES = (
    (r"^(NVIDIA|Q) ", ""),
    (r"^((RTX|GTX) \d{4})S Ti$", r"\1 Ti SUPER"),
    (r"^((RTX|GTX) \d{4})S$", r"\1 SUPER"),
    (r"(\d)Ada$", r"\1 Ada"),
    (r" (SXM\d?|PCIE|WS|S)$", ""),
)
"""Vast.ai's names of GPUs, turned into words of the name by `nvidia-smi` on the machine."""

DRIVER = re.compile(r"\d+(\.\d+)*")

ENDED = {
    "stopped": "the instance is stopped",
    "exited": "the container has ended",
    "frozen": "the instance is frozen, which costs as much as a running one",
    "offline": "the host is offline",
}
"""Statuses of instances that do not work any more. Every other one, `unknown` included, proves nothing."""
STATUSES = frozenset(
    {
        "created",
        "loading",
        "recycling",
        "rebooting",
        "restarting",
        "running",
        "scheduling",
        "unknown",
        *ENDED,
    }
)
"""Every documented status of an instance that has one."""
BILLED_AS_DISK = ("stopped", "exited")
OCI_FAILURE = "OCI runtime create failed"


class VastRow(BaseModel):
    """Base of Vast.ai's values, of which the driver reads a part."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


def gpu_model(name: str) -> str:
    """Return the GPU's name in words that `nvidia-smi` uses as well."""
    name = name.replace("_", " ").strip()
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def disk_gb(disk_gib: float) -> int:
    """Return the disk of an instance in GB."""
    return max(LEAST_DISK_GB, math.ceil(disk_gib * 2**30 / 10**9))


class Ask(VastRow):
    """Offer of a host. `dph_total`: price for the asked disk."""

    id: int
    machine_id: int
    gpu_name: str
    num_gpus: int = Field(ge=1)
    gpu_ram: float = Field(ge=0)
    """In MB, of one GPU."""
    disk_space: float = Field(ge=0)
    driver_version: str | None = None
    dph_total: Price
    min_bid: Price | None = None
    storage_cost: Price = 0
    """USD for a GB and month."""
    inet_up_cost: Price | None = None
    inet_down_cost: Price | None = None
    inet_down: float | None = None
    geolocation: str | None = None
    reliability2: float | None = None
    duration: float | None = None
    end_date: float | None = None

    def offer(self, spec: FleetSpec, now: float, *, bid: bool) -> Offer:
        """Return the ask as an offer. `bid`: interruptible, at a bid that outbids the lowest within the cap."""
        price, ref = self.dph_total, str(self.id)
        if bid:
            storage = disk_gb(spec.disk_gib) * self.storage_cost / HOURS_PER_MONTH
            amount = best_bid(self.min_bid or 0.0, spec.max_usd_per_hour - storage)
            price, ref = amount + storage, f"{self.id}@{amount:.4f}"
        vram_gib = self.gpu_ram / MB_PER_GIB
        if VRAM_SHARE * spec.min_vram_gib <= vram_gib < spec.min_vram_gib:
            vram_gib = spec.min_vram_gib
        place, _, country = (self.geolocation or "").rpartition(", ")
        ends_at = self.end_date if self.end_date or self.duration is None else now + self.duration
        lost_per_day = 0.0 if self.reliability2 is None else 1 - min(1.0, self.reliability2)
        return Offer(
            provider=PROVIDER,
            ref=ref,
            ask=str(self.id),
            machine_ref=str(self.machine_id),
            gpu_model=gpu_model(self.gpu_name),
            gpus=self.num_gpus,
            vram_gib=vram_gib,
            disk_gib=self.disk_space * 10**9 / 2**30,
            driver=self.driver_version if DRIVER.fullmatch(self.driver_version or "") else None,
            download_mbit_s=self.inet_down,
            spot=bid,
            regions=[one.strip().replace(" ", "-") for one in (country, place) if one.strip()],
            ends_at=None if ends_at is None else int(ends_at),
            usd_per_hour=price,
            usd_per_gb=max(self.inet_up_cost or 0.0, self.inet_down_cost or 0.0),
            interruptions_per_hour=BID_INTERRUPTIONS_PER_HOUR if bid else lost_per_day / 24,
            boot_s=START_S + IMAGE_GB * 8000 / max(self.inet_down or 0.0, SLOWEST_MBIT_S),
        )


def best_bid(least: float, most: float) -> float:
    """Return a bid in USD per hour: above `least` by the margin, but not above `most`, and never below `least`."""
    wanted, cap, floor = (
        math.ceil(round(least * BID_MARGIN * BID_STEP, 6)),
        math.floor(round(most * BID_STEP, 6)),
        math.ceil(round(least * BID_STEP, 6)),
    )
    return max(min(wanted, cap), floor) / BID_STEP


class Instance(VastRow):
    """Row of the list of instances."""

    id: int
    label: str | None = None
    actual_status: str | None = None
    intended_status: str | None = None
    cur_state: str | None = None
    next_state: str | None = None
    status_msg: str | None = None
    dph_total: Price | None = None
    storage_total_cost: Price | None = None
    machine_id: int | None = None
    start_date: float | None = None

    @property
    def token(self) -> str:
        """Return the label, by which the controller recognises its machines."""
        return self.label or ""

    @property
    def outbid(self) -> bool:
        """True if another renter has taken the GPU: stopped in all respects, although nobody asked for a stop."""
        return {self.actual_status, self.intended_status, self.cur_state, self.next_state} == {"stopped"}

    @property
    def end(self) -> str:
        """Return why the instance does not work any more; empty for one that may work."""
        if self.actual_status == "created" and OCI_FAILURE in (self.status_msg or ""):
            return f"the container cannot start: {self.status_msg}"[:300]
        if self.outbid:
            return "outbid: another renter has the GPU"
        return ENDED.get(self.actual_status or "", "")

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the moment: of the disk alone while no container runs; None while the row names no price."""
        if self.actual_status in BILLED_AS_DISK and self.storage_total_cost is not None:
            return self.storage_total_cost
        return self.dph_total or None

    def sighting(self, announced_usd_per_hour: float | None = None) -> Sighting:
        """Return the instance as an entry of an inventory."""
        return Sighting(
            token=self.token,
            handle=str(self.id),
            running=not self.end,
            usd_per_hour=self.usd_per_hour,
            announced_usd_per_hour=announced_usd_per_hour,
            machine_ref=None if self.machine_id is None else str(self.machine_id),
            message=self.end,
            unknown_status="" if self.actual_status is None else quote_unknown(self.actual_status, STATUSES),
            created_at=int(self.start_date or 0),
        )


class PriceIncrease(VastRow):
    """Request of a host for a higher price after the end of the contract. Null: this part of the price stays."""

    pending_price_increase_id: int
    contract_id: int
    contract_end_date: float | None = None
    new_gpu_costpersec: Price | None = None
    new_disk_ram_costpersec: Price | None = None
    old_gpu_costpersec: Price | None = None
    old_disk_ram_costpersec: Price | None = None

    def usd_per_hour(self, present: float) -> float:
        """Return the price that the host wants. `present`: the price of the instance now.

        A host may name any number; one beyond the bounds of a price must not make the list of instances unreadable.
        """
        parts = (
            (self.old_gpu_costpersec, self.new_gpu_costpersec),
            (self.old_disk_ram_costpersec, self.new_disk_ram_costpersec),
        )
        wanted = present + 3600 * sum(new - (old or 0.0) for old, new in parts if new is not None)
        return min(max(wanted, 0.0), HIGHEST_PRICE)


class Charge(VastRow):
    """Sum of the charges for one contract."""

    source: str
    amount: Price


class User(VastRow):
    """Account that the key belongs to."""

    id: int
    email: str | None = None
    credit: float | None = None


def search_body(spec: FleetSpec, *, bid: bool, gpu_names: list[str], limit: int) -> dict[str, Any]:
    """Return the body of a search. gpu_names: Vast.ai's own names; empty for any GPU."""
    price = "min_bid" if bid else "dph_total"
    body: dict[str, Any] = {
        "verified": {"eq": True},
        "external": {"eq": False},
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "reliability": {"gte": 0.95},
        "num_gpus": {"gte": 1},
        "gpu_ram": {"gte": spec.min_vram_gib * MB_PER_GIB * VRAM_SHARE},
        "disk_space": {"gte": disk_gb(spec.disk_gib)},
        price: {"lte": spec.max_usd_per_hour},
        "type": "bid" if bid else "on-demand",
        "allocated_storage": disk_gb(spec.disk_gib),
        "order": [[price, "asc"]],
        "limit": limit,
    }
    if gpu_names:
        body["gpu_name"] = {"in": gpu_names}
    return body
