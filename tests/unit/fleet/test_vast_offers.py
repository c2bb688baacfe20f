"""Vast.ai's asks as offers: names of GPUs, bids, prices, tolerances, hostile numbers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from baton.contract.fleets.fleet import FleetSpec
from functions.domain.jobs.job_selection import names_model
from functions.fleet.drivers.vast.wire import Ask, Charge, Instance, PriceIncrease, best_bid, disk_gb, gpu_model

NOW = 1_700_000_000.0
ROW: dict[str, Any] = {
    "id": 7,
    "machine_id": 12,
    "gpu_name": "RTX 4090",
    "num_gpus": 1,
    "gpu_ram": 24_564,
    "disk_space": 200.0,
    "driver_version": "570.86.15",
    "dph_total": 0.41,
    "min_bid": 0.2,
    "storage_cost": 0.18,
    "inet_up_cost": 0.002,
    "inet_down_cost": 0.004,
    "inet_down": 400.0,
    "geolocation": "North Carolina, US",
    "reliability2": 0.976,
    "duration": 7200.0,
    "end_date": None,
    "cpu_cores": None,
}


def spec(**changes: Any) -> FleetSpec:
    document = {
        "name": "nights",
        "providers": ["vast"],
        "image": "registry.example/agent:1",
        "disk_gib": 40,
        "max_usd_per_hour": 0.5,
        "budget": {"total_usd": 10},
        **changes,
    }
    return FleetSpec.model_validate(document)


def offer(bid: bool = False, **changes: Any) -> Any:
    return Ask.model_validate({**ROW, **changes}).offer(spec(), NOW, bid=bid)


@pytest.mark.parametrize(
    ("name", "on_the_machine"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("RTX_3090", "NVIDIA GeForce RTX 3090"),
        ("RTX 6000Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("RTX 4070S Ti", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("RTX 4080S", "NVIDIA GeForce RTX 4080 SUPER"),
        ("Q RTX 8000", "Quadro RTX 8000"),
        ("A100 SXM4", "NVIDIA A100-SXM4-80GB"),
        ("A100 PCIE", "NVIDIA A100 80GB PCIe"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3"),
        ("H100 NVL", "NVIDIA H100 NVL"),
        ("L40S", "NVIDIA L40S"),
        ("Tesla V100", "Tesla V100-SXM2-16GB"),
        ("RTX PRO 6000 WS", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    ],
)
def test_names_of_gpus_fit_those_of_the_machine(name: str, on_the_machine: str) -> None:
    assert names_model(gpu_model(name), on_the_machine)


@pytest.mark.parametrize(
    ("least", "most", "bid"),
    [
        (0.2, 0.5, 0.22),
        (0.2, 0.21, 0.21),
        (0.2, 0.2, 0.2),
        (0.2, 0.19, 0.2),  # Above the cap: the ranking rejects the offer.
        (0.12345, 0.5, 0.1358),
        (0.2, 0.21005, 0.21),
    ],
)
def test_a_bid_outbids_the_lowest_within_the_cap(least: float, most: float, bid: float) -> None:
    assert best_bid(least, most) == bid


def test_an_ask_is_an_offer_with_its_disk_traffic_place_and_end() -> None:
    one = offer()
    assert (one.provider, one.ref, one.machine_ref, one.spot) == ("vast", "7", "12", False)
    assert (one.usd_per_hour, one.usd_per_gb, one.gpus) == (0.41, 0.004, 1)
    assert one.regions == ["US", "North-Carolina"]
    assert one.ends_at == NOW + 7200
    assert offer(end_date=NOW + 60.5).ends_at == NOW + 60
    assert one.interruptions_per_hour == pytest.approx(0.001)
    assert (one.boot_s, offer(inet_down=None).boot_s) == (210, 2490)
    assert one.disk_gib == pytest.approx(186.26, abs=0.01)
    assert (one.driver, one.download_mbit_s) == ("570.86.15", 400)
    assert offer(driver_version="n/a").driver is offer(driver_version=None).driver is None
    assert (disk_gb(1), disk_gb(40)) == (8, 43)


def test_a_bid_costs_the_bid_and_the_disk() -> None:
    one = offer(bid=True)
    assert (one.ref, one.spot) == ("7@0.2200", True)
    assert one.place == offer().place == ("vast", "7"), "the host sells one machine"
    assert one.usd_per_hour == pytest.approx(0.22 + 43 * 0.18 / 720)


@pytest.mark.parametrize(("gpu_ram", "wanted", "vram_gib"), [(46_068, 48, 48), (24_564, 24, 24), (45_000, 48, 43.95)])
def test_a_gpu_that_reports_a_little_less_vram_counts_as_the_wanted_size(
    gpu_ram: float, wanted: float, vram_gib: float
) -> None:
    ask = Ask.model_validate({**ROW, "gpu_ram": gpu_ram})
    assert ask.offer(spec(min_vram_gib=wanted), NOW, bid=False).vram_gib == pytest.approx(vram_gib, abs=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"dph_total": float("nan")},
        {"dph_total": -0.1},
        {"dph_total": None},
        {"gpu_ram": float("inf")},
        {"storage_cost": -1},
        {"num_gpus": 0},
        {"num_gpus": 0.5},
        {"id": "seven"},
    ],
)
def test_an_ask_with_impossible_values_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        offer(**changes)


@pytest.mark.parametrize(
    ("row", "running", "message"),
    [
        ({"actual_status": None}, True, ""),
        ({"actual_status": "created"}, True, ""),
        ({"actual_status": "created", "status_msg": "x: OCI runtime create failed: y"}, False, "cannot start"),
        ({"actual_status": "loading"}, True, ""),
        ({"actual_status": "running"}, True, ""),
        ({"actual_status": "rebooting"}, True, ""),
        ({"actual_status": "recycling"}, True, ""),
        ({"actual_status": "unknown"}, True, ""),
        ({"actual_status": "a status of next year"}, True, ""),
        ({"actual_status": "stopped", "intended_status": "running"}, False, "is stopped"),
        (dict.fromkeys(("actual_status", "intended_status", "cur_state", "next_state"), "stopped"), False, "outbid"),
        ({"actual_status": "frozen"}, False, "costs as much"),
        ({"actual_status": "exited"}, False, "has ended"),
        ({"actual_status": "offline"}, False, "offline"),
    ],
)
def test_a_status_ends_a_machine_only_if_the_status_proves_the_end(
    row: dict[str, Any], running: bool, message: str
) -> None:
    one = Instance.model_validate({"id": 1, "label": "t", "dph_total": 0.4, "storage_total_cost": 0.01, **row})
    seen = one.sighting()
    assert (seen.running, message in seen.message, bool(seen.message)) == (running, True, not running)
    disk_alone = row["actual_status"] in ("stopped", "exited")
    assert seen.usd_per_hour == (0.01 if disk_alone else 0.4)


def test_a_price_increase_counts_only_the_parts_that_change() -> None:
    row = {"pending_price_increase_id": 1, "contract_id": 2, "old_gpu_costpersec": 0.3 / 3600}
    assert PriceIncrease.model_validate(row).usd_per_hour(0.35) == 0.35
    row |= {"new_gpu_costpersec": 0.4 / 3600}
    assert PriceIncrease.model_validate(row).usd_per_hour(0.35) == pytest.approx(0.45)


def test_rows_of_the_public_reference_are_read() -> None:
    """Rows as docs.vast.ai/api-reference shows them: `show instances (v1)`, `show charges`."""
    instance = {
        "id": 312,
        "actual_status": "running",
        "cur_state": "running",
        "next_state": "running",
        "intended_status": "running",
        "label": "ML Training Job 2025",
        "template_id": 2048,
        "extra_env": [["DOG", "CAT"], ["-p 70001:70001", "1"]],
        "status_msg": "success, running nvidia/cuda_11.0.3-devel-ubuntu18.04/ssh",
        "machine_id": 12,
        "start_date": 1668804745.1223178,
        "end_date": 1735689600,
        "uptime_mins": None,
        "duration": -25323348.860099316,
    }
    seen = Instance.model_validate(instance).sighting()
    assert (seen.handle, seen.token, seen.running, seen.machine_ref) == ("312", "ML Training Job 2025", True, "12")
    charge = {
        "start": 1730419200,
        "end": 1730678400,
        "type": "instance",
        "source": "instance-12345678",
        "description": "Instance 12345678 Charges - 4 days",
        "amount": 38.421,
        "metadata": {"template_id": 101, "label": "my-training-job", "endpoint_id": 19392, "workergroup_id": 25355},
        "items": [{"type": "gpu", "source": None, "amount": 37.344, "metadata": {}, "items": []}],
    }
    assert Charge.model_validate(charge).amount == 38.421
