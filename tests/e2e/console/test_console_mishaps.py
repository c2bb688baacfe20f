"""Cut answers, pasted links and keys, addresses by hand, changes of somebody else: no view takes them amiss."""

from __future__ import annotations

from playwright.sync_api import expect

from baton.contract.admin.shares import ShareRequest
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene


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
