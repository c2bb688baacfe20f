"""Lines and tables of `baton fleet`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.contract.fleets.fleet import FleetSpec, FleetView, MachineMeasurements, MachineView
from gpu_client.cli.core.formats import moment
from gpu_client.cli.core.output import CommandOutput, build_table
from gpu_client.cli.fleet.document import dump_fleet, read_fleet
from gpu_client.cli.fleet.view import (
    RECEIPTS,
    deployment_text,
    fleet_row,
    has_ended,
    headline,
    receipt_rows,
    render,
    replacement,
    standing_text,
    summary,
    usd,
)
from tests.unit.cli.cli_kit import ID, NOW

SPEC: dict[str, Any] = {
    "name": "nights",
    "providers": ["loopback"],
    "gpu_models": ["RTX 4090"],
    "min_vram_gib": 20,
    "max": 4,
    "max_usd_per_hour": 0.5,
    "budget": {"total_usd": 20, "per_day_usd": 5},
}
TOTAL = {"name": "total_usd", "cap_usd": 20, "spent_usd": 1.25, "reserved_usd": 0.8}
DAY = {"name": "per_day_usd", "period": "2026-09-21", "cap_usd": 5, "spent_usd": 1.25, "reserved_usd": 0.8}


def a_machine(state: str = "busy", **more: Any) -> MachineView:
    values: dict[str, Any] = {
        "id": "a1b2c3d4-nights-9f8e7d6c5b4a",
        "fleet": "nights",
        "state": state,
        "provider": "loopback",
        "gpu_model": "RTX 4090",
        "usd_per_hour": 0.4,
        "spent_usd": 0.31,
        "since": NOW - 120,
    }
    return MachineView.model_validate({**values, **more})


def a_receipt(**more: Any) -> dict[str, Any]:
    known = {"requested_at": NOW - 4000, "created_at": NOW - 3990, "quoted_usd_per_hour": 0.4, "observed_usd": 0.31}
    return {**known, "absent_at": [NOW, NOW + 60], **more}


def a_fleet(*machines: MachineView, **more: Any) -> FleetView:
    times = {"created_at": NOW - 9000, "updated_at": NOW - 9000, "at": NOW}
    return FleetView.model_validate({"spec": SPEC, "bounds": [TOTAL, DAY], "machines": machines, **times, **more})


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0.00"),
        (0.00314, "0.0031"),
        (0.31, "0.31"),
        (0.314159, "0.3142"),
        (0.30001, "0.30"),
        (1, "1.00"),
        (1234.567, "1,234.57"),
    ],
)
def test_money(amount: float, text: str) -> None:
    assert usd(amount) == text


def test_what_a_fleet_permits() -> None:
    money = "0.50 USD/h each at most; budget 20.00 USD in total, 5.00 USD a day"
    assert summary(FleetSpec.model_validate(SPEC)) == f"up to 4 machines of loopback, {money}"
    one = FleetSpec.model_validate({**SPEC, "max": 1, "min": 1, "budget": {"per_month_usd": 30}})
    assert summary(one) == "up to 1 machine of loopback, at least 1, 0.50 USD/h at most; budget 30.00 USD a month"


def test_a_document_in_place_of_another_names_each_change_and_the_money() -> None:
    assert list(replacement(a_fleet())) == []
    before = {"spec": SPEC, "stopped": True, "spent_usd": 0}
    assert list(replacement(a_fleet(replaced=before))) == [], "the same document again"
    earlier = {**SPEC, "providers": ["ssh"], "gpu_models": [], "max_usd_per_hour": 0.8, "budget": {"per_month_usd": 30}}
    lost = {"spec": earlier, "stopped": False, "spent_usd": 0.58, "given_back": ["m1", "m2"]}
    machines = [a_machine(id=name, provider="ssh") for name in ("m1", "m2")]
    assert list(replacement(a_fleet(*machines, a_machine(), replaced=lost))) == [
        "The document replaces an earlier one: providers ssh -> loopback; gpu_models any -> RTX 4090; max_usd_per_hour "
        "0.8 -> 0.5; budget 30.00 USD a month -> 20.00 USD in total, 5.00 USD a day.",
        "2 machines of ssh are given back.",
        "0.58 USD are spent already and count against the budget.",
    ]


def test_a_fleet_on_one_line() -> None:
    fleet = a_fleet(a_machine(), a_machine(), a_machine("planned"), waits="no offer fits", spent_usd=7.5)
    assert headline(fleet) == (
        "active, 3 of 4: 2 busy, 1 planned, 0.80 USD/h, 1.25 of 20.00 USD in total, 1.25 of 5.00 USD a day; "
        "waits: no offer fits"
    )
    assert fleet_row(fleet) == [
        "nights",
        "active",
        "3 of 4: 2 busy, 1 planned",
        "0.80",
        "7.50",
        "1.25 of 5.00 USD a day",
        "no offer fits",
    ]


def test_a_bound_of_the_whole_deployment_is_named() -> None:
    whole = {**DAY, "cap_usd": 1.5, "scope": "deployment"}
    fleet = a_fleet(bounds=[TOTAL, whole])
    assert headline(fleet).endswith("1.25 of 1.50 USD a day, deployment")
    assert fleet_row(fleet)[4:6] == ["0.00", "1.25 of 20.00 USD in total"]
    assert deployment_text([fleet, fleet]) == "All fleets of the deployment have spent 1.25 of 1.50 USD a day."
    assert deployment_text([a_fleet()]) == deployment_text([]) == ""


def test_machines_without_jobs_are_no_surprise() -> None:
    assert standing_text(FleetSpec.model_validate(SPEC)) == ""
    text = standing_text(FleetSpec.model_validate({**SPEC, "min": 2}))
    assert text == "min is 2: 2 machines are rented also without jobs, for up to 24.00 USD a day within the budget."


def test_a_printed_document_is_the_stored_one(tmp_path: Path) -> None:
    spec = FleetSpec.model_validate(SPEC)
    file = tmp_path / "nights.yaml"
    file.write_text(dump_fleet(spec))
    assert read_fleet(file) == spec and file.read_text().splitlines()[:2] == ["name: nights", "providers:"]
    assert "idle_timeout_s" not in file.read_text(), "it has its default"


def test_a_fleet_ends_with_its_last_machine() -> None:
    assert not has_ended(a_fleet())
    stopping = a_fleet(a_machine("terminating"), stopped=True)
    assert (has_ended(stopping), fleet_row(stopping)[1]) == (False, "stopping")
    stopped = a_fleet(stopped=True)
    assert (has_ended(stopped), fleet_row(stopped)[1]) == (True, "stopped")


def test_a_fleet_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    measured = MachineMeasurements(driver="580.65.06", disk_write_mb_s=850.2, download_mbit_s=412)
    working = a_machine(job_id=ID, measured=measured)
    fleet = a_fleet(working, a_machine("draining", reason="the budget is spent"), waits="no offer fits")
    CommandOutput().print(render(fleet))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "fleet nights"
    assert "machines RTX 4090, 20 GiB VRAM or more, 40 GiB disk" in lines
    assert "ends after 300 s without a job, at the latest after 24 h" in lines
    assert "waits no offer fits" in lines
    at = lines.index("budget period USD spent reserved left")
    assert lines[at + 1 : at + 3] == ["in total 20.00 1.25 0.80 17.95", "a day 2026-09-21 5.00 1.25 0.80 2.95"]
    at = lines.index("machine state for GPU driver write MB/s down Mbit/s USD/h spent job reason")
    machine = "a1b2c3d4-nights-9f8e7d6c5b4a"
    assert lines[at + 1 :] == [
        f"{machine} busy 2 min RTX 4090 580.65.06 850 412 0.40 0.31 {ID[:8]}",
        f"{machine} draining 2 min RTX 4090 0.40 0.31 the budget is spent",
    ]


RECEIPTS_OF_TWO = [
    a_machine("gone", id="yc8hey8e-rent-bee3888f-c7d077938487", receipt=a_receipt(charged_usd=0.0833), reason="why"),
    a_machine("gone", id="lqp8xuki-nights-8059a939343e", receipt=a_receipt(observed_usd=0.0867), reason="the job ends"),
]


@pytest.mark.parametrize("width", [72, 80, 120])
def test_receipts_never_cut_money(width: int) -> None:
    text = io.StringIO()
    Console(file=text, width=width).print(build_table(RECEIPTS, list(receipt_rows(RECEIPTS_OF_TWO))))
    heading, *lines = text.getvalue().splitlines()
    assert heading.split()[2:5] == ["USD/h", "observed", "charged"]
    assert "reason" in heading and "\N{HORIZONTAL ELLIPSIS}" not in text.getvalue()
    assert max(map(len, [heading, *lines])) <= width
    squeezed = [" ".join(line.split()) for line in lines]
    for amounts in ("0.40 0.31 0.0833", "0.40 0.0867", "0.3967 0.0833 (1 of 2)"):
        assert any(amounts in line for line in squeezed), amounts
    assert ("not listed" in heading, f"{moment(NOW)[11:]} + 1 min" in text.getvalue()) == (width == 120, width == 120)


def test_receipts_have_a_total_of_what_is_known() -> None:
    refused = a_machine("failed", receipt=a_receipt(requested_at=None, observed_usd=0, absent_at=[]), reason="gone")
    unlisted = a_machine("failed", receipt=a_receipt(observed_usd=0, absent_at=[]))
    machines = [a_machine("gone", receipt=a_receipt(charged_usd=0.29)), refused, unlisted]
    *rows, total = receipt_rows(machines)
    assert [len(row) for row in (*rows, total)] == [len(RECEIPTS)] * 4
    assert rows[0][2:5] == ["0.40", "0.31", "0.29"]
    assert rows[0][5] == f"{moment(NOW)[11:]} + 1 min"
    assert (rows[1][4:], rows[2][5]) == (["", "never created", "gone"], "never made")
    assert total == ["total", "3 machines", "", "0.31", "0.29 (1 of 3)", "", ""]
    *_, total = receipt_rows([refused])
    assert total == ["total", "1 machine", "", "0.00", "", "", ""]
