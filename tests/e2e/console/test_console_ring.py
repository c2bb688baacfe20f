"""Rings in the console: what is in them, who writes and reads, how fast, and which side waits for the other."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

import pytest
from playwright.sync_api import expect

from tests.e2e.console.desk import Desk
from tests.e2e.console.ring_work import RingWork, ring_work
from tests.kits.stack.stack import Stack


@pytest.fixture
def name() -> str:
    return f"shapes-{uuid4().hex[:6]}"


def fact(page: Any, label: str) -> Any:
    return page.locator(".fact").filter(has=page.get_by_text(label, exact=True))


def row_of(page: Any, name: str) -> Any:
    return page.get_by_role("row").filter(has_text=name)


def begun(work: RingWork) -> RingWork:
    """Half full, read twice, by a generator and a training."""
    work.put("gen-a", 20, waited_s=1)
    work.read("train-0", 40)
    return work


def test_the_list_tells_fill_and_life_and_the_page_tells_rates_and_processes(
    reader: Desk, stack: Stack, name: str
) -> None:
    with ring_work(stack, name, samples_per_insert=(1, 4)) as work:
        begun(work)
        page = reader.visit("/rings")
        row = row_of(page, name)
        for text in ("live", "rolling", "20 of 40", "50%", "2"):
            expect(row).to_contain_text(text)
        row.get_by_role("link", name=name).click()
        expect(page.get_by_role("heading", name=name)).to_be_visible()
        expect(fact(page, "Fill")).to_contain_text("20 of 40")
        expect(fact(page, "Read")).to_contain_text("40 so far")
        expect(fact(page, "Age of samples")).to_have_text(re.compile(r"^Age of samples\d+ (s|min)"))
        expect(page.get_by_role("table", name="Writers")).to_contain_text("gen-a")
        expect(page.get_by_role("table", name="Readers")).to_contain_text("train-0")
        expect(page.get_by_text("No side has to wait")).to_be_visible()
        # Each later state is one request for all records, and the rates follow from two states.
        work.put("gen-a", 10)
        work.read("train-0", 15)
        reader.come_back(page)
        expect(fact(page, "Put")).to_contain_text(re.compile(r"[0-9.]+/s30 so far"))
        expect(fact(page, "Fill")).to_contain_text("30 of 40")
        expect(page.get_by_role("row").filter(has_text="gen-a")).to_contain_text(re.compile(r"gen-aworks[0-9.]+/s.*30"))
        expect(fact(page, "Reads per sample")).to_contain_text("1.83 in total")
        asked = {line for line in reader.requests if f"/rings/{name}/" in line}
        assert len(asked) == 1, asked
        reader.examine(page)


def test_a_page_says_which_side_waits_and_when_nobody_works(reader: Desk, stack: Stack, name: str) -> None:
    with ring_work(stack, name, samples_per_insert=2) as work:
        begun(work)
        page = reader.visit(f"/rings/{name}")
        expect(page.get_by_text("Readers wait for the writers: 40 reads of 20 samples")).to_be_visible()
        work.put("gen-b", 6)
        reader.come_back(page)
        expect(page.get_by_text("Readers wait")).to_have_count(0)
    reader.come_back(page)
    expect(page.get_by_text("No process works on the ring")).to_be_visible()
    expect(page.get_by_text("no process", exact=True)).to_be_visible()
    expect(fact(page, "Fill")).to_contain_text("26 of 40")


def test_a_ring_that_is_missing_and_a_list_without_rings(desk: Desk, stack: Stack) -> None:
    page = desk.sign_in("/rings/none")
    expect(page.get_by_text("No ring none.")).to_be_visible()
    page.route("**/rings?*", lambda route: route.fulfill(json={"rings": [], "next_cursor": None}))
    page.goto(f"{stack.url}/console#/rings")
    expect(page.get_by_text("baton ring make baton:shapes --set cap=1000")).to_be_visible()
    assert desk.complaints(page) == []
