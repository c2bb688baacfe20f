"""A reader's browser: signs in as people do, and notes what pages complain about."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.console.chromium import AXE
from tests.kits.stack.control_plane import ControlPlane
from tests.kits.waiting import PATIENCE_S

WIDE = {"width": 1440, "height": 860}
NARROW = {"width": 360, "height": 740}
EXPECTED = "Failed to load resource"
"""The browser reports each answer of 400 and more, also a refusal that the test provokes."""
# The whole result of axe-core has an entry for each element: its way to the test would cost more than the examination.
_EXAMINE = """async () => {
  const tags = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"];
  const { violations } = await axe.run(document, { runOnly: tags, resultTypes: ["violations"], preload: false });
  return violations
    .filter((one) => ["serious", "critical"].includes(one.impact))
    .flatMap(({ id, help, nodes }) =>
      nodes.map((node) => `${id}: ${help}: ${node.html.slice(0, 200)} ${node.failureSummary}`));
}"""


class Desk:
    """Browser context with pages of one control plane."""

    def __init__(self, browser: Any, stack: ControlPlane, **context: Any) -> None:
        self.stack = stack
        self.context = browser.new_context(
            viewport=WIDE, locale="en-GB", timezone_id="Europe/Berlin", reduced_motion="reduce", **context
        )
        self.context.set_default_timeout(PATIENCE_S * 1000)
        self.faults: list[str] = []
        self.requests: list[str] = []

    def link(self, key: str = "admin") -> str:
        """Return a one-time link as `baton console` gets it."""
        return str(self._call("POST", "/sessions/links", key)["url"])

    def open(self, address: str = "") -> Any:
        """Open a page of the console without signing in."""
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.requests.append(f"{request.method} {request.url}"))
        page.goto(address or f"{self.stack.url}/console")
        return page

    def sign_in(self, place: str = "/jobs", key: str = "admin") -> Any:
        """Sign in and open a place of the console. `test_console_signin` signs in by hand."""
        code = self.link(key).partition("#code=")[2]
        answer = self.context.request.post(f"{self.stack.url}/sessions", data={"code": code})
        assert answer.ok, answer.text()
        page = self.open(f"{self.stack.url}/console#{place}")
        page.get_by_role("navigation", name="Places").wait_for()
        return page

    def visit(self, place: str) -> Any:
        """Open a place in the first page: light, wide, without the state and the toasts of earlier views."""
        page = self.context.pages[0]
        page.evaluate("document.querySelectorAll('.toast [aria-label=Dismiss]').forEach((one) => one.click())")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(WIDE)
        page.goto(f"{self.stack.url}/console#/")
        page.get_by_role("heading", name="No such page").wait_for()
        page.goto(f"{self.stack.url}/console#{place}")
        return page

    def serve_jobs(self, page: Any, jobs: list[dict[str, Any]]) -> None:
        """Answer the page's lists of jobs from `jobs`, newest first, in place of the control plane."""

        def answer(route: Any) -> None:
            query = dict(part.split("=", 1) for part in route.request.url.partition("?")[2].split("&"))
            begin = int(query.get("cursor", 0))
            end = begin + int(query["limit"])
            counts = {job["state"]: min(len(jobs), 100) for job in jobs[:1]} if "counts" in query else None
            body = {"jobs": jobs[begin:end], "next_cursor": str(end) if end < len(jobs) else None, "counts": counts}
            route.fulfill(status=200, content_type="application/json", body=json.dumps(body))

        page.route("**/jobs?*", answer)

    def come_back(self, page: Any) -> None:
        """Let the page ask at once, as after the reader has come back from another tab; else it may ask after 15 s."""
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def complaints(self, page: Any) -> list[str]:
        """Return what axe-core finds serious on the page."""
        if not page.evaluate("'axe' in window"):
            page.evaluate(AXE.read_text(encoding="utf-8"))
        found: list[str] = page.evaluate(_EXAMINE)
        return found

    def examine(self, page: Any) -> None:
        """Check the page in light, and in dark at 360 px: axe-core finds nothing serious, and nothing is cut off."""
        for scheme, size in (("light", WIDE), ("dark", NARROW)):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size(size)
            assert self.complaints(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") == size["width"]

    def close(self) -> None:
        """Close all pages."""
        self.context.close()

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning") and EXPECTED not in message.text:
            self.faults.append(message.text)

    def _call(self, method: str, path: str, key: str) -> Any:
        answer = self.context.request.fetch(
            f"{self.stack.url}{path}", method=method, headers={"x-api-key": self.stack.keys[key]}
        )
        assert answer.ok, answer.text()
        return answer.json()
