"""Screenshots of each view of the console, in light, in dark, and 360 pixels wide.

make console-pictures        # writes console-pictures/<view>-<light|dark|360>.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from baton.contract.admin.webhooks import WebhookCreate
from tests.e2e.console.chromium import launched
from tests.e2e.console.desk import NARROW, WIDE, Desk
from tests.e2e.console.scenes import Scene
from tests.e2e.console.trainings import Training
from tests.kits.stack.stack import Stack

PICTURES = Path(__file__).resolve().parents[3] / "console-pictures"
DETAILS_MS = 2000


def main() -> int:
    """Photograph all views of a local stack; return the exit status."""
    PICTURES.mkdir(exist_ok=True)
    with Stack() as stack, launched() as browser:
        scene = Scene(stack, "gpu")
        scene.all_states()
        job = scene.submit("unet-photographs", tags={"project": "faces"})
        lost = scene.claim("m-30c2")
        Training(lost).train(1, 640, 2000)
        scene.lose(lost)
        Training(scene.claim("vast-29471999"), seed=2).train(600, 1240, 2000)
        stack.client.create_webhook(WebhookCreate(url="https://hooks.example.com/baton"))
        desk = Desk(browser, stack)
        signing = desk.open()
        photograph(signing, "signin", signing.get_by_label("API key"))
        signing.goto(desk.link())
        signing.reload()
        photograph(signing, "signin-link", signing.get_by_role("button", name="Sign in"))
        page = desk.sign_in()
        for name, place, shown in (
            ("jobs", "jobs", page.get_by_text("2 kills")),
            ("keys", "keys", page.get_by_role("table", name="API keys")),
            ("webhooks", "webhooks", page.get_by_text("https://hooks.example.com/baton")),
            ("job", f"jobs/{job}", page.get_by_role("heading", name="unet-photographs")),
            ("submit", "submit?recipe=digits@1", page.get_by_text("Optimizer steps.")),
            ("jobs-none", "jobs?text=no+such+job", page.get_by_text("No job matches")),
        ):
            page.goto(f"{stack.url}/console#/{place}")
            photograph(page, name, shown.first)
        page.goto(f"{stack.url}/console#/jobs")
        page.get_by_role("button", name="Stop sweep-03").first.click()
        photograph(page, "dialog-stop", page.get_by_role("dialog"))
        page.goto(f"{stack.url}/console#/keys")
        page.get_by_role("button", name="New key").click()
        photograph(page, "dialog-key", page.get_by_role("dialog"))
        desk.close()
    sys.stdout.write(f"{PICTURES}\n")
    return 0


def photograph(page: Any, name: str, shown: Any) -> None:
    """Write the view in light, dark and 360 pixels, once `shown` is visible and details of its rows have come."""
    shown.wait_for()
    page.wait_for_timeout(DETAILS_MS)
    for suffix, scheme, size in (("light", "light", WIDE), ("dark", "dark", WIDE), ("360", "light", NARROW)):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size(size)
        page.screenshot(path=PICTURES / f"{name}-{suffix}.png")
    page.set_viewport_size(WIDE)


if __name__ == "__main__":
    sys.exit(main())
