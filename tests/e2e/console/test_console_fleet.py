"""Fleets: machines, money, offers, receipts, the doctor, why nothing is rented, stop and rent again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from playwright.sync_api import expect

from baton.contract.fleets.fleet import MachineState
from baton.contract.jobs.job import JobSubmit
from baton.contract.names import Scope
from functions.api.admin.keys import generate_key
from functions.fleet.records import Machine, Offer
from functions.handlers.wiring import SystemRandomness
from functions.storage.dynamodb.tokens import DynamoTokenStore
from tests.e2e.console.desk import Desk
from tests.e2e.console.rentals import Rentals
from tests.e2e.console.scenes import HOSTILE, Scene
from tests.kits.stack.stack import Stack

SHORTAGE = f"total_usd has 0.30 USD left, the cheapest offer needs 0.31 USD; vast: {HOSTILE}"
"""Why a fleet waits, with what a provider may say."""


@dataclass(frozen=True)
class Night:
    """A fleet with machines that work, wait and boot, and receipts; another one whose money has ended."""

    rentals: Rentals
    name: str
    poor: str
    job_id: str
    machines: list[Machine]


@pytest.fixture(scope="module")
def night(stack: Stack) -> Iterator[Night]:
    suffix = uuid4().hex[:6]
    name, poor = f"nights-{suffix}", f"poor-{suffix}"
    with Rentals(stack) as rentals:
        rentals.apply(name, tags={"team": "vision"})
        job_id = Scene(stack, name).submit("rented")
        machines = rentals.night(name, job_id)
        rentals.spend(name, 9.84)
        rentals.apply(poor, budget={"total_usd": 20})
        rentals.spend(poor, 19.7, waits=SHORTAGE)
        yield Night(rentals, name, poor, job_id, machines)


def test_the_list_says_what_each_fleet_has_costs_and_waits_for(reader: Desk, night: Night) -> None:
    page = reader.visit("/fleets")
    row = page.get_by_role("row").filter(has_text=night.name)
    for text in ("active", "team=vision", "3 of 4: 1 with a job, 1 without a job, 1 starting", "$1.04/h", "$9.84 of"):
        expect(row).to_contain_text(text)
    expect(page.get_by_role("row").filter(has_text=night.poor)).to_contain_text(f"No machine is rented: {SHORTAGE}.")
    assert page.locator("main img, main script").count() == 0 and page.title() == "Fleets · Baton"
    reader.examine(page)
    row.get_by_role("link", name=night.name).click()
    expect(page.get_by_role("heading", name=night.name)).to_be_visible()
    assert page.title() == f"Fleet {night.name} · Baton"


def test_a_fleet_shows_money_against_each_bound_and_its_machines(reader: Desk, night: Night) -> None:
    page = reader.visit(f"/fleets/{night.name}")
    money = page.get_by_role("region", name="Money")
    expect(money).to_contain_text("$9.84 spent · $1.04 reserved · $49.12 left · lasts for 2 d 0 h at the present price")
    expect(money).to_contain_text(
        re.compile(r"\$9\.84 spent · \$1\.04 reserved · ~\$1\d\.\d\d expected · \$4\.12 left")
    )
    history = page.get_by_role("region", name="Machines over time").get_by_role("img")
    expect(history).to_have_attribute("aria-label", re.compile(r"[34]\d(\.\d+)? machine-hours with a job, 0\.\d+ mach"))
    machines = page.get_by_role("table", name="Machines")
    expect(machines.get_by_role("row").filter(has_text="b1usy")).to_contain_text("RTX 4090")
    expect(machines.get_by_role("row").filter(has_text="b3oots")).to_contain_text("booting")
    expect(machines.get_by_role("row").filter(has_text="r2eady")).to_contain_text("driver 580.65.06, writes 850 MB/s")
    expect(machines.get_by_role("link", name=night.job_id[:8])).to_have_attribute("href", f"#/jobs/{night.job_id}")
    reader.examine(page)
    machines.get_by_role("button", name=re.compile("^Output of .*b1usy")).click()
    # No account at vast is stored, so the provider cannot be asked.
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("vast")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="7 d").click()
    expect(history).to_have_attribute("aria-label", re.compile(r"^From 21 Nov|^From \d+ \w+, "))


def test_the_budget_of_the_deployment_stands_beside_the_own_bounds(desk: Desk, night: Night) -> None:
    night.rentals.spend_all(120.5, 2.25)
    page = desk.sign_in("/fleets")
    facts = page.locator(".fact").filter(has_text="A month, all fleets of the deployment")
    expect(facts).to_contain_text("$120.50of $500.00")
    page.goto(f"{desk.stack.url}/console#/fleets/{night.name}")
    expect(page.get_by_role("region", name="Money")).to_contain_text("$120.50 spent · $2.25 reserved · $377.25 left")


def test_a_transition_appears_without_a_reload_and_a_quiet_fleet_costs_304(desk: Desk, night: Night) -> None:
    page = desk.sign_in("/fleets")
    statuses: list[int] = []
    path = f"/fleets/{night.name}"
    page.on("response", lambda answer: statuses.append(answer.status) if answer.url.endswith(path) else None)
    page.goto(f"{desk.stack.url}/console#{path}")
    table = page.get_by_role("table", name="Machines")
    expect(table).to_contain_text("booting")
    with page.expect_response(lambda answer: answer.url.endswith(path) and answer.status == 304):
        pass
    night.machines[2] = night.rentals.change(night.machines[2], MachineState.REGISTERED)
    expect(table).to_contain_text("registered")
    assert statuses[0] == 200 and 304 in statuses


def test_a_job_tells_which_rented_machines_served_it(desk: Desk, night: Night) -> None:
    name = f"served-{uuid4().hex[:6]}"
    night.rentals.apply(name)
    scene = Scene(desk.stack, name)
    job_id = scene.submit("two machines")
    first, second = (night.rentals.serve(name, number, kind=number) for number in (1, 2))
    scene.claim(first.id).fail("the GPU fell off the bus")
    night.rentals.change(first, MachineState.LOST)
    scene.claim(second.id)
    # A worker of the tenant's own, with another job.
    own_id = scene.submit("own machine")
    scene.claim("desk")
    page = desk.sign_in(f"/jobs/{job_id}")
    page.get_by_role("link", name=second.id).click()
    machines = page.get_by_role("table", name="Machines").get_by_role("row")
    expect(machines.nth(1)).to_contain_text(re.compile(r"^A100 SXM4 runpod.*2" + name + r"busysince .*\$1\.35/h"))
    expect(machines.nth(2)).to_contain_text(re.compile(r"^RTX 3090 vast.*1" + name + r"lostsince .*\$0\.22/h"))
    fleet = page.get_by_role("table", name="Fleets").get_by_role("row").nth(1)
    expect(fleet).to_contain_text(f"{name}active$0.00")
    desk.examine(page)
    machines.nth(1).get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    page.goto(f"{desk.stack.url}/console#/jobs/{own_id}")
    expect(page.get_by_text("desk", exact=True)).to_be_visible()
    parts = page.get_by_role("navigation", name="Parts of the job").get_by_role("link")
    expect(parts).to_have_text(["Curves", "Log", "Timeline", "Checkpoints", "Pictures", "Rules", "Files"])
    assert not [request for request in desk.requests if f"{own_id}/machines" in request]


def test_a_waiting_job_says_why_its_fleet_rents_no_machine(reader: Desk, night: Night) -> None:
    page = reader.visit(f"/jobs/{Scene(reader.stack, night.poor).submit('waits for money')}")
    why = page.locator(".job-why")
    expect(why).to_contain_text(f"Fleet {night.poor} rents no machine: {SHORTAGE}.")
    reader.examine(page)
    why.get_by_role("link", name=night.poor).click()
    expect(page.get_by_role("heading", name=night.poor)).to_be_visible()
    assert not [one for one in reader.requests if "status=running" in one], "a fleet tells what its machines do"


def test_a_job_that_rents_for_itself_costs_boots_and_idle_time_too(desk: Desk, night: Night) -> None:
    rent = {"budget_usd": 5, "providers": ["loopback"]}
    job_id = desk.stack.client.submit(JobSubmit(command=["train"], outputs=[], rent=rent)).id
    fleet = desk.stack.job(job_id).queue
    night.rentals.spend(fleet, 0.38)
    page = desk.sign_in(f"/jobs/{job_id}")
    expect(page.locator(".fact").filter(has_text="Cost")).to_contain_text("$0.38")
    page.get_by_role("link", name="Machines").click()
    expect(page.get_by_text("$0.38 for boots and idle time")).to_be_visible()
    desk.stack.client.stop(job_id)


def test_receipts_events_and_the_document_are_told(reader: Desk, night: Night) -> None:
    page = reader.visit(f"/fleets/{night.name}")
    parts = page.get_by_role("navigation", name="Parts of the fleet")
    parts.get_by_role("link", name="Receipts").click()
    expect(page.get_by_role("region", name="Receipts")).to_contain_text("5 machines · $16.27 observed · $16.11 charged")
    row = page.get_by_role("row").filter(has_text="lost9")
    for text in ("$0.75", "$0.74", "$0.22/h", "vast does not list the machine any more", "and 1 min 01 s later"):
        expect(row).to_contain_text(text)
    reader.examine(page)
    parts.get_by_role("link", name="Events").click()
    events = page.get_by_role("region", name="Events")
    expect(events).to_contain_text("The machine is lost.")
    expect(events).to_contain_text("The machine is gone: two complete lists of its provider lack the machine")
    reader.examine(page)
    parts.get_by_role("link", name="Document").click()
    document = page.get_by_label("Document of the fleet")
    expect(document).to_contain_text('"team": "vision"')
    assert json.loads(document.inner_text())["budget"] == {"total_usd": 60, "per_day_usd": 15}
    reader.examine(page)


def test_each_offer_has_the_reason_why_it_is_taken_or_not(reader: Desk, scene: Scene, night: Night) -> None:
    name = f"cheap-{uuid4().hex[:6]}"
    bounds = {"max_usd_per_hour": 0.21, "budget": {"total_usd": 5}, "min_vram_gib": 0, "disk_gib": 1}
    night.rentals.apply(name, providers=["loopback", "vast"], queues=[scene.queue], **bounds)
    waiting, big = scene.submit("fits"), scene.submit("big", requirements={"min_vram_gib": 80})
    page = reader.visit(f"/fleets/{name}?tab=offers")
    offers = page.get_by_role("region", name="Offers")
    expect(offers).to_contain_text("1 further machine would start now. Why not more: one job waits.")
    rows = offers.get_by_role("row")
    expect(rows.filter(has_text="$0.20/h")).to_contain_text("taken")
    expect(rows.filter(has_text="$0.21/h")).to_contain_text("not taken: one job waits")
    expect(rows.filter(has_text="$0.27/h")).to_contain_text("0.27 USD/h exceeds max_usd_per_hour 0.21")
    expect(offers).to_contain_text(re.compile(f"{big[:8]}.*80 GiB VRAM"))
    expect(offers).to_contain_text("no account is stored; run 'baton fleet login vast'")
    reader.examine(page)
    assert reader.stack.job(waiting).state == "pending" and reader.stack.client.fleet(name).machines == []


def test_a_stop_says_its_effect_and_the_fleet_rents_again(reader: Desk, night: Night) -> None:
    page = reader.visit(f"/fleets/{night.name}")
    page.get_by_role("button", name="Stop").click()
    dialog = page.get_by_role("dialog", name=f"Stop: {night.name}")
    expect(dialog).to_contain_text("1 machine with a job saves a checkpoint first.")
    expect(dialog).to_contain_text("2 machines without a job go back as soon as they answer.")
    expect(dialog).to_contain_text("rents nothing until you let it rent again")
    assert reader.complaints(page) == []
    assert not reader.stack.client.fleet(night.name).stopped, "the dialog alone changes nothing"
    dialog.get_by_role("button", name="Stop").click()
    expect(
        page.get_by_text("3 machines are given back. A machine with a job saves a checkpoint first.")
    ).to_be_visible()
    assert reader.stack.client.fleet(night.name).stopped
    before = reader.stack.client.fleet(night.name).spec
    page.locator(".job-head").get_by_role("button", name="Rent again").click()
    dialog = page.get_by_role("dialog", name=f"Rent again: {night.name}")
    expect(dialog).to_contain_text("up to 4 machines of vast, runpod at $1.50/h each at most")
    expect(dialog).to_contain_text("$9.84 are spent already and count against the budget.")
    dialog.get_by_role("button", name="Rent again").click()
    expect(page.locator(".job-head").get_by_role("button", name="Stop")).to_be_visible()
    after = reader.stack.client.fleet(night.name)
    assert (after.stopped, after.spec) == (False, before)
    # The undo of the toast is a stop.
    page.get_by_role("status").get_by_role("button", name="Stop").click()
    expect(page.locator(".badge-stopping")).to_be_visible()
    reader.stack.client.put_fleet(before)


def test_the_doctor_is_for_admins_of_the_deployment(desk: Desk, night: Night) -> None:
    page = desk.sign_in("/fleets?tab=doctor")
    finding = page.get_by_role("listitem").filter(has_text="account missing · vast")
    expect(finding).to_contain_text("run 'baton fleet login vast'")
    desk.examine(page)
    # The provider was asked to end a machine, and its list has not lacked the machine twice since then.
    name = f"linger-{uuid4().hex[:6]}"
    night.rentals.apply(name, providers=["loopback"])
    life = ((300, "planned"), (299, "booting"), (240, "ready"), (120, "terminating"))
    offer = Offer(provider="loopback", ref="host-1", disk_gib=80, usd_per_hour=0.2)
    machine = night.rentals.machine(name, "l1", life, offer=offer)
    found = f"lingering_machine/loopback/{machine.handle}"
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.url.endswith("/fleet-doctor/fix") else None)
    page.get_by_role("button", name="Examine again").click()
    page.get_by_role("button", name=f"Fix {found}").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"The fix asks loopback again to destroy {machine.handle}. There is no undo.")
    assert sent == []
    dialog.get_by_role("button", name="Fix").click()
    expect(page.get_by_text("Fixed: loopback ends the machine.")).to_be_visible()
    assert sent == [{"findings": [found]}]
    assert desk.complaints(page) == []
    night.rentals.change(machine, MachineState.GONE, absences=[night.rentals.now, night.rentals.now + 60])
    page.get_by_role("button", name="Examine again").click()
    expect(page.get_by_role("button", name=f"Fix {found}")).to_have_count(0)
    expect(finding).to_be_visible()


def test_a_key_that_submits_sees_fleets_without_the_doctor(desk: Desk, night: Night) -> None:
    page = desk.sign_in("/fleets?tab=doctor", key="submit")
    expect(page.get_by_role("row").filter(has_text=night.name)).to_contain_text("$9.84 of")
    expect(page.get_by_role("link", name="Doctor")).to_have_count(0)
    assert not [request for request in desk.requests if "fleet-doctor" in request]
    page.goto(f"{desk.stack.url}/console#/fleets/no-such-fleet")
    expect(page.get_by_role("alert")).to_contain_text("No fleet no-such-fleet.")
    page.get_by_role("link", name="Show all fleets").click()
    expect(page.get_by_role("row").filter(has_text=night.name)).to_be_visible()


def test_a_tenant_without_a_fleet_reads_how_to_make_one(desk: Desk, stack: Stack) -> None:
    key, stack.keys["newcomer"] = generate_key(
        SystemRandomness(), tenant="newcomer", name="first", scopes=[Scope.SUBMIT], now=0, expires_at=None
    )
    DynamoTokenStore(stack.tables, stack.prefix).put_key(key)
    page = desk.sign_in("/fleets", key="newcomer")
    expect(page.get_by_role("heading", name="No fleets yet")).to_be_visible()
    for command in ("baton submit job.yaml --rent", "baton fleet apply nights.yaml"):
        expect(page.get_by_text(command)).to_be_visible()
    desk.examine(page)


def test_a_fleet_stays_on_the_page_while_the_control_plane_is_away(desk: Desk, night: Night) -> None:
    page = desk.sign_in(f"/fleets/{night.poor}")
    expect(page.get_by_text(f"No machine is rented: {SHORTAGE}.")).to_be_visible()
    desk.context.set_offline(True)
    expect(page.get_by_text("The control plane does not answer")).to_be_visible()
    page.get_by_role("link", name="Receipts").click()
    expect(page.get_by_role("status", name="Loading receipts")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    assert desk.complaints(page) == []
    page.keyboard.press("Escape")
    desk.context.set_offline(False)
    expect(page.get_by_role("heading", name="No receipts yet")).to_be_visible()
    expect(page.get_by_text("The control plane does not answer")).to_have_count(0)
    assert not desk.stack.client.fleet(night.poor).stopped
