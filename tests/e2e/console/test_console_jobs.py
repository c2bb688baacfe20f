"""The table of jobs: what it shows, filters and does."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

import pytest
from playwright.sync_api import expect

from baton.contract.jobs.job import JobState
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import HOSTILE, Scene
from tests.e2e.console.trainings import Training
from tests.kits.stack.stack import Stack
from tests.kits.waiting import until

MANY = 10_000
GALLERY = f"gallery-{uuid4().hex[:8]}"
MAX_ROWS_IN_DOCUMENT = 60


def row_of(page: Any, job_id: str) -> Any:
    return page.get_by_role("row").filter(has_text=job_id[:8])


@pytest.fixture(scope="module")
def jobs(stack: Stack) -> dict[str, str]:
    """Jobs in all states, by name."""
    return Scene(stack, GALLERY).all_states()


def test_each_row_says_where_its_job_stands(reader: Desk, jobs: dict[str, str]) -> None:
    page = reader.visit(f"/jobs?queue={GALLERY}")
    for name, texts in (
        ("unet-baseline", ["Complete", "2,000 of 2,000", "project=faces"]),
        ("lr-too-high", ["Failed", "script error: loss became NaN at step 310", "1 failure"]),
        ("stopped-by-hand", ["Stopped", "By a user: wrong data set"]),
        ("vit-large-finetune", ["Running", "3,184 of 5,000", "64%", "0.2871", "2 kills", "vast-29471123", "RTX 4090"]),
        ("pause-me", ["Paused", "Goes on from the start when resumed"]),
        ("retry-soon", ["Waiting", "Tries again in", "device-side assert"]),
        ("needs-much-memory", ["Waiting", "for a worker with 80 GiB of GPU memory"]),
        (HOSTILE, ["Running", "<b>=<i>", "<i>machine</i>", HOSTILE]),
    ):
        for text in texts:
            expect(row_of(page, jobs[name])).to_contain_text(text)
    expect(row_of(page, jobs["vit-large-finetune"]).locator(".seg-interrupted")).to_have_count(2)
    # A name with markup became text: no element, no script.
    assert page.locator("img, .table script").count() == 0
    assert page.title() == "Jobs · Baton"
    reader.examine(page)
    assert page.evaluate("(nav => nav.scrollWidth <= nav.clientWidth)(document.querySelector('nav'))")


def test_progress_appears_without_a_reload(reader: Desk, scene: Scene) -> None:
    job_id = scene.submit("live")
    page = reader.visit(f"/jobs?queue={scene.queue}")
    expect(row_of(page, job_id)).to_contain_text("Waiting")
    held = scene.claim("m-1")
    held.report(120, 500, 0.25)
    expect(row_of(page, job_id)).to_contain_text("120 of 500")
    held.complete(500)
    expect(row_of(page, job_id)).to_contain_text("Complete")


def test_a_running_row_tells_the_time_left_the_money_and_the_loss(reader: Desk, scene: Scene, stack: Stack) -> None:
    job_id = scene.submit("priced")
    held = scene.claim("m-1", price_usd_per_hour=3600)
    Training(held).train(1, 60, 6000)
    (attempt,) = stack.client.attempts(job_id).attempts

    def reported_later() -> bool:
        held.report(61, 6000, 0.25)
        progress = stack.job(job_id).progress
        return progress is not None and (progress.reported_at or 0) > attempt.started_at

    until(reported_later, what="a second of work")
    row = row_of(reader.visit(f"/jobs?queue={scene.queue}"), job_id)
    expect(row.locator(".progress-note")).to_have_text(re.compile(r"^\d+ (min|h)( \d\d (s|min))? left$"))
    expect(row.get_by_role("img", name=re.compile(r"^Loss: from \d\S* to 0\.25$"))).to_be_visible()
    # A dollar each second: some seconds are spent, and a hundred times as many steps remain.
    expect(row.locator(".cell-cost")).to_have_text(re.compile(r"^\$[\d,]+\.\d\d\s*of ~\$[\d,]{2,}\.\d\d$"))


def test_filters_select_and_stay_in_the_address(reader: Desk, jobs: dict[str, str], stack: Stack) -> None:
    page = reader.visit(f"/jobs?queue={GALLERY}")
    page.get_by_role("button", name="Failed").click()
    expect(page.get_by_role("row")).to_have_count(2)
    expect(row_of(page, jobs["lr-too-high"])).to_be_visible()
    page.get_by_role("button", name="All").click()
    page.get_by_label("Search jobs").fill("project=faces vit")
    expect(page.get_by_role("row")).to_have_count(2)
    expect(row_of(page, jobs["vit-large-finetune"])).to_be_visible()
    page.wait_for_url("**text=project*")
    page.reload()
    expect(page.get_by_role("row")).to_have_count(2)
    page.get_by_label("Search jobs").fill("nothing has this name")
    page.get_by_role("button", name="Show all jobs").click()
    expect(row_of(page, jobs["pause-me"])).to_be_visible()


def test_the_choice_of_a_queue_selects_its_jobs(reader: Desk, jobs: dict[str, str], scene: Scene) -> None:
    job_id = scene.submit("elsewhere")
    page = reader.visit(f"/jobs?queue={GALLERY}")
    expect(row_of(page, jobs["pause-me"])).to_be_visible()
    queue = page.get_by_label("Queue")
    queue.select_option("")
    expect(row_of(page, job_id)).to_be_visible()
    queue.select_option(scene.queue)
    page.wait_for_url(f"**queue={scene.queue}")
    expect(page.get_by_role("row")).to_have_count(2)
    expect(row_of(page, job_id)).to_be_visible()


def test_the_states_have_counts_that_follow(reader: Desk, scene: Scene, stack: Stack) -> None:
    """The counts are those of all jobs of the tenant, also of jobs that the table does not show."""
    job_id = scene.submit("counted")
    paused = len(stack.client.jobs(status=JobState.PAUSED, limit=100).jobs)
    page = reader.visit("/jobs?status=complete")
    tab = page.get_by_role("button", name=re.compile("^Paused"))
    expect(tab).to_have_text(f"Paused {paused}")
    page.get_by_role("button", name="All", exact=True).click()
    row_of(page, job_id).get_by_role("button", name="Pause counted").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(tab).to_have_text(f"Paused {paused + 1}")
    reader.requests.clear()
    page.goto(f"{stack.url}/console#/jobs?queue={scene.queue}")
    expect(tab).to_have_text("Paused")
    assert not any("counts" in request for request in reader.requests), "no counts of one queue"


def test_a_job_is_paused_and_the_undo_resumes_it(reader: Desk, scene: Scene, stack: Stack) -> None:
    job_id = scene.submit("steered")
    page = reader.visit(f"/jobs?queue={scene.queue}")
    row_of(page, job_id).get_by_role("button", name="Pause steered").click()
    dialog = page.get_by_role("dialog", name="Pause: steered")
    expect(dialog).to_contain_text("No worker can claim the job until you resume it.")
    assert stack.job(job_id).state == "pending", "the dialog alone changes nothing"
    assert reader.complaints(page) == []
    dialog.get_by_role("button", name="Pause").click()
    expect(row_of(page, job_id)).to_contain_text("Paused")
    assert stack.job(job_id).state == "paused"
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(row_of(page, job_id)).to_contain_text("Waiting")
    assert stack.job(job_id).state == "pending"


def test_a_stop_says_what_is_lost_and_a_retry_runs_the_job_again(reader: Desk, scene: Scene, stack: Stack) -> None:
    job_id = scene.submit("doomed")
    scene.claim("m-1").report(70, 100, 1.0)
    page = reader.visit(f"/jobs?queue={scene.queue}")
    row_of(page, job_id).get_by_role("button", name="Stop doomed").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("70 steps are done and no checkpoint is committed: they are lost.")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert stack.job(job_id).state == "running"
    row_of(page, job_id).get_by_role("button", name="Stop doomed").click()
    dialog.get_by_role("button", name="Stop").click()
    expect(row_of(page, job_id)).to_contain_text("Stopped")
    assert stack.job(job_id).state == "canceled"
    # The undo of a stop lets the job go on, and its limits count on.
    undo = page.locator(".toast").get_by_role("button", name=re.compile("^(Run again|Stop)$"))
    undo.click()
    expect(row_of(page, job_id)).to_contain_text("Waiting")
    job = stack.job(job_id)
    assert (job.state, job.counters.attempts) == ("pending", 1)
    stack.client.stop(job_id)
    row_of(page, job_id).get_by_role("button", name="Run again doomed").click()
    page.get_by_role("dialog").get_by_role("button", name="Run again").click()
    expect(row_of(page, job_id)).to_contain_text("Waiting")
    assert stack.job(job_id).state == "pending"
    undo.click()
    expect(row_of(page, job_id)).to_contain_text("Stopped")
    assert stack.job(job_id).state == "canceled"


def test_a_refused_action_is_told_in_the_dialog(reader: Desk, scene: Scene, stack: Stack) -> None:
    job_id = scene.submit("raced")
    page = reader.visit(f"/jobs?queue={scene.queue}")
    row_of(page, job_id).get_by_role("button", name="Pause raced").click()
    stack.client.stop(job_id)
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("canceled")
    assert stack.job(job_id).state == "canceled"


def test_ten_thousand_jobs_are_scrolled_with_few_rows_in_the_document(desk: Desk, scene: Scene, stack: Stack) -> None:
    sample = stack.client.get_job(scene.submit("sample")).model_dump(mode="json")
    many = [
        {**sample, "id": f"{MANY - index:08d}-0000-4000-8000-000000000000", "name": f"job {MANY - index}"}
        for index in range(MANY)
    ]
    page = desk.sign_in("/keys-are-elsewhere")
    desk.serve_jobs(page, many)
    page.goto(f"{stack.url}/console#/jobs")
    scroller = page.locator(".table")
    scroller.wait_for()
    most = page.evaluate(
        """async () => {
          const scroller = document.querySelector(".table");
          let most = 0;
          while (!document.querySelector(".table-foot").textContent.includes("all loaded")) {
            scroller.scrollTop = scroller.scrollHeight;
            await new Promise(requestAnimationFrame);
            most = Math.max(most, document.querySelectorAll(".table-row").length);
            await new Promise((done) => setTimeout(done, 30));
          }
          scroller.scrollTop = scroller.scrollHeight;
          return most;
        }"""
    )
    expect(page.get_by_text("10,000 jobs, all loaded")).to_be_visible()
    expect(page.get_by_role("button", name="Waiting 99+")).to_be_visible()
    expect(page.get_by_text("job 1", exact=True)).to_be_visible()
    assert 0 < most <= MAX_ROWS_IN_DOCUMENT
    assert page.locator(".table-row").count() <= MAX_ROWS_IN_DOCUMENT


def test_a_search_reads_on_until_it_finds(desk: Desk, scene: Scene, stack: Stack) -> None:
    sample = stack.client.get_job(scene.submit("sample")).model_dump(mode="json")
    many = [{**sample, "id": f"{900 - index:08d}-0000-4000-8000-000000000000"} for index in range(899)]
    page = desk.sign_in("/nothing-here")
    desk.serve_jobs(page, [*many, {**sample, "id": "00000001-0000-4000-8000-000000000000", "name": "the-oldest"}])
    page.goto(f"{stack.url}/console#/jobs?text=oldest")
    expect(page.get_by_role("link", name="the-oldest")).to_be_visible()
    expect(page.get_by_text("1 of 900 jobs match, all loaded")).to_be_visible()


def test_the_arrow_keys_walk_through_the_rows(reader: Desk, scene: Scene) -> None:
    first, second = scene.submit("one"), scene.submit("two")
    page = reader.visit(f"/jobs?queue={scene.queue}")
    row_of(page, second).wait_for()
    page.get_by_label("Jobs, scrollable").focus()
    ids = set()
    for _ in range(2):
        page.keyboard.press("ArrowDown")
        ids.add(page.evaluate("document.activeElement.getAttribute('href')"))
    assert ids == {f"#/jobs/{first}", f"#/jobs/{second}"}
