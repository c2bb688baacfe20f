"""The world of an elastic job: nodes, quorum, rounds, data, who waits for whom, and an operator's exclusion."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene
from tests.e2e.console.world_work import WorldWork, rich_world


@pytest.fixture
def work(scene: Scene) -> WorldWork:
    """Two nodes train, one fetches the state, one seat is free."""
    return rich_world(scene)


def fact(page: Any, name: str) -> Any:
    return page.locator(".world .fact").filter(has=page.get_by_text(name, exact=True))


def row_of(page: Any, machine: str) -> Any:
    return page.get_by_role("table", name="Nodes").get_by_role("row").filter(has_text=machine)


def same_second(page: Any, job: str) -> None:
    """Let all changes of a job fall into one second, which is the resolution of `updated_at`."""

    def answer(route: Any) -> None:
        found = route.fetch()
        body = {**found.json(), "updated_at": 1_700_000_000} if found.status == 200 else None
        route.fulfill(response=found, json=body) if body else route.fulfill(response=found)

    page.route(f"**/job/{job}", answer)


def test_a_world_tells_its_nodes_rounds_data_and_who_waits(reader: Desk, work: WorldWork) -> None:
    page = reader.visit(f"/jobs?queue={work.scene.queue}")
    row = page.get_by_role("row").filter(has_text="llama-3b-diloco")
    for text in ("23 of 300", "2.31", "3/4", "3 machines", "RTX 4090"):
        expect(row).to_contain_text(text)
    row.get_by_role("link", name="llama-3b-diloco").click()
    facts = page.locator(".job-head .facts")
    expect(facts).to_contain_text("3 of 4, 4 attempts")
    expect(facts).to_contain_text("3 machines")
    page.get_by_role("link", name="World", exact=True).click()
    expect(fact(page, "World")).to_contain_text("Training2 of 4 nodes, begins with 2")
    expect(fact(page, "Quorum")).to_contain_text("Held2 of 2 answer")
    for name, text in (("Epoch", "2"), ("Round", "23int8, wire"), ("Cost", "$1.14 an hour now")):
        expect(fact(page, name)).to_contain_text(text)
    expect(fact(page, "Last round")).to_contain_text(re.compile("44 s18% reduce619.4 tokens/s"))
    for machine, texts in (
        ("vast-2947", ["trains", "RTX 4090", "18,400", "67%", "2.31", "1%", "Mbit/s", "$0.34/h"]),
        ("run-90aa", ["trains", "9,100", "33%", "10%", "$0.41/h"]),
        ("vast-3001", ["fetches the state", "$0.39/h"]),
    ):
        for text in texts:
            expect(row_of(page, machine)).to_contain_text(text)
    expect(page.get_by_role("table", name="Nodes")).to_contain_text("waits for a worker")
    waits = page.get_by_role("list", name="Who waits")
    expect(waits).to_contain_text(re.compile(r"Node \d fetches the state from the members"))
    expect(waits).to_contain_text(re.compile(r"Node \d waits 10% of its time for the others"))
    expect(page.get_by_text("96 shards: 31 trained, 4 at nodes, 61 free")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Rounds 1 to 23: the last took 44 s"))).to_be_visible()
    members = page.get_by_role("region", name="Members")
    expect(members).to_contain_text("joined: 3 nodes from round 1 on.")
    expect(members).to_contain_text(re.compile(r"Node \d \(it left\) is out: 2 nodes from round 10 on."))
    # A round that did not wait for a node.
    work.train(1, tokens={work.members[0]: 18_000, work.members[1]: 0})
    reader.come_back(page)
    expect(waits).to_contain_text(f"Round 24 did not wait for node {work.members[1]}")
    reader.examine(page)
    page.get_by_role("link", name="Timeline", exact=True).click()
    expect(page.get_by_text(re.compile(r"Attempt 2 of node \d began on vast-3001"))).to_be_visible()
    expect(page.get_by_text(re.compile(r"Node \d \(it left\) is out: 2 nodes"))).to_be_visible()


def test_an_exclusion_says_its_effect_first(reader: Desk, work: WorldWork) -> None:
    page = reader.visit("/jobs")
    same_second(page, work.job)
    page = reader.visit(f"/jobs/{work.job}?tab=world")
    stay, leave = work.members
    page.get_by_role("button", name="Exclude nodes").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Exclude")).to_be_disabled()
    dialog.get_by_role("checkbox", name=f"node {leave}").check()
    expect(dialog).to_contain_text(f"Epoch 3 begins at once with node {stay}, without a vote.")
    expect(dialog).to_contain_text("its machine is not stopped")
    assert reader.complaints(page) == []
    dialog.get_by_role("button", name="Exclude").click()
    expect(page.get_by_text(f"Epoch 3 begins without node {leave}.")).to_be_visible()
    expect(fact(page, "Quorum")).to_contain_text("1 of 1 answer")
    expect(page.get_by_role("region", name="Members")).to_contain_text(f"Node {leave} (excluded by an operator) is out")
    world = work.scene.stack.client.world(work.job)
    assert (world.epoch, [one.seat for one in world.members]) == (3, [stay])


def test_a_world_that_forms_tells_whom_it_waits_for(reader: Desk, scene: Scene) -> None:
    work = WorldWork(scene, "forming")
    page = reader.visit(f"/jobs/{work.job}?tab=world")
    expect(page.get_by_text("begins when 2 workers have claimed a seat")).to_be_visible()
    expect(page.get_by_text(f"BATON_QUEUE={scene.queue} python -m gpu_client.agent")).to_be_visible()
    first = work.claim("m-1")
    work.join(first)
    second = work.claim("m-2")
    reader.come_back(page)
    sentence = f"Node {first} waits: 1 of 2 nodes has joined, and the training begins with 2. Node {second} starts."
    expect(page.get_by_text(sentence)).to_be_visible()
    expect(row_of(page, "m-1")).to_contain_text("readywaits for the others")
