"""Long lists, refused lists, several nodes, many compared jobs: a view leaves nothing out without saying so."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from playwright.sync_api import expect

from baton.contract.worker.output import ReportedPoint
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene
from tests.e2e.console.trainings import Training
from tests.e2e.console.world_work import WorldWork

PER_PAGE = 60
REFUSAL = {"error": {"code": "invalid_cursor", "message": "The cursor is not valid."}}


def plot(page: Any, metric: str = "loss") -> Any:
    return page.get_by_role("img", name=re.compile(f"^{re.escape(metric)} over steps"))


def page_of(route: Any) -> int:
    """Return the number of the page that a request asks for; the cursors of these tests are numbers."""
    found = re.search(r"[?&]cursor=(\d+)", route.request.url)
    return int(found[1]) if found else 0


def test_the_attempts_of_all_pages_count(desk: Desk, scene: Scene) -> None:
    """Each attempt costs a dollar; the API lists the oldest attempt first."""
    job_id = scene.submit("often-lost")
    scene.claim("m-1").complete(10)
    (attempt,) = scene.stack.client.attempts(job_id).attempts
    dollar = {**attempt.model_dump(mode="json"), "price_usd_per_hour": 3600, "started_at": 1000, "ended_at": 1001}
    pages = 2

    def answer(route: Any) -> None:
        number = page_of(route)
        attempts = [{**dollar, "epoch": number * PER_PAGE + one} for one in range(1, PER_PAGE + 1)]
        route.fulfill(json={"attempts": attempts, "next_cursor": str(number + 1) if number + 1 < pages else None})

    page = desk.sign_in("/")
    page.route(f"**/job/{job_id}/attempts?*", answer)
    page.goto(f"{desk.stack.url}/console#/submit?from={job_id}")
    expect(page.get_by_role("region", name="Expected cost")).to_contain_text("$120.00")
    page.goto(f"{desk.stack.url}/console#/jobs?queue={scene.queue}")
    row, fact = page.locator("[role=cell].cell-cost"), page.locator(".fact", has_text="Cost")
    expect(row).to_have_text("$120.00")
    page.get_by_role("link", name="often-lost").click()
    expect(fact).to_contain_text("$120.00")
    pages = 99
    page.reload()
    expect(fact).to_contain_text("more than $1,200.00")
    page.goto(f"{desk.stack.url}/console#/jobs?queue={scene.queue}")
    expect(row).to_have_text("more than $300.00")


def test_a_refused_list_is_no_empty_list_and_a_cut_list_is_told(desk: Desk, scene: Scene) -> None:
    job_id = scene.submit("refused")
    page = desk.sign_in("/")
    page.route("**/machines", lambda route: route.fulfill(status=422, json=REFUSAL))
    page.goto(f"{desk.stack.url}/console#/jobs/{job_id}")
    expect(page.locator(".job-why")).to_contain_text(REFUSAL["error"]["message"])
    training = Training(scene.claim("m-1"))
    training.train(1, 20, 100)
    training.commit(10, 5000)
    page.route("**/checkpoints?*", lambda route: route.fulfill(status=422, json=REFUSAL))
    page.goto(f"{desk.stack.url}/console#/jobs/{job_id}?tab=checkpoints")
    expect(page.get_by_role("alert")).to_contain_text("invalid_cursor")
    expect(page.get_by_text("No checkpoint yet")).to_have_count(0)

    def files(route: Any) -> None:
        number = page_of(route)
        path = f"notes-{number}.txt"
        stored = {"path": path, "epoch": 1, "seat": None, "step": None, "size_bytes": 9, "bucket": "b", "key": path}
        answer = {"expires_at": 0, "expires_in_s": 900, "final": False, "next_cursor": str(number + 1)}
        route.fulfill(json={"artifacts": [{**stored, "url": f"{desk.stack.url}/{path}"}], **answer})

    page.route("**/artifacts?*", files)
    cut = page.get_by_text(re.compile(f"The first 5 files are known here.*baton fetch {job_id} result --so-far"))
    for tab in ("Pictures", "Files"):
        page.get_by_role("link", name=tab, exact=True).click()
        expect(cut).to_be_visible()
    expect(page.get_by_role("link", name="notes-4.txt")).to_be_visible()

    event = {"seq": 1, "at": 1_790_000_000, "type": "job.resumed", "epoch": 1, "data": {}}
    page.route("**/events?*", lambda route: route.fulfill(json={"events": [event], "next_cursor": "1"}))
    page.goto(f"{desk.stack.url}/console#/jobs/{job_id}?tab=timeline")
    page.reload()
    expect(
        page.get_by_text(f"The first 20 events are shown; baton events {job_id} prints all of them.")
    ).to_be_visible()
    page.unroute("**/events?*")
    page.route("**/events?*", lambda route: route.fulfill(status=422, json=REFUSAL))
    page.goto(f"{desk.stack.url}/console#/jobs/{job_id}?tab=rules")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("invalid_cursor")
    expect(page.get_by_text("No rule has fired")).to_have_count(0)


def test_each_node_numbers_its_attempts_alone(reader: Desk, scene: Scene) -> None:
    plain = scene.submit("plain")
    Training(scene.claim("m-0")).train(1, 30, 100)
    work = WorldWork(scene, "elastic", most=2)
    seats = [work.claim("m-1"), work.claim("m-2")]
    for seat in seats:
        training = Training(work.nodes[seat])
        training.train(1, 30, 100)
        training.send([f"first words of node {seat}"])
    page = reader.visit(f"/jobs/{plain}?with={work.job}")
    expect(plot(page)).to_have_attribute("aria-label", re.compile("plain: from .*; elastic: from"))
    work.leave(0)
    assert work.claim("m-3") == 0
    Training(work.nodes[0]).send(["second words of node 0"])
    page = reader.visit(f"/jobs/{work.job}?tab=log")
    expect(page.get_by_role("log")).to_contain_text("second words of node 0")
    page.get_by_label("Node").select_option("1")
    expect(page.get_by_role("log")).to_contain_text("first words of node 1")
    page.get_by_label("Node").select_option("0")
    page.get_by_label("From attempt").select_option("2")
    page.wait_for_url("**attempt=2**")
    page.get_by_label("Node").select_option("1")
    expect(page.get_by_role("log")).to_contain_text("first words of node 1")


def test_a_plot_of_too_many_jobs_says_which_are_missing(reader: Desk, scene: Scene) -> None:
    job_id = scene.submit("first-of-many")
    Training(scene.claim("m-1")).train(1, 20, 20)
    gone, *others = [str(uuid4()), *(scene.submit(f"other-{number}") for number in range(7))]
    page = reader.visit(f"/jobs/{job_id}?with={','.join([gone, *others])}")
    expect(page.get_by_text("A plot compares 8 jobs at most: 1 job of this address is left out.")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_text(re.compile(f"^Job {gone[:8]} did not load: .*job_not_found$"))
    page.get_by_role("button", name="Compared with 7 jobs").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Search among").fill(scene.queue)
    expect(dialog.get_by_text("other-6")).to_be_visible()
    dialog.get_by_label("Search among").fill(others[-1])
    expect(dialog.get_by_role("checkbox")).to_have_count(1)
    expect(dialog.get_by_role("checkbox")).to_be_disabled()
    expect(dialog.get_by_text("A plot compares 8 jobs at most. Uncheck a job to choose another.")).to_be_visible()
    assert reader.complaints(page) == []
    dialog.get_by_label("Search among").fill(others[0])
    dialog.get_by_role("checkbox").uncheck()
    dialog.get_by_label("Search among").fill(others[-1])
    dialog.get_by_role("checkbox").check()
    expect(page.get_by_role("button", name="Compared with 7 jobs", include_hidden=True)).to_have_count(1)
    assert others[-1] in page.url and others[0] not in page.url


def test_the_firings_are_drawn_in_the_metric_that_the_training_calls_otherwise(reader: Desk, scene: Scene) -> None:
    """Rules call the reported eval_loss eval.loss; the curves have the reported names."""
    job_id = scene.submit("called-otherwise")
    metrics = {"accuracy": 0.5, "eval_loss": 2.0}
    points = [ReportedPoint(step=step, at=1_790_000_000 + step, metrics=metrics) for step in range(1, 31)]
    Training(scene.claim("m-1")).send(["a line"], points)
    page = reader.visit(f"/jobs/{job_id}?tab=rules")
    page.get_by_role("button", name="Add rules").click()
    page.get_by_role("textbox", name="Rules").fill("rules:\n  - name: high\n    when: eval.loss > 1\n    do: save\n")
    page.get_by_role("button", name="Back-test", exact=True).click()
    curve = page.get_by_role("region", name="Firings in the curve")
    expect(plot(curve, "eval_loss")).to_have_attribute("aria-label", re.compile("value: from 2 to 2"))
    expect(curve.get_by_role("button", name="eval_loss")).to_have_attribute("aria-pressed", "true")
