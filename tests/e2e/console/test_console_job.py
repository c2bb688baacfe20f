"""The page of a job: curves with what happened to the machines, log, timeline, checkpoints, pictures, rules, files."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import expect

from baton.contract.jobs.job import JobState, JobSubmit
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import HOSTILE, Scene
from tests.e2e.console.trainings import RULES, Training, store_long_curve
from tests.kits.stack.stack import Stack
from tests.kits.waiting import until

TABS = ("Curves", "Log", "Timeline", "Checkpoints", "Pictures", "Rules", "Files")


@pytest.fixture(scope="module")
def trained(stack: Stack) -> str:
    """A job whose first machine was lost at step 60, after the checkpoint of step 40."""
    scene = Scene(stack, "trained")
    job_id = scene.submit("vit-large", rules=RULES, environment={"NAME": "it's"})
    first = scene.claim("m-1")
    training = Training(first)
    training.commit(40, 20_000, loss=1.5)
    training.train(1, 60, 200)
    training.store_picture(20, 0)
    scene.lose(first)
    second = Training(scene.claim("m-2"), seed=2)
    second.fire("spike", 70, {"loss": 7.25}, ["set"])
    second.train(41, 90, 200)
    second.commit(80, 10_000, loss=2.5)
    second.store_picture(80, 0)
    second.store_picture(80, 1)
    second.send([HOSTILE, "\x1b[31mred\x1b[0m"])
    return job_id


def plot(page: Any, metric: str = "loss") -> Any:
    return page.get_by_role("img", name=re.compile(f"^{re.escape(metric)} over steps"))


def picture_of(page: Any) -> str:
    return str(page.locator(".u-wrap canvas").first.evaluate("(canvas) => canvas.toDataURL()"))


def drag(page: Any, place: Any, begin: float, end: float) -> None:
    box = place.bounding_box()
    page.mouse.move(box["x"] + box["width"] * begin, box["y"] + 120)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end, box["y"] + 120, steps=4)
    page.mouse.up()


def test_curves_tell_what_happened_to_the_machines(reader: Desk, trained: str) -> None:
    page = reader.visit(f"/jobs/{trained}")
    expect(plot(page)).to_have_attribute("aria-label", re.compile("attempt 1: from .*; attempt 2: from"))
    expect(page.get_by_text("90 of 200 steps, 45%")).to_be_visible()
    expect(page.get_by_text("1 machine lost")).to_be_visible()
    expect(page.get_by_text("steps trained again")).to_be_visible()
    page.get_by_text("marks in words").click()
    marks = page.locator(".mark-list li")
    expect(marks.nth(0)).to_have_text(re.compile("40Attempt 2 goes on from step 40 on m-2"))
    expect(marks.nth(1)).to_have_text(re.compile("60Attempt 1 was lost at step 60 on m-1: no heartbeat"))
    expect(marks.nth(2)).to_have_text(re.compile("70Rule spike fired: loss = 7.25"))
    expect(page.get_by_role("img", name=re.compile("^Goodput: .*repeated steps 1 min 02 s"))).to_be_visible()


# Reads what the first plot has drawn at steps: the share of the height of each column that is painted at all, and the
# share that has the color of a kind of mark. A vertical mark covers one column of its two neighbors at least.
_DRAWN = """(asked) => {
  const canvas = document.querySelector(".u-wrap canvas");
  const sheet = (width, height) => new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  const context = sheet(canvas.width, canvas.height);
  context.drawImage(canvas, 0, 0);
  const [whole, over] = [canvas, document.querySelector(".u-over")].map((one) => one.getBoundingClientRect());
  const scale = canvas.width / whole.width;
  const [top, height] = [(over.top - whole.top) * scale, over.height * scale];
  const rgbOf = (name) => {
    const one = sheet(1, 1);
    one.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    one.fillRect(0, 0, 1, 1);
    return one.getImageData(0, 0, 1, 1).data;
  };
  return asked.map(({ step, first, last, color }) => {
    const x = Math.round((over.left - whole.left + (over.width * (step - first)) / (last - first)) * scale);
    const wanted = color && rgbOf(color);
    const shares = [-1, 0].map((beside) => {
      const { data } = context.getImageData(x + beside, Math.round(top), 1, Math.round(height));
      let hits = 0;
      for (let at = 0; at < data.length; at += 4) {
        const near = !wanted || [0, 1, 2].every((part) => Math.abs(data[at + part] - wanted[part]) < 40);
        if (data[at + 3] > (wanted ? 90 : 10) && near) hits += 1;
      }
      return (hits * 4) / data.length;
    });
    return wanted ? Math.max(...shares) : Math.min(...shares);
  });
}"""


def drawn(page: Any, *asked: tuple[int, str | None]) -> list[float]:
    """Return the shares of the height that the first plot of `trained` paints at steps."""
    places = [{"step": step, "first": 1, "last": 90, "color": color} for step, color in asked]
    shares: list[float] = page.evaluate(_DRAWN, places)
    return shares


def test_marks_and_repeated_steps_are_drawn_where_they_happened(reader: Desk, trained: str) -> None:
    page = reader.visit(f"/jobs/{trained}")
    page.get_by_text("marks in words").wait_for()
    # The loss is a line from top to bottom, the resume is dashed, and the rule is a line again.
    until(lambda: drawn(page, (60, "--bad"))[0] > 0.9, what="the mark of the loss")
    resumed, fired = drawn(page, (40, "--accent"), (70, "--warn"))
    assert 0.3 < resumed < 0.8 and fired > 0.9
    assert max(drawn(page, (55, "--bad"), (75, "--bad"), (25, "--accent"), (65, "--warn"))) < 0.2
    inside, before, after = drawn(page, (47, None), (33, None), (83, None))
    assert inside == 1 and max(before, after) < 0.5, "steps 41 to 60 alone are shaded"
    place = page.locator(".u-over").first
    width = place.bounding_box()["width"]
    place.hover(position={"x": round(width * 59 / 89), "y": 100})
    expect(page.locator(".readout-mark")).to_have_text(re.compile("^Attempt 1 was lost at step 60 on m-1"))


def test_a_drag_zooms_and_the_address_keeps_the_range(reader: Desk, trained: str) -> None:
    page = reader.visit(f"/jobs/{trained}")
    expect(plot(page)).to_be_visible()
    drag(page, page.locator(".u-over").first, 0.25, 0.5)
    page.wait_for_url(re.compile(r"from=\d+&to=\d+"))
    begin, end = map(int, re.search(r"from=(\d+)&to=(\d+)", page.url).groups())  # type: ignore[union-attr]
    assert (20 < begin < 30) and (40 < end < 50)
    expect(page.get_by_role("button", name="Show all steps")).to_be_visible()
    page.reload()
    expect(plot(page)).to_be_visible()
    assert any(f"from_step={begin}&to_step={end}" in line for line in reader.requests)
    page.locator(".u-over").first.dblclick()
    expect(page.get_by_role("button", name="Show all steps")).to_have_count(0)


def test_a_curve_is_read_and_zoomed_by_the_keyboard(reader: Desk, trained: str) -> None:
    page = reader.visit(f"/jobs/{trained}")
    plot(page).focus()
    page.keyboard.press("ArrowRight")
    readout = page.locator(".readout").first
    expect(readout).to_contain_text("step 1")
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("step 2")
    expect(readout).to_have_attribute("aria-live", "polite")
    page.keyboard.press("+")
    page.wait_for_url(re.compile(r"from=1&to=4\d(&|$)"))
    expect(plot(page)).to_be_focused()
    page.keyboard.press("-")
    expect(page.get_by_role("button", name="Show all steps")).to_have_count(0)


def test_metrics_smoothing_and_a_log_scale(reader: Desk, trained: str) -> None:
    page = reader.visit(f"/jobs/{trained}")
    page.get_by_role("button", name="eval.loss").click()
    expect(plot(page, "eval.loss")).to_be_visible()
    expect(plot(page)).to_be_visible()
    before = plot(page).get_attribute("aria-label")
    page.get_by_role("slider", name="Smoothing").fill("0.9")
    expect(plot(page)).not_to_have_attribute("aria-label", before or "")
    linear = picture_of(page)
    page.get_by_label("Log scale").check()
    until(lambda: picture_of(page) != linear, what="another scale")
    page.get_by_label("Log scale").uncheck()
    until(lambda: picture_of(page) == linear, what="the linear scale")
    page.get_by_label("Log scale").check()
    place = page.locator(".u-over").first
    place.hover(position={"x": 200, "y": 100})
    expect(page.locator(".readout").first).to_contain_text(re.compile(r"step \d+"))
    page.get_by_role("button", name="loss", exact=True).click()
    expect(plot(page)).to_have_count(0)


def test_a_lost_machine_is_marked_while_the_page_is_open(reader: Desk, scene: Scene) -> None:
    job_id = scene.submit("live")
    held = scene.claim("m-1")
    training = Training(held)
    training.commit(10, 5000)
    training.train(1, 20, 100)
    page = reader.visit(f"/jobs/{job_id}")
    expect(plot(page)).to_be_visible()
    assert page.locator(".mark-list").count() == 0
    scene.lose(held)
    expect(page.get_by_text("1 mark in words")).to_be_visible()
    expect(page.get_by_text("goes on from step 10").first).to_be_visible()
    Training(scene.claim("m-2")).train(11, 15, 100)
    expect(page.get_by_text("2 marks in words")).to_be_visible()
    expect(plot(page)).to_have_attribute("aria-label", re.compile("attempt 2"))


def test_three_jobs_in_one_plot(reader: Desk, scene: Scene, trained: str) -> None:
    others = []
    for name in ("other", "third"):
        others.append(scene.submit(name))
        Training(scene.claim("m-1")).train(1, 50, 100)
    page = reader.visit(f"/jobs/{trained}")
    page.get_by_role("button", name="Compare").click()
    for job_id in others:
        page.get_by_label("Search among").fill(job_id)
        expect(page.get_by_role("dialog").get_by_role("checkbox")).to_have_count(1)
        page.get_by_role("dialog").get_by_role("checkbox").check()
    page.get_by_role("dialog").get_by_role("button", name="Show").click()
    expect(plot(page)).to_have_attribute("aria-label", re.compile("vit-large: from .*; other: from .*; third: from"))
    assert f"with={'%2C'.join(others)}" in page.url


def test_many_points_arrive_thinned(desk: Desk, scene: Scene) -> None:
    job_id = scene.submit("long")
    held = scene.claim("m-1")
    store_long_curve(scene.stack, job_id, 20_000, per_chunk=500)
    held.report(20_000, 40_000, 0.3)
    page = desk.sign_in(f"/jobs/{job_id}")
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer))  # noqa: PLW0108 - Playwright marks its handlers
    page.reload()
    expect(plot(page)).to_have_attribute("aria-label", re.compile("value: from"))
    assert page.locator(".u-wrap").count() == 1
    expect(page.get_by_text("summarizes earlier points")).to_have_count(0)
    sizes = [len(answer.body()) for answer in answers if "/curves" in answer.url and answer.status == 200]
    assert sizes and max(sizes) < 100_000, "a thousand buckets, not twenty thousand points"


def test_the_log_is_searched_and_markup_stays_text(reader: Desk, trained: str) -> None:
    page = reader.visit(f"/jobs/{trained}?tab=log")
    lines = page.get_by_role("log")
    expect(lines).to_contain_text(HOSTILE)
    expect(lines).to_contain_text("red")
    assert "[31m" not in lines.inner_text()
    assert lines.locator("img, script").count() == 0 and page.title() != "owned"
    expect(lines).not_to_contain_text("step     1 ")
    page.get_by_label("From attempt").select_option("1")
    expect(page.get_by_role("log")).to_contain_text("loss")
    page.get_by_label("Search in the log").fill("STEP     7 ")
    expect(page.get_by_text("1 of 112 lines")).to_be_visible()
    expect(page.locator("mark")).to_have_text("step     7 ")


def test_the_timeline_is_in_words(reader: Desk, trained: str, stack: Stack) -> None:
    page = reader.visit(f"/jobs/{trained}?tab=timeline")
    for text in (
        "The machine of attempt 1 on m-1 was lost: no heartbeat",
        "Attempt 2 began on m-2, from step 40. Machine: vast, $0.34 per hour.",
        "Checkpoint of step 80 is committed: 10 kB, 10 kB of it new.",
        "Rule spike did: set",
    ):
        expect(page.get_by_text(text).first).to_be_visible()
    expect(page.get_by_text(re.compile(r"m-1 was lost.*Cost of the attempt: <?\$0\.\d\d\."))).to_be_visible()
    # The browser is in Berlin, and this machine need not be.
    newest = stack.client.events(trained).events[-1].at
    clock = datetime.fromtimestamp(newest, ZoneInfo("Europe/Berlin")).strftime("%H:%M")
    expect(page.locator(".timeline-at").first).to_contain_text(clock)
    page.get_by_role("button", name="checkpoints").click()
    expect(page.locator(".timeline li")).to_have_count(2)
    page.get_by_role("link", name="Rules", exact=True).click()
    fired = page.get_by_role("region", name="What fired").get_by_role("listitem")
    expect(fired.filter(has_text="Rule spike fired: loss = 7.25")).to_contain_text("step 70")
    expect(fired.filter(has_text="Rule spike did: set")).to_have_count(1)
    status = page.get_by_role("region", name="Rules in force").get_by_role("listitem")
    expect(status).to_contain_text("fired at step 620; next check step 720")


def test_a_stopped_job_resumes_from_a_chosen_checkpoint(reader: Desk, scene: Scene) -> None:
    job_id = scene.submit("again")
    training = Training(scene.claim("m-1"))
    training.commit(10, 5000, loss=0.5)
    training.commit(20, 6000, loss=0.9)
    page = reader.visit(f"/jobs/{job_id}?tab=checkpoints")
    expect(page.get_by_role("row").nth(2)).to_contain_text("best loss")
    expect(page.get_by_text("stop the job first")).to_be_visible()
    scene.stack.client.stop(job_id)
    page.get_by_role("row").nth(2).get_by_role("button", name="Resume from here").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume from here").click()
    expect(page.get_by_text("goes on from step 10").first).to_be_visible()
    job = scene.stack.job(job_id)
    assert (job.state, job.checkpoint_step) == (JobState.PENDING, 10)


def test_a_failed_job_says_why(reader: Desk, scene: Scene) -> None:
    job_id = scene.submit("broken", max_failures=1)
    scene.claim("m-1").fail("CUDA error: device-side assert triggered")
    page = reader.visit(f"/jobs/{job_id}")
    expect(page.get_by_text("script error: CUDA error: device-side assert triggered.")).to_be_visible()
    expect(page.get_by_text("Attempt 1 failed with exit code 1: CUDA error: device-side assert")).to_be_visible()
    expect(page.get_by_role("heading", name="No metrics yet")).to_be_visible()


def test_a_waiting_job_tells_its_place_in_the_queue_and_whether_workers_are_busy(reader: Desk, scene: Scene) -> None:
    scene.submit("first", priority=60)
    page = reader.visit(f"/jobs/{scene.submit('waits')}")
    expect(page.locator(".fact", has_text="Cost")).to_have_text("Cost–")
    unserved = f"No fleet serves the queue '{scene.queue}'."
    idle = f"No job of the queue '{scene.queue}' runs now. Start a worker."
    expect(page.locator(".job-why")).to_contain_text(f"1 job of its queue precedes it. {unserved} {idle}")
    scene.claim("m-1")
    # A page that stays open asks for one of them each half a minute.
    for part in ("/machines", "status=pending", "status=running"):
        with page.expect_response(lambda answer, part=part: part in answer.url):
            reader.come_back(page)
    busy = f"All workers are busy or unsuitable: 1 job of the queue '{scene.queue}' runs now."
    expect(page.locator(".job-why")).to_contain_text(f"It is the first job of its queue. {unserved} {busy}")
    reader.examine(page)
    page.get_by_role("link", name="Machines").click()
    expect(page.get_by_text(f"No fleet serves queue {scene.queue}")).to_be_visible()
    for job in reader.stack.client.jobs(queue=scene.queue).jobs:
        reader.stack.client.stop(job.id)
    expect(page.get_by_text(unserved)).to_have_count(0)
    reader.requests.clear()
    reader.come_back(page)
    expect(page.get_by_text("By a user")).to_be_visible()
    assert not [one for one in reader.requests if "status=" in one], "an ended job has no place in a queue"


def test_pictures_by_step(reader: Desk, trained: str) -> None:
    page = reader.visit(f"/jobs/{trained}?tab=pictures")
    newest = page.get_by_role("img", name="validation/step-000080-0.png, step 80")
    expect(newest).to_be_visible()
    assert newest.evaluate("(image) => image.decode().then(() => image.naturalWidth)") == 96
    expect(page.get_by_role("img", name="validation/step-000080-1.png, step 80")).to_be_visible()
    page.get_by_role("slider", name="Step").press("ArrowLeft")
    expect(page.get_by_role("img", name="validation/step-000020-0.png, step 20")).to_be_visible()


def test_rules_are_checked_and_put_in_force(reader: Desk, scene: Scene) -> None:
    job_id = scene.submit("ruled", rules=RULES)
    scene.claim("m-1").report(1, 10, 0.5)
    page = reader.visit(f"/jobs/{job_id}?tab=rules")
    expect(page.get_by_label("Rules", exact=True)).to_contain_text("loss > 3 * mean(loss, 20)")
    page.get_by_role("button", name="Change the rules").click()
    editor = page.get_by_role("textbox", name="Rules")
    editor.fill("rules:\n  - name: late\n    when: los > 1\n    do: nothing_known\n")
    expect(page.get_by_text("Line 4")).to_be_visible()
    expect(page.get_by_role("button", name="Put in force")).to_be_disabled()
    changed = "rules:\n  - name: late\n    when: loss > 9\n    do: save\n"
    editor.fill(changed)
    expect(page.get_by_text("No faults.")).to_be_visible()
    page.get_by_role("button", name="Put in force").click()
    expect(page.get_by_text("Revision 2")).to_be_visible()
    newest = scene.stack.client.rules(job_id).newest
    assert newest is not None and newest.text == changed


def test_rules_are_tried_on_this_run_before_they_are_in_force(reader: Desk, scene: Scene) -> None:
    job_id = scene.submit("tried")
    Training(scene.claim("m-1")).train(1, 700, 1000)
    page = reader.visit(f"/jobs/{job_id}?tab=rules")
    page.get_by_role("button", name="Add rules").click()
    editor = page.get_by_role("textbox", name="Rules")
    editor.fill(RULES.replace("3 *", "2 *") + "  - name: late\n    when: step >= 650\n    do: stop\n")
    page.get_by_role("button", name="Back-test", exact=True).click()
    table = page.get_by_role("table", name="What the rules would have done")
    expect(table.get_by_role("row").nth(1)).to_contain_text(re.compile(r"spike.*first at step 6\d\d.*set.*loss = "))
    expect(table.get_by_role("row").nth(2).get_by_role("img", name="Fires at step 650")).to_be_visible()
    expect(page.get_by_text("late would have ended the run at step 650.")).to_be_visible()
    expect(page.get_by_text("700 reports replayed.")).to_be_visible()
    curve = page.get_by_role("region", name="Firings in the curve")
    expect(plot(curve)).to_be_visible()
    expect(curve.get_by_text("a rule would have fired")).to_be_visible()
    curve.get_by_text("marks in words").click()
    expect(curve.get_by_role("listitem").filter(has_text="late would have fired at step 650: stop")).to_be_visible()
    expect(curve.get_by_role("listitem").filter(has_text="spike would have fired at step 6")).not_to_have_count(0)
    curve.get_by_role("button", name="lr").click()
    expect(plot(curve, "lr")).to_be_visible()
    assert reader.complaints(page) == []
    assert scene.stack.client.rules(job_id).newest is None, "a back-test puts nothing in force"
    editor.fill("rules:\n  - name: late\n    when: los > 1\n    do: stop\n")
    expect(page.get_by_role("button", name="Back-test", exact=True)).to_be_disabled()


def test_the_document_submits_the_same_job(reader: Desk, trained: str, stack: Stack) -> None:
    page = reader.visit(f"/jobs/{trained}?tab=files")
    command = page.get_by_label("Command").inner_text()
    found = re.fullmatch(r"baton submit - <<'JOB'\n(.*)\nJOB", command.strip(), re.DOTALL)
    assert found is not None, command
    again = stack.client.submit(JobSubmit.model_validate(json.loads(found[1])))
    first = stack.job(trained)
    same = ("name", "queue", "command", "environment", "outputs", "policy", "requirements", "tags", "priority")
    assert [getattr(again, name) for name in same] == [getattr(first, name) for name in same]
    newest = stack.client.rules(again.id).newest
    assert newest is not None and newest.text == RULES
    stack.client.stop(again.id)
    expect(page.get_by_role("link", name="validation/step-000080-0.png")).to_be_visible()


def test_each_part_is_accessible(reader: Desk, trained: str) -> None:
    page = reader.visit(f"/jobs/{trained}")
    for name in TABS:
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("link", name=name, exact=True)).to_have_attribute("aria-current", "page")
        expect(page.get_by_role("status", name=re.compile("Loading"))).to_have_count(0)
        reader.examine(page)


def make_link(page: Any) -> str:
    page.get_by_role("button", name="Share").click()
    page.get_by_role("button", name="Make the link").click()
    return str(page.get_by_label("Link", exact=True).inner_text())


def test_a_shared_link_shows_one_job_and_nothing_to_press_until_a_submitter_ends_it(
    desk: Desk, trained: str, browser: Any, stack: Stack
) -> None:
    page = desk.sign_in(f"/jobs/{trained}", key="submit")
    # A page whose origin is not secure has no clipboard.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    link = make_link(page)
    expect(page.get_by_role("button", name="Copy the link")).to_have_count(0)
    page.get_by_role("button", name="Done").click()
    reader = Desk(browser, stack)
    shared = reader.open(link)
    expect(plot(shared)).to_be_visible()
    expect(shared.get_by_text("Shared job")).to_be_visible()
    assert shared.url.endswith(f"#/jobs/{trained}"), "the key leaves the address"
    expect(shared.get_by_role("button", name=re.compile("Stop|Pause|Share|Compare|Sign out"))).to_have_count(0)
    for tab in ("Log", "Timeline", "Checkpoints", "Rules", "Files"):
        shared.get_by_role("link", name=tab, exact=True).click()
        expect(shared.get_by_role("status", name=re.compile("Loading"))).to_have_count(0)
        expect(shared.get_by_role("alert")).to_have_count(0)
    assert reader.complaints(shared) == [] and reader.faults == []
    page.get_by_role("button", name="Share").click()
    page.get_by_text("End a link").click()
    page.get_by_label("Link to end").fill(link)
    assert desk.complaints(page) == []
    page.get_by_role("button", name="End the link").click()
    expect(page.get_by_text("The link ends within a minute.")).to_be_visible()
    reader.come_back(shared)
    expect(shared.get_by_role("alert")).to_contain_text("revoked")
    reader.close()
    key = make_link(page).partition("#share=")[2].partition("&")[0]
    page.get_by_role("button", name="End the link").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    with BatonClient(stack.url, key) as client, pytest.raises(ApiError, match="revoked"):
        client.get_job(trained)


def test_an_unknown_job(reader: Desk) -> None:
    page = reader.visit("/jobs/146683a1-cb76-4702-9fef-fcccd32594f1")
    expect(page.get_by_role("alert")).to_contain_text("job_not_found")
    page.get_by_role("link", name="Show all jobs").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
