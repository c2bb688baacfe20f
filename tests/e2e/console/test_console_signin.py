"""Sign in, sign out, a control plane that is away, a wrong clock: the frame of every view."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import expect

from baton.contract.names import Scope
from functions.api.admin.keys import generate_key
from functions.domain.access.sessions import LINK_LIFE_S, session_id_of
from functions.handlers.wiring import SystemRandomness
from functions.storage.dynamodb.tokens import DynamoTokenStore
from gpu_client.transport.api.client import BatonClient
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene
from tests.kits.stack.stack import Stack

MAX_REQUESTS = 5
_KEPT = "[document.cookie, Object.keys(localStorage), Object.keys(sessionStorage)]"


def test_a_link_signs_in_once_and_leaves_no_secret_in_the_page(desk: Desk, stack: Stack) -> None:
    link = desk.link()
    page = desk.open(link)
    expect(page.get_by_role("heading", name="Sign in to tenant default?")).to_be_visible()
    assert "code=" not in page.url
    assert desk.complaints(page) == []
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Jobs", exact=True).wait_for()
    assert page.url == f"{stack.url}/console#/jobs"
    assert page.evaluate(_KEPT) == ["", [], []]
    page.go_back()
    assert "code=" not in page.url
    desk.context.clear_cookies()
    again = desk.open(link)
    expect(again.get_by_role("alert")).to_contain_text("link")
    assert again.get_by_label("API key").is_visible()
    assert desk.complaints(again) == []


def test_a_language_that_is_no_tag_leaves_no_page_blank(desk: Desk, stack: Stack) -> None:
    """A browser has such a language on a machine with the locale C."""
    odd = "Object.defineProperty(Navigator.prototype, 'language', {get: () => 'en-US@posix'})"
    desk.context.add_init_script(odd)
    page = desk.open()
    expect(page.get_by_label("API key")).to_be_visible()


def test_a_link_of_somebody_else_signs_in_after_consent_alone(desk: Desk, stack: Stack) -> None:
    """A link that is sent to a reader names tenant and key, and changes no session before the reader agrees."""
    key, whole = generate_key(
        SystemRandomness(), tenant="attacker", name="<b>your key</b>", scopes=[Scope.SUBMIT], now=0, expires_at=None
    )
    DynamoTokenStore(stack.tables, stack.prefix).put_key(key)
    with BatonClient(stack.url, whole) as sender:
        link = sender.make_session_link().url
    page = desk.sign_in()
    sent = desk.open(link)
    expect(sent.get_by_role("heading", name="Sign in to tenant attacker?")).to_be_visible()
    expect(sent.get_by_text("<b>your key</b>")).to_be_visible()
    assert key.id in sent.locator(".signin-card").inner_text()
    assert not [request for request in desk.requests if request.endswith("/sessions")]
    sent.get_by_role("button", name="Stay out").click()
    sent.get_by_role("heading", name="Jobs", exact=True).wait_for()
    assert sent.locator(".account-who strong").inner_text() == "default", "the earlier session goes on"
    page.reload()
    assert page.locator(".account-who strong").inner_text() == "default"


def test_a_link_that_ends_before_consent_is_refused(desk: Desk, stack: Stack) -> None:
    link = desk.link()
    page, other = desk.open(link), desk.open(link)
    other.get_by_role("button", name="Sign in").click()
    other.get_by_role("heading", name="Jobs", exact=True).wait_for()
    other.get_by_role("button", name="Sign out").click()
    other.get_by_label("API key").wait_for()
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("used already")
    assert page.get_by_label("API key").is_visible()


def test_a_link_that_has_expired_is_refused_when_it_is_opened_and_at_consent(desk: Desk, stack: Stack) -> None:
    link = desk.link()
    page = desk.open(link)
    expect(page.get_by_role("heading", name="Sign in to tenant default?")).to_be_visible()
    tokens = DynamoTokenStore(stack.tables, stack.prefix)
    key = tokens.get_key(link.partition("#code=")[2].split("_")[1])
    assert key is not None and key.expires_at is not None
    tokens.replace_key(replace(key, expires_at=key.expires_at - LINK_LIFE_S))
    page.get_by_role("button", name="Sign in").click()
    for refused in (page, desk.open(link)):
        expect(refused.get_by_role("alert")).to_contain_text("expired")
        expect(refused.get_by_label("API key")).to_be_visible()
    assert tokens.get_key(session_id_of(key)) is None, "no session began"


def test_a_pasted_key_signs_in_and_a_wrong_one_is_refused(desk: Desk, stack: Stack) -> None:
    page = desk.open()
    page.get_by_label("API key").fill("baton_wrong_key")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not known")
    page.get_by_label("API key").fill(stack.keys["submit"])
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Jobs", exact=True).wait_for()
    assert page.evaluate(_KEPT) == ["", [], []]
    assert stack.keys["submit"] not in page.content()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
    page.reload()
    page.get_by_label("API key").wait_for()


def test_a_revoked_session_ends_at_the_sign_in_page(desk: Desk, stack: Stack) -> None:
    page = desk.sign_in()
    key_id = page.locator(".account-who").get_attribute("title").removeprefix("Key ")
    stack.client.revoke_key(key_id)
    page.get_by_label("API key").wait_for()
    assert page.get_by_role("heading", name="Jobs", exact=True).count() == 0


def test_a_second_tab_is_signed_in_and_out_with_the_first(desk: Desk) -> None:
    first = desk.sign_in()
    second = desk.open()
    second.get_by_role("heading", name="Jobs", exact=True).wait_for()
    first.get_by_role("button", name="Sign out").click()
    first.get_by_label("API key").wait_for()
    second.get_by_label("API key").wait_for()


def test_the_first_view_takes_few_requests_to_one_origin(desk: Desk, stack: Stack) -> None:
    page = desk.sign_in()
    desk.requests.clear()
    with page.expect_response("**/jobs?*"):
        page.reload()
    first = desk.requests[:]
    assert len(first) <= MAX_REQUESTS, first
    assert all(f" {stack.url}/" in request or " data:" in request for request in first)


def test_an_absent_control_plane_is_told_and_the_page_goes_on(desk: Desk, scene: Scene) -> None:
    page = desk.sign_in()
    desk.context.set_offline(True)
    expect(page.get_by_text("The control plane does not answer")).to_be_visible()
    scene.submit("while-away")
    desk.context.set_offline(False)
    expect(page.get_by_text("while-away")).to_be_visible(timeout=20_000)
    expect(page.get_by_text("The control plane does not answer")).to_have_count(0)


def hide(page: Any, hidden: bool) -> None:
    page.evaluate(
        "(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')) }",
        hidden,
    )


def test_a_hidden_tab_asks_nothing_and_a_shown_one_asks_at_once(desk: Desk, scene: Scene) -> None:
    page = desk.sign_in(f"/jobs?queue={scene.queue}")
    page.clock.install()
    page.reload()
    page.get_by_text("No job matches").wait_for()
    hide(page, True)
    desk.requests.clear()
    page.clock.fast_forward(120_000)
    assert desk.requests == []
    scene.submit("while-hidden")
    hide(page, False)
    expect(page.get_by_text("while-hidden")).to_be_visible()
    # The addresses of pictures expire, so their list is read without a change of the job, too.
    page.get_by_role("link", name="while-hidden").click()
    page.get_by_role("link", name="Pictures", exact=True).click()
    page.get_by_role("heading", name="No pictures yet").wait_for()
    hide(page, True)
    desk.requests.clear()
    for _ in range(3):
        page.clock.fast_forward(40_000)
    assert desk.requests == []
    with page.expect_request("**/artifacts?*"):
        hide(page, False)


# Answers in the page: no network stands between two of its questions, so the clock alone says when they come.
_ANSWER = """() => {
  window.asked = [];
  window.answers = { etag: 0, changing: false };
  const kept = window.fetch;
  window.fetch = async (path, options) => {
    if (!String(path).startsWith("/jobs?")) return kept(path, options);
    asked.push(performance.now() / 1000);
    if (!answers.changing) return new Response(null, { status: 304 });
    answers.etag += 1;
    return Response.json({ jobs: [], next_cursor: null, counts: null }, { headers: { etag: `"${answers.etag}"` } });
  };
}"""


def test_questions_become_rarer_while_nothing_changes_and_frequent_again(desk: Desk, scene: Scene) -> None:
    page = desk.sign_in(f"/jobs?queue={scene.queue}")
    page.get_by_text("No job matches").wait_for()
    with page.expect_response(lambda answer: "/jobs?" in answer.url and answer.status == 304):
        desk.come_back(page)
    page.clock.install()
    page.reload()
    page.get_by_text("No job matches").wait_for()
    page.evaluate(_ANSWER)

    def pauses_s(seconds: int) -> list[float]:
        page.evaluate("asked.length = 0")
        page.clock.run_for(seconds * 1000)
        asked = page.evaluate("asked")
        return [round(after - before, 1) for before, after in pairwise(asked)]

    desk.come_back(page)
    quiet = pauses_s(90)
    assert quiet == sorted(quiet), "each pause is at least as long as the one before"
    assert quiet[0] < 6 and quiet[-2:] == [15, 15] and len(quiet) <= 10, quiet
    page.evaluate("answers.changing = true")
    # The answer that brings a change ends the long pauses.
    assert set(pauses_s(60)) == {5}


@pytest.mark.parametrize("wrong", ["2020-01-01T00:00:00Z", "2038-01-01T00:00:00Z"])
def test_a_wrong_clock_changes_neither_the_session_nor_ages(desk: Desk, scene: Scene, wrong: str) -> None:
    job_id = scene.submit("new-job")
    page = desk.context.new_page()
    page.clock.install(time=wrong)
    page.goto(desk.link())
    page.get_by_role("button", name="Sign in").click()
    row = page.get_by_role("row").filter(has_text=job_id[:8])
    expect(row.get_by_role("cell").nth(7)).to_have_text(re.compile(r"now|\d+ s"))
