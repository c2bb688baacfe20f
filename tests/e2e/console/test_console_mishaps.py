"""Cut answers, pasted links and keys, addresses by hand, changes of somebody else: no view takes them amiss."""

from __future__ import annotations

from playwright.sync_api import expect

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
