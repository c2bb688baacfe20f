"""Sell asks: one row for each host, searched by operators, as `POST /api/v0/bundles/` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HOURS_PER_MONTH = 720
CONTRACT_S = 90 * 86_400
TYPES = ("on-demand", "ondemand", "bid", "reserved", "interruptible")
DIRECTIONS = ("asc", "desc")
CONTROLS = frozenset({"order", "limit", "type", "allocated_storage", "disable_bundling"})
OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": lambda value, wanted: value == wanted,
    "neq": lambda value, wanted: value != wanted,
    "gt": lambda value, wanted: value > wanted,
    "gte": lambda value, wanted: value >= wanted,
    "lt": lambda value, wanted: value < wanted,
    "lte": lambda value, wanted: value <= wanted,
    "in": lambda value, wanted: value in wanted,
    "notin": lambda value, wanted: value not in wanted,
}


class BadRequest(Exception):  # noqa: N818 - an answer of the provider, not a fault of the fake
    """The request has an unknown field or an unsuitable value. `code`: Vast.ai's code of the error."""

    def __init__(self, message: str, code: str = "invalid_args") -> None:
        super().__init__(message)
        self.code = code


@dataclass
class FakeAsk:
    """A host's offer. `gpu_ram` in MB, as the REST API has it."""

    id: int
    machine_id: int
    gpu_name: str = "RTX 4090"
    num_gpus: int = 1
    gpu_ram: float = 24_564
    disk_space: float = 400.0
    usd_per_hour: float = 0.40
    """Price of the GPU, on demand."""
    min_bid: float = 0.20
    storage_cost: float = 0.18
    """USD for a GB and month."""
    inet_cost: float = 0.005
    """USD for a GB of traffic."""
    geolocation: str | None = "Iceland, IS"
    reliability: float = 0.99
    verified: bool = True
    rentable: bool = True
    rented: bool = False
    external: bool = False
    end_date: float | None = None
    inet_down: float = 800.0
    cpu_cores: int | None = None
    """None, as the live service sometimes answers."""

    def storage_usd_per_hour(self, disk_gb: float) -> float:
        """Return the price of a disk."""
        return disk_gb * self.storage_cost / HOURS_PER_MONTH

    def row(self, now: float, *, disk_gb: float, bid: bool) -> dict[str, Any]:
        """Return the row of a search. `bid`: priced as an interruptible instance at the lowest bid."""
        base, storage = self.min_bid if bid else self.usd_per_hour, self.storage_usd_per_hour(disk_gb)
        end_date = now + CONTRACT_S if self.end_date is None else self.end_date
        return {
            "id": self.id,
            "ask_contract_id": self.id,
            "bundle_id": self.id + 1,
            "machine_id": self.machine_id,
            "host_id": self.machine_id + 1000,
            "public_ipaddr": "198.51.100.7",
            "hosting_type": 0,
            "geolocation": self.geolocation,
            "gpu_name": self.gpu_name,
            "num_gpus": self.num_gpus,
            "gpu_ram": self.gpu_ram,
            "gpu_total_ram": self.gpu_ram * self.num_gpus,
            "gpu_frac": 1.0,
            "compute_cap": 890,
            "cuda_max_good": 12.8,
            "driver_version": "570.86.15",
            "dlperf": 80.0,
            "dlperf_per_dphtotal": 80.0 / max(base + storage, 0.001),
            "cpu_cores": self.cpu_cores,
            "cpu_cores_effective": 8.0,
            "cpu_name": None,
            "cpu_ram": 64_000,
            "disk_space": self.disk_space,
            "disk_name": "nvme",
            "disk_bw": 2000.0,
            "pci_gen": 4.0,
            "pcie_bw": 24.0,
            "inet_up": 500.0,
            "inet_down": self.inet_down,
            "direct_port_count": 20,
            "static_ip": True,
            "vms_enabled": False,
            "dph_base": base,
            "dph_total": base + storage,
            "min_bid": self.min_bid,
            "storage_cost": self.storage_cost,
            "storage_total_cost": storage,
            "inet_up_cost": self.inet_cost,
            "inet_down_cost": self.inet_cost,
            "reliability": self.reliability,
            "reliability2": self.reliability,
            "verification": "verified" if self.verified else "unverified",
            "score": self.reliability * 100 - base,
            "duration": end_date - now,
            "time_remaining": "",
            "end_date": end_date,
            "rentable": self.rentable,
            "rented": self.rented,
            "external": self.external,
            "is_bid": bid,
            "flops_per_dphtotal": 1.0,
            "total_flops": 80.0,
        }


def search(asks: list[FakeAsk], body: Any, now: float) -> list[dict[str, Any]]:
    """Return the rows that fit, in the asked order. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body is not an object")
    kind = body.get("type", "on-demand")
    if kind not in TYPES:
        raise BadRequest(f"type {kind!r} is unknown")
    disk_gb = body.get("allocated_storage", 5.0)
    if not isinstance(disk_gb, int | float) or isinstance(disk_gb, bool) or disk_gb < 0:
        raise BadRequest("allocated_storage is not a number")
    rows = [one.row(now, disk_gb=disk_gb, bid=kind in ("bid", "interruptible")) for one in asks]
    filters = {name: value for name, value in body.items() if name not in CONTROLS}
    known = FakeAsk(0, 0).row(now, disk_gb=5, bid=False)
    for name, wanted in filters.items():
        # The filter `verified` is true or false; the column `verification` is a text.
        if name not in known and name != "verified":
            raise BadRequest(f"unknown column {name}")
        if not isinstance(wanted, dict):
            raise BadRequest(f"the filter of {name} is not an object of operators")
        if unknown := set(wanted) - set(OPERATORS):
            raise BadRequest(f"unknown operator {sorted(unknown)} for {name}")
    fitting = [row for row in rows if all(_fits(row, name, wanted) for name, wanted in filters.items())]
    for column, direction in reversed(body.get("order", [["score", "desc"]])):
        if column not in known or direction not in DIRECTIONS:
            raise BadRequest(f"cannot order by {column} {direction}")
        fitting.sort(key=lambda row: row[column], reverse=direction == "desc")
    limit = body.get("limit", 64)
    if not isinstance(limit, int) or limit < 1:
        raise BadRequest("limit is not a positive integer")
    return fitting[:limit]


def _fits(row: Mapping[str, Any], name: str, wanted: Mapping[str, Any]) -> bool:
    value = row["verification"] == "verified" if name == "verified" else row[name]
    # A comparison with null is never true, as in SQL.
    return value is not None and all(OPERATORS[key](value, _typed(value, bound)) for key, bound in wanted.items())


def _typed(value: Any, bound: Any) -> Any:
    """Return the bound in the column's type, because `vastai` sends numbers as texts. Raises BadRequest."""
    if isinstance(bound, str) and not isinstance(value, str):
        try:
            return float(bound)
        except ValueError as error:
            raise BadRequest(f"{bound!r} is not a number") from error
    return bound
