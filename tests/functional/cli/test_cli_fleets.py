"""`baton fleet`: apply, ls, show, watch, stop, receipts, events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import FleetEventView, FleetPage, FleetView, MachineView
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import Unreachable
from tests.functional.cli.people import Baton
from tests.kits.stack.stack import Stack
from tests.unit.cli.cli_kit import NOW
from tests.unit.cli.test_cli_fleet_view import a_fleet, a_machine, a_receipt

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

DOCUMENT = """\
name: %s
providers: [loopback]
max_usd_per_hour: 0.5
budget:
  total_usd: 20
"""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(DOCUMENT % "nights")
    return file


def test_without_a_fleet_the_list_says_how_to_make_one(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatonClient, "fleets", lambda _client: FleetPage(fleets=[]))
    assert "baton fleet apply FILE" in baton("fleet", "ls").ok().err


def test_a_fleet_that_cannot_be_read_is_named_below_the_list(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "A record of fleet nights of tenant default cannot be read"
    monkeypatch.setattr(BatonClient, "fleets", lambda _client: FleetPage(fleets=[], damaged=[line]))
    assert baton("fleet", "ls").ok().err == f"{line}\n"
    listed = baton("fleet", "ls", "--json").ok()
    assert (listed.json, listed.err) == ([], f"{line}\n")


def test_the_life_of_a_fleet(baton: Baton, document: Path) -> None:
    # Jobs of other tests wait in the queue `default`, for which the fleet would rent.
    text = (DOCUMENT % "nights") + "queues: [without-jobs]\n"
    document.write_text(text)
    said = baton("fleet", "apply", document).ok().out
    assert said.startswith("Fleet nights is active: up to 1 machine of loopback, 0.50 USD/h at most; budget 20.00 USD")
    # Jobs of other tests rent by fleets of their own.
    (listed,) = [one for one in baton("fleet", "ls", "--json").ok().json if one["spec"]["name"] == "nights"]
    assert not listed["stopped"]
    (row,) = [line.split() for line in baton("fleet", "ls").ok().out.splitlines() if line.startswith("nights")]
    assert " ".join(row).startswith("nights active 0 of 1 0.00")
    shown = baton("fleet", "show", "nights").ok().out
    assert "in total" in shown and "20.00" in shown
    assert baton("fleet", "show", "nights", "--json").ok().json["spec"] == listed["spec"]
    assert baton("fleet", "show", "nights", "--document").ok().out.startswith("name: nights\nproviders:\n- loopback\n")
    assert "No machine of fleet nights has ended" in baton("fleet", "receipts", "nights").ok().err
    assert baton("fleet", "receipts", "nights", "--json").ok().json == []
    assert "Nothing has happened in fleet nights" in baton("fleet", "events", "nights").ok().err

    assert baton("fleet", "stop", "nights").ok().out == "Fleet nights is stopped; no machine is rented.\n"
    assert baton("fleet", "watch", "nights").ok().out.startswith("nights stopped, 0 of 1, 0.00 USD/h, 0.00 of 20.00")
    (line,) = baton("fleet", "watch", "nights", "--json").ok().lines
    assert line["stopped"]
    assert baton("fleet", "stop", "nights", "--json").ok().json["stopped"]
    document.write_text(text.replace("0.5", "0.6"))
    again = baton("fleet", "apply", document, "--json").ok().json
    assert (again["stopped"], again["spec"]["max_usd_per_hour"]) == (False, 0.6)


def test_the_faults_of_a_document_have_places(baton: Baton, document: Path, tmp_path: Path) -> None:
    document.write_text(
        "name: Nights\n"
        "providers: [loopback, aws]\n"
        "idle_timeout: 60\n"
        "max_usd_per_hour: cheap\n"
        "min: 3\n"
        "max: 2\n"
        "budget: {total: 5}\n"
    )
    baton("fleet", "apply", document).refused(
        2,
        f"{document} has 6 faults",
        f"{document}:1:1: name: cannot be a name. Use up to 32 lower-case letters, digits and hyphens, a letter first.",
        f"{document}:2:23: providers.1: input should be 'loopback', 'vast', 'salad', 'runpod', 'ec2' or 'ssh'. "
        "Change the value accordingly.",
        f"{document}:3:1: idle_timeout: is not a field of fleets. Did you mean 'idle_timeout_s'?",
        f"{document}:4:1: max_usd_per_hour: must be a number, not text. Write a value of that type.",
        f"{document}:6:1: max: is 2, less than min (3). Change the value accordingly.",
        f"{document}:7:10: budget.total: is not a field of fleets. Did you mean 'total_usd'?",
    )
    document.write_text("name: n\nproviders: loopback\nmax_usd_per_hour: 1\nmin: few\nbudget: 20\n")
    baton("fleet", "apply", document).refused(
        2,
        f"{document} has 3 faults",
        f"{document}:2:1: providers: must be a list, not text. Write [loopback].",
        f"{document}:4:1: min: must be a whole number, not text. Write a value of that type.",
        f"{document}:5:1: budget: must be fields with values, not a number. Write fields like '{{total_usd: ...}}'; "
        "there are total_usd, per_day_usd, per_month_usd.",
    )
    document.write_text("- nights\n")
    baton("fleet", "apply", document).refused(
        2,
        f"{document} has 1 fault",
        f"{document}:1:1: the document is not a fleet. Write fields like 'name: nights', 'providers: [loopback]', "
        "'max_usd_per_hour: 0.5', 'budget: {...}'.",
    )
    document.write_text("name: [\n")
    assert "not YAML" in baton("fleet", "apply", document).err
    baton("fleet", "apply", tmp_path / "none.yaml").failed(2, "cannot be read")


def test_refusals_name_the_remedy(baton: Baton, document: Path, stack: Stack) -> None:
    for command in ("show", "watch", "stop", "receipts", "events"):
        baton("fleet", command, "unknown").failed(3, "fleet_not_found", "baton fleet ls")
    baton("fleet", "events", "nights", "--limit", "1001").failed(2, "At most 1,000 events")
    worker = {"BATON_API_URL": stack.url, "BATON_API_KEY": stack.keys["worker"]}
    baton("fleet", "apply", document, **worker).failed(3, "wrong_scope", "submit")


def test_watching_shows_each_change_until_nothing_is_rented(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = a_fleet(stopped=True)
    looks: list[FleetView | Unreachable] = [
        a_fleet(a_machine("booting")),
        a_fleet(a_machine("booting", spent_usd=0.32), at=NOW + 60),
        *[Unreachable("no answer")] * 2,
        a_fleet(a_machine("draining"), stopped=True),
    ]

    def following() -> Iterator[FleetView | Unreachable]:
        yield from [*looks, ended]

    answers = following()

    def look(_client: BatonClient, name: str) -> FleetView:
        found = next(answers)
        if isinstance(found, Unreachable):
            raise found
        return found

    monkeypatch.setattr(BatonClient, "fleet", look)
    baton.session_options["sleep"] = lambda _seconds: None
    said = baton("fleet", "watch", "nights").ok()
    first, outage, second = said.err.splitlines()
    assert first.startswith("nights active, 1 of 4: 1 booting") and "Retrying" in outage
    assert second.startswith("nights stopping, 1 of 4: 1 draining")
    assert said.out.startswith("nights stopped, 0 of 4")
    answers = following()
    assert len(baton("fleet", "watch", "nights", "--json").ok().lines) == 4


def test_stopping_says_how_many_machines_are_given_back(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = a_fleet(a_machine(), a_machine("ready"), stopped=True)
    monkeypatch.setattr(BatonClient, "stop_fleet", lambda _client, name: stopping)
    said = baton("fleet", "stop", "nights").ok().out
    assert said == "Fleet nights stops: 2 machines are given back. Follow: baton fleet watch nights\n"


def test_receipts_and_events(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = a_machine("gone", receipt=a_receipt(charged_usd=0.29), reason="no job for idle_timeout_s")
    asked: list[int] = []

    def ended(_client: BatonClient, name: str, *, limit: int) -> list[MachineView]:
        asked.append(limit)
        return [gone] * (limit if len(asked) > 1 else 1)

    monkeypatch.setattr(BatonClient, "ended_machines", ended)
    heading, row, total = baton("fleet", "receipts", "nights").ok().out.splitlines()
    assert heading.split("  ")[0] == "machine" and row.split()[0] == gone.id
    assert total.split() == ["total", "1", "machine", "0.31", "0.29"]
    assert "Only the newest 1,000 machines" in baton("fleet", "receipts", "nights").ok().err

    told = [
        FleetEventView(at=2, type="machine.gone", machine=gone.id, reason="stopped", usd=0.31),
        FleetEventView(at=1, type="machine.ready", machine=gone.id),
    ]
    monkeypatch.setattr(BatonClient, "fleet_events", lambda _client, name, *, limit: told[:limit])
    heading, first, second = baton("fleet", "events", "nights").ok().out.splitlines()
    assert "machine.ready" in first and "machine.gone" in second and second.split()[-2:] == ["0.31", "stopped"]
    (only,) = baton("fleet", "events", "nights", "--limit", "1", "--json").ok().json
    assert only["type"] == "machine.gone"


def test_a_plan_and_offers_before_anything_is_rented(baton: Baton, document: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: shout\ncommand: ['true']\nqueue: unheard\n")
    document.write_text((DOCUMENT % "planned") + "queues: [unheard]\n")
    said = baton("fleet", "plan", document, "--job", job, "--hours", "2").ok().out
    assert said.startswith("plan    planned would start ") and "jobs    1 job can run" in said
    planned = baton("fleet", "plan", document, "--job", job, "--json").ok().json
    assert [(one["job"], one["hours_from"]) for one in planned["works"]] == [(None, "assumed")]
    baton("fleet", "show", "planned").failed(3, "fleet_not_found")
    baton("offers", "--provider", "loopback").ok()
    (silent,) = baton("offers", "--provider", "vast", "--json").ok().json["silent"]
    assert silent["provider"] == "vast"
    baton("offers", "--hours", "0", "--gpu", "x" * 65).refused(
        2,
        "invalid options",
        "--gpu: string should have at most 64 characters",
        "--hours: input should be greater than 0",
    )
    baton("fleet", "plan", document, "--hours", "nan").failed(2, "--hours")
