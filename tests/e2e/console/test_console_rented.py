"""A machine that the controller really rents, from its boot to its return, on an open page."""

from __future__ import annotations

from uuid import uuid4

import pytest
from playwright.sync_api import expect

from baton.contract.fleets.fleet import FleetSpec
from tests.e2e.console.desk import Desk
from tests.kits.stack.stack import Stack

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


def test_a_machine_boots_serves_and_is_given_back_on_an_open_page(desk: Desk, stack: Stack) -> None:
    name = f"real-{uuid4().hex[:6]}"
    document = {"name": name, "providers": ["loopback"], "queues": [name], "disk_gib": 1, "max_usd_per_hour": 0.5}
    page = desk.sign_in("/fleets")
    stack.client.put_fleet(FleetSpec.model_validate({**document, "min": 1, "budget": {"total_usd": 5}}))
    page.get_by_role("link", name=name).click()
    machine = page.get_by_role("table", name="Machines").get_by_role("row").nth(1)
    expect(machine).to_contain_text("ready")
    expect(machine).to_contain_text("MB/s, downloads")
    expect(page.get_by_text("1 machine is rented, as many as the document permits.")).to_be_visible()
    expect(page.get_by_role("region", name="Money")).to_contain_text("$0.20 reserved")
    machine.get_by_role("button", name="Output").click()
    expect(page.get_by_label("Last output")).to_contain_text("INFO")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(machine).to_contain_text("draining")
    expect(machine).to_contain_text("the fleet is stopped")
    expect(page.get_by_text("1 machine is given back.")).to_be_visible()
    page.goto(f"{stack.url}/console#/fleets?tab=doctor")
    expect(page.get_by_role("heading", name="Nothing was found")).to_be_visible()
    assert desk.complaints(page) == []
