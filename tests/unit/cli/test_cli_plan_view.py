"""Pages of `baton fleet plan` and `baton offers`."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.plan import FleetPlan, OfferPage, OfferView
from gpu_client.cli.core.formats import moment
from gpu_client.cli.fleet.plan_view import offers_page, plan_page
from gpu_client.cli.fleet.view import usd
from tests.unit.cli.cli_kit import ID, NOW
from tests.unit.cli.test_cli_fleet_view import SPEC

COST = {"total": 0.4212, "machine": 0.4, "traffic": 0.0012, "boot": 0.01, "lost": 0.01, "hours": 2.1}


def an_offer(ref: str, **more: Any) -> OfferView:
    values: dict[str, Any] = {
        "provider": "vast",
        "ref": ref,
        "gpu_model": "RTX 4090",
        "vram_gib": 24,
        "spot": True,
        "regions": ["SE", "se-north"],
        "usd_per_hour": 0.2,
        "expected": COST,
    }
    return OfferView.model_validate({**values, **more})


def a_plan(**more: Any) -> FleetPlan:
    values: dict[str, Any] = {
        "start": 1,
        "why": "max is 1",
        "alive": 0,
        "works": [{"job": ID, "hours": 2, "hours_from": "history"}, {"hours": 1, "hours_from": "assumed"}],
        "unservable": [{"job": ID, "reason": "needs 80 GiB VRAM, fleet nights guarantees 20"}],
        "room_usd": 20,
        "room_bound": "per_day_usd",
        "paid_hours": 100,
        "usd": {"low": 0.38, "expected": 0.45, "high": 0.61},
        "hours": {"low": 1.9, "expected": 2.1, "high": 2.75},
        "offers": [
            an_offer("a", taken=1),
            an_offer("b", usd_per_hour=0.21, spot=False, gpus=2),
            an_offer("c", provider="loopback", gpu_model=None, rejected="0.9 USD/h exceeds max_usd_per_hour 0.5"),
        ],
        "silent": [{"provider": "salad", "reason": "HTTP 502 with an HTML page"}],
        "at": NOW,
    }
    return FleetPlan.model_validate({**values, **more})


def drawn(page: RenderableType, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(page)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_plan_reads_well_at_120_columns() -> None:
    lines = drawn(plan_page(FleetSpec.model_validate(SPEC), a_plan()), 120)
    assert lines[:6] == [
        "plan    nights would start 1 machine now; max is 1",
        "jobs    2 jobs can run, 1 cannot",
        "budget  20.00 USD left today, 100.0 hours of the first machine below",
        "cost    0.38 to 0.61 USD, expected 0.45",
        f"finish  after 1 h 54 min to 2 h 45 min: {moment(NOW + 6840)[:16]} to {moment(NOW + 9900)[:16]}",
        "hours   unknown for 1 job, 1 h is assumed; give --hours",
    ]
    assert lines[6:] == [
        "",
        "starts on, with the expected USD",
        "provider  machine                           USD/h   total  work  traffic  boot  lost",
        "vast      RTX 4090 24 GiB spot SE se-north   0.20  0.4212  0.40   0.0012  0.01  0.01",
        "",
        "further offers",
        "provider  machine                         USD/h   total  work  traffic  boot  lost",
        "vast      2x RTX 4090 24 GiB SE se-north   0.21  0.4212  0.40   0.0012  0.01  0.01",
        "",
        "rejected",
        "provider  machine                  USD/h  reason",
        "loopback  no GPU spot SE se-north   0.20  0.9 USD/h exceeds max_usd_per_hour 0.5",
        "",
        "jobs that this fleet cannot run",
        "job       reason",
        "146683a1  needs 80 GiB VRAM, fleet nights guarantees 20",
        "",
        "providers without an answer",
        "provider  reason",
        "salad     HTTP 502 with an HTML page",
    ]


def test_a_plan_keeps_numbers_and_places_whole_at_80_columns() -> None:
    lines = drawn(plan_page(FleetSpec.model_validate(SPEC), a_plan()), 80)
    assert max(len(line) for line in lines) <= 80
    at = lines.index("vast      RTX 4090 24 GiB spot SE        0.20  0.4212  0.40   0.0012  0.01  0.01")
    assert lines[at + 1].split() == ["se-north"]


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"start": 2, "offers": [an_offer("a", taken=2)]}, "2 of RTX 4090 24 GiB"),
        ({"usd": {"low": 9, "expected": 15, "high": 21}}, "expected 15.00; the budget may end before the jobs"),
        ({"start": 0, "usd": None, "hours": None, "paid_hours": None}, "budget  20.00 USD left today"),
        ({"room_bound": "total_usd of the deployment"}, "20.00 USD left in total of the deployment, 100.0 hours"),
        ({"waits": "vast: provider_credit_exhausted"}, "last tick  started none: vast: provider_credit_exhausted"),
        ({"unservable": [{"reason": "needs 8 GPUs"}]}, "the new   needs 8 GPUs"),
        ({"offers": [an_offer(str(at)) for at in range(20)]}, "and 8 more: --json lists all"),
    ],
)
def test_the_lines_of_a_plan(more: dict[str, Any], part: str) -> None:
    assert any(part in line for line in drawn(plan_page(FleetSpec.model_validate(SPEC), a_plan(**more)), 120))


def test_a_plan_without_jobs_has_no_line_about_jobs() -> None:
    page = plan_page(FleetSpec.model_validate(SPEC), a_plan(works=[], unservable=[]))
    assert [line.split()[0] for line in drawn(page, 120)[:3]] == ["plan", "budget", "cost"]


def test_a_pause_that_the_plan_names_is_not_repeated_as_that_of_the_last_tick() -> None:
    pause = "only 2 of 3 nodes could be rented within 30 minutes; next try at 14:20 UTC"
    page = plan_page(FleetSpec.model_validate(SPEC), a_plan(start=0, why=f"{pause}; one job waits", waits=pause))
    lines = drawn(page, 160)
    assert lines[0] == f"plan    nights would start 0 machines now; {pause}; one job waits"
    assert not any("last tick" in line for line in lines)


def test_offers_are_listed_with_the_parts_of_their_totals() -> None:
    page = OfferPage(offers=[an_offer("a"), an_offer("b", rejected="8 GiB VRAM, min_vram_gib is 24")], omitted=3)
    lines = drawn(offers_page(page), 120)
    assert lines[0] == "offers, with the expected USD" and "total  work  traffic  boot  lost" in lines[1]
    assert "and 3 more: --json lists all" in lines
    small = an_offer("b", rejected="39.6 GiB disk, disk_gib is 40")
    assert lines[-1] != "" and "node" not in lines[-1]
    nodes = OfferPage(offers=[an_offer("a", taken=1), an_offer("b", taken=2, usd_per_hour=0.3)])
    total = usd(3 * nodes.offers[0].expected.total)
    text = f"3 nodes on the first offers: 0.80 USD/h, {total} USD expected in total."
    assert drawn(offers_page(nodes, 3), 120)[-1] == text
    assert drawn(offers_page(nodes, 4), 120)[-1] == "3 of 4 nodes can be rented."
    assert "give --disk" in drawn(offers_page(OfferPage(offers=[small])), 80)[-1]
    assert not any("--disk" in line for line in drawn(offers_page(OfferPage(offers=[small, an_offer("a")])), 80))
    assert drawn(offers_page(OfferPage(offers=[])), 80) == [
        "No offers. Configure a provider with: baton fleet login PROVIDER"
    ]
