"""Cut answers, pasted links and keys, addresses by hand, changes of somebody else: no view takes them amiss."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from baton.contract.admin.keys import KeyCreate, KeyPage
from baton.contract.admin.shares import ShareRequest
from baton.contract.admin.webhooks import WebhookCreate
from baton.contract.names import Scope
from gpu_client.transport.api.client import BatonClient
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene
from tests.e2e.console.trainings import RULES, Training
from tests.kits.stack.stack import Stack


def test_a_cut_answer_ends_no_view(desk: Desk, scene: Scene) -> None:
    """A connection may break within an answer: the page asks again, as without an answer."""
    page = desk.sign_in(f"/jobs?queue={scene.queue}")
    page.get_by_text("No job matches").wait_for()
    page.route("**/jobs?*", lambda route: route.fulfill(status=200, body='{"jobs": ['))
    desk.come_back(page)
    expect(page.get_by_text("The control plane does not answer")).to_be_visible()
    page.unroute("**/jobs?*")
    scene.submit("after-the-cut")
    expect(page.get_by_text("after-the-cut")).to_be_visible()


def test_a_link_that_is_pasted_into_an_open_tab_signs_in_and_leaves_the_address(desk: Desk, scene: Scene) -> None:
    """The browser then changes the fragment alone, and loads no page."""
    job_id = scene.submit("pasted")
    page = desk.sign_in()
    page.goto(desk.link())
    expect(page.get_by_role("heading", name="Sign in to tenant default?")).to_be_visible()
    assert "code=" not in page.url
    page.goto(desk.stack.client.share_job(job_id, ShareRequest()).url)
    expect(page.get_by_text("Shared job")).to_be_visible()
    assert page.url.endswith(f"#/jobs/{job_id}")


def test_a_key_for_administration_alone_sees_no_jobs(desk: Desk, stack: Stack) -> None:
    made = stack.client.create_key(KeyCreate(name="admin-alone", scopes=[Scope.ADMIN], expires_in_s=3600))
    with BatonClient(stack.url, made.key) as client:
        link = client.make_session_link().url
    page = desk.open(link)
    page.get_by_role("button", name="Sign in").click()
    places = page.get_by_role("navigation", name="Places")
    expect(places.get_by_role("link")).to_have_text(["Keys", "Webhooks"])
    places.get_by_role("link", name="Keys").click()
    expect(page.get_by_role("table", name="API keys")).to_contain_text("admin-alone")


def test_more_keys_than_fit_into_an_answer_are_all_listed(desk: Desk, stack: Stack) -> None:
    """The API lists the oldest key first, and each machine that enrols leaves a key for a month."""
    keys = stack.client.list_keys().keys

    def answer(route: Any) -> None:
        second = "cursor=next" in route.request.url
        body = KeyPage(keys=keys[1:] if second else keys[:1], next_cursor=None if second else "next")
        route.fulfill(status=200, content_type="application/json", body=body.model_dump_json())

    page = desk.sign_in()
    page.route("**/keys?*", answer)
    page.goto(f"{stack.url}/console#/keys")
    for key in (one for one in keys if one.kind is None and one.revoked_at is None):
        expect(page.get_by_role("table", name="API keys").get_by_text(key.id[:8])).to_be_visible()


def test_rules_that_somebody_else_has_changed_meanwhile_are_not_replaced(desk: Desk, scene: Scene) -> None:
    job_id = scene.submit("shared-rules", rules=RULES)
    page = desk.sign_in(f"/jobs/{job_id}?tab=rules")
    page.clock.install()
    page.reload()
    page.get_by_role("button", name="Change the rules").click()
    expect(page.get_by_text("No faults.")).to_be_visible()
    # The check of the change gets no answer, and the page repeats the check by itself.
    page.route("**/rules/check", lambda route: route.abort(), times=1)
    page.get_by_role("textbox", name="Rules").fill(RULES.replace("3 *", "4 *"))
    page.clock.fast_forward(1000)
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    page.clock.fast_forward(6000)
    expect(page.get_by_text("No faults.")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    theirs = RULES.replace("3 *", "5 *")
    scene.stack.client.put_rules(job_id, theirs)
    desk.come_back(page)
    expect(page.get_by_text("Revision 2")).to_be_visible()
    page.get_by_role("button", name="Put in force").click()
    expect(page.get_by_role("alert")).to_contain_text("revision")
    newest = scene.stack.client.rules(job_id).newest
    assert newest is not None and newest.text == theirs


def test_a_line_of_the_rules_does_not_end_the_copied_command(desk: Desk, scene: Scene) -> None:
    """A shell would run the lines after the mark of a here-document."""
    job_id = scene.submit("hostile-rules")
    page = desk.sign_in(f"/jobs/{job_id}?tab=rules")
    page.get_by_role("button", name="Add rules").click()
    page.get_by_role("textbox", name="Rules").fill("rules:\nRULES\necho owned\n")
    page.get_by_text("The back-test as a command").click()
    lines = page.get_by_label("Command").inner_text().split("\n")
    (mark,) = re.findall(r"<<'(\w+)'$", lines[0])
    assert [at for at, line in enumerate(lines) if line == mark] == [len(lines) - 2]


def test_an_address_with_a_path_for_a_job_names_no_other_call(desk: Desk, scene: Scene) -> None:
    page = desk.sign_in("/jobs/..%2Frecipes")
    expect(page.get_by_role("heading", name="No such page")).to_be_visible()
    page.goto(f"{desk.stack.url}/console#/submit?from=..%2Frecipes")
    expect(page.get_by_role("alert")).to_contain_text("not_found")
    job_id = scene.submit("compared")
    Training(scene.claim("m-1")).train(1, 20, 20)
    desk.requests.clear()
    page.goto(f"{desk.stack.url}/console#/jobs/{job_id}?with=..%2Frecipes")
    expect(page.get_by_role("img", name=re.compile("^loss over steps"))).to_be_visible()
    assert not [one for one in desk.requests if one.endswith("/recipes")]


def test_the_log_of_an_ended_job_goes_on_when_the_job_runs_again(desk: Desk, scene: Scene) -> None:
    job_id = scene.submit("run-again", max_failures=1)
    first = scene.claim("m-1")
    Training(first).send(["the first attempt"])
    first.fail("out of luck")
    page = desk.sign_in(f"/jobs/{job_id}?tab=log")
    page.clock.install()
    page.reload()
    expect(page.get_by_text("the first attempt")).to_be_visible()
    # The page reads the log of an ended job once more at most.
    page.clock.fast_forward(20_000)
    scene.stack.client.retry(job_id)
    Training(scene.claim("m-2")).send(["the second attempt"])
    page.clock.fast_forward(20_000)
    expect(page.get_by_text("the second attempt")).to_be_visible()


def test_a_refused_page_of_deliveries_is_told(desk: Desk, stack: Stack) -> None:
    hook = stack.client.create_webhook(WebhookCreate(url="https://hooks.example.com/mishap", every_job=False))
    page = desk.sign_in("/webhooks")
    one = {"event_id": "146683a1#1", "type": "job.submitted", "state": "failed", "attempts": 1, "last_at": 1790000000}
    known = {"deliveries": [{**one, "status": None, "problem": None}], "next_cursor": "gone"}
    refusal = {"error": {"code": "invalid_cursor", "message": "The cursor is not valid."}}

    def answer(route: Any) -> None:
        refused = "cursor=gone" in route.request.url
        route.fulfill(status=422 if refused else 200, json=refusal if refused else known)

    page.route("**/deliveries?*", answer)
    card = page.locator("section").filter(has_text=hook.url)
    card.get_by_role("button", name="Deliveries").click()
    card.get_by_role("button", name="Show older").click()
    expect(page.get_by_text("The cursor is not valid.")).to_be_visible()
    stack.client.delete_webhook(hook.id)


def test_a_reader_of_a_shared_job_learns_that_its_command_lacks_values(desk: Desk, scene: Scene) -> None:
    job_id = scene.submit("shared-document", environment={"TOKEN": "s3cret"})
    page = desk.open(scene.stack.client.share_job(job_id, ShareRequest()).url)
    page.get_by_role("link", name="Files", exact=True).click()
    expect(page.get_by_text("a shared link leaves out the values of its 1 environment variable")).to_be_visible()
    assert "s3cret" not in page.content()


def test_a_shared_link_that_ends_leaves_no_old_state_on_the_screen(desk: Desk, scene: Scene) -> None:
    job_id = scene.submit("shared-for-a-while")
    made = scene.stack.client.share_job(job_id, ShareRequest())
    page = desk.open(made.url)
    expect(page.get_by_role("heading", name="shared-for-a-while")).to_be_visible()
    scene.stack.client.revoke_key(made.id)
    desk.come_back(page)
    expect(page.get_by_role("alert")).to_contain_text("revoked")
    expect(page.get_by_role("heading", name="shared-for-a-while")).to_have_count(0)
