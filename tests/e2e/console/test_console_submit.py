"""Submit a job by form: a recipe, a command, a job once more; faults at their fields, and what the job would cost."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.money import Budget
from baton.contract.jobs.job import JobView
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene
from tests.e2e.console.trainings import RULES


def box(page: Any, name: str) -> Any:
    return page.get_by_role("textbox", name=name, exact=True)


def submitted(page: Any, scene: Scene) -> JobView:
    """Submit the form; return the job whose page follows."""
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url(re.compile(r"#/jobs/[0-9a-f-]{36}"))
    return scene.stack.job(page.url.rpartition("/")[2])


def test_a_recipe_is_a_form_with_faults_at_their_fields(reader: Desk, scene: Scene) -> None:
    page = reader.visit("/submit?recipe=digits@1")
    steps = box(page, "steps")
    expect(page.get_by_text("A small network on handwritten digits")).to_be_visible()
    expect(page.get_by_text("Optimizer steps.")).to_be_visible()
    assert steps.get_attribute("placeholder") == "600"
    steps.fill("0")
    box(page, "learning_rate").fill("much")
    expect(page.get_by_text("Must be at least 1.")).to_be_visible()
    expect(page.get_by_text("Must be a number.")).to_be_visible()
    assert steps.get_attribute("aria-invalid") == "true"
    before = len(scene.stack.client.jobs().jobs)
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(steps).to_be_focused()
    expect(page.get_by_text("2 fields need another value.")).to_be_visible()
    steps.fill("40")
    box(page, "learning_rate").fill("1e-3")
    box(page, "Queue").fill(scene.queue)
    page.get_by_role("button", name="Add to environment").click()
    page.get_by_label("Environment 1: NAME").fill("SEED")
    page.get_by_label("Environment 1: value").fill("7 'x'")
    expect(page.get_by_text("need another value")).to_have_count(0)
    assert len(scene.stack.client.jobs().jobs) == before, "a check stores nothing"
    job = submitted(page, scene)
    assert (job.recipe, job.queue, job.environment) == ("digits@1", scene.queue, {"SEED": "7 'x'"})
    assert (job.parameters["steps"], job.parameters["learning_rate"], job.parameters["seed"]) == (40, 0.001, 0)


def test_a_command_with_rules(reader: Desk, scene: Scene) -> None:
    page = reader.visit("/submit")
    page.get_by_role("combobox", name="Recipe", exact=True).select_option("")
    box(page, "Command").fill("python train.py \\\n  --name 'two words' --empty \"\"")
    box(page, "Queue").fill(scene.queue)
    box(page, "Outputs").fill("model.bin\nlog")
    box(page, "GPU memory in GiB").fill("24")
    box(page, "Time limit in hours").fill("1.5")
    rules = box(page, "Rules")
    rules.fill("rules:\n  - name: late\n    when: los > 1\n    do: nothing_known\n")
    expect(page.get_by_text("Line 4: ")).to_be_visible()
    rules.fill(RULES)
    expect(page.get_by_text("Line 4: ")).to_have_count(0)
    job = submitted(page, scene)
    assert job.command == ["python", "train.py", "--name", "two words", "--empty", ""]
    assert (job.outputs, job.requirements.min_vram_gib, job.policy.max_runtime_s) == (["model.bin", "log"], 24, 5400)
    newest = scene.stack.client.rules(job.id).newest
    assert newest is not None and newest.text == RULES


def test_a_job_once_more_with_changes(reader: Desk, scene: Scene) -> None:
    first = scene.submit("first", rules=RULES, environment={"NAME": "it's"}, tags={"seed": "1"}, max_failures=7)
    page = reader.visit(f"/jobs/{first}")
    page.get_by_role("link", name="Submit again").click()
    box(page, "Command").wait_for()
    box(page, "Name").fill("second")
    page.get_by_label("Tags 1: value").fill("2")
    job, before = submitted(page, scene), scene.stack.job(first)
    assert (job.name, job.tags) == ("second", {"seed": "2"}) and job.id != first
    same = ("command", "queue", "environment", "outputs", "policy", "requirements", "priority")
    assert [getattr(job, name) for name in same] == [getattr(before, name) for name in same]
    expect(page.get_by_role("heading", name="second")).to_be_visible()


def test_a_submission_without_an_answer_is_repeated_as_the_same_job(desk: Desk, scene: Scene) -> None:
    page = desk.sign_in(f"/submit?from={scene.submit('lost')}")
    box(page, "Name").fill("once")
    expect(page.get_by_role("region", name="Expected cost")).to_contain_text("No estimate")

    def lose(route: Any) -> None:
        route.fetch()
        route.abort()

    page.route("**/job", lose, times=1)
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_text("The control plane does not answer.")).to_be_visible()
    job = submitted(page, scene)
    named = [one.id for one in scene.stack.client.jobs(queue=scene.queue).jobs if one.name == "once"]
    assert named == [job.id]


def test_the_cost_and_its_basis_or_why_there_is_none(reader: Desk, scene: Scene) -> None:
    page = reader.visit("/submit?recipe=digits@1")
    box(page, "Queue").fill(scene.queue)
    cost = page.get_by_role("region", name="Expected cost")
    expect(cost).to_contain_text(f"no fleet serves queue {scene.queue}, and no earlier job like this tells a price")
    page.get_by_label("A machine rented for this job").check()
    box(page, "Budget in USD").fill("5")
    box(page, "Providers").fill("loopback")
    expect(cost).to_contain_text(re.compile(r"\$[\d.]+ expected, .*of loopback at \$[\d.]+ an hour.*budget of \$5.00"))
    expect(cost).to_contain_text("assumed, as no earlier job tells")
    one_hour = cost.locator("b").inner_text()
    cost.get_by_label("Hours of work").fill("10")
    expect(cost).to_contain_text("as you say")
    assert float(cost.locator("b").inner_text()[1:]) > 5 * float(one_hour[1:])
    box(page, "GPUs").fill("2")
    box(page, "GPUs").blur()
    expect(page.get_by_text("The job needs 2 GPUs")).to_be_visible()


def test_the_cost_at_a_fleet_is_that_of_the_job_alone(reader: Desk, scene: Scene) -> None:
    client, money = scene.stack.client, Budget(total_usd=20)
    fleet = FleetSpec(name=scene.queue, providers=["loopback"], queues=[scene.queue], max_usd_per_hour=1, budget=money)
    client.put_fleet(fleet)
    page = reader.visit("/submit?recipe=digits@1")
    box(page, "Queue").fill(scene.queue)
    cost = page.get_by_role("region", name="Expected cost")
    expect(cost).to_contain_text(re.compile(rf"\$[\d.]+ expected, .*at \$[\d.]+ an hour.*\(fleet {scene.queue}\)"))
    box(page, "GPU memory in GiB").fill("48")
    expect(cost).to_contain_text(f"No estimate: needs 48 GiB VRAM, fleet {scene.queue} guarantees 0")
    client.stop_fleet(scene.queue)


def test_the_cost_follows_from_earlier_jobs_of_own_workers(reader: Desk, scene: Scene) -> None:
    scene.submit("earlier")
    scene.claim("m-1", price_usd_per_hour=3600).complete(10)
    again = scene.submit("again")
    page = reader.visit(f"/submit?from={again}")
    cost = page.get_by_role("region", name="Expected cost")
    expect(cost).to_contain_text("mean of the last 1 complete job like this")
    expect(cost).to_contain_text("of work at $3,600.00 an hour, as the workers told")


def test_the_form_is_accessible(reader: Desk) -> None:
    page = reader.visit("/submit?recipe=dreambooth-lora-sdxl@2")
    page.get_by_text("more parameters, each with a default").click()
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(box(page, "instance_prompt")).to_have_attribute("aria-invalid", "true")
    reader.examine(page)
