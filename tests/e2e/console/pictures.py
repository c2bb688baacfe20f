"""Screenshots of each view of the console, in light, in dark, and 360 pixels wide.

make console-pictures        # writes console-pictures/<view>-<light|dark|360>.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from baton.contract.admin.webhooks import WebhookCreate
from baton.contract.fleets.fleet import MachineState
from tests.e2e.console.chromium import launched
from tests.e2e.console.desk import NARROW, WIDE, Desk
from tests.e2e.console.rentals import Rentals
from tests.e2e.console.ring_work import ring_work
from tests.e2e.console.scenes import Scene
from tests.e2e.console.trainings import RULES, Training, commit_files
from tests.e2e.console.world_work import rich_world
from tests.kits.stack.stack import Stack

PICTURES = Path(__file__).resolve().parents[3] / "console-pictures"
DETAILS_MS = 2000
TRIED = (
    RULES
    + """  - name: good
    when: mean(loss, 50) < 0.6
    do: save
  - name: late
    when: step >= 1100
    do: stop
"""
)


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
        photograph_checkpoints(page, stack)
        photograph_backtest(page, stack, job)
        photograph_fleets(page, stack)
        photograph_rings(page, stack)
        photograph_world(page, stack)
        desk.close()
    sys.stdout.write(f"{PICTURES}\n")
    return 0


def photograph_checkpoints(page: Any, stack: Stack) -> None:
    """Write the download of a checkpoint's files: one verified, one missing, one on the way."""
    scene = Scene(stack, "saved")
    job, held = scene.submit("unet-portraits"), scene.claim("m-30c2")
    random = np.random.default_rng(1)
    weights = random.normal(0, 0.02, 6_000_000).astype(np.float32).tobytes()
    files = {
        "baton.json": b"{}" * 300, "optimizer.safetensors": 300 * 2**20, "state.pt": random.bytes(300_000),
        "text_encoder/model.safetensors": weights[:800_000], "unet/model.safetensors": weights,
    }  # fmt: skip
    with TemporaryDirectory() as directory:
        commit_files(held, Path(directory), files, 600)
    page.goto(f"{stack.url}/console#/jobs/{job}?tab=checkpoints")
    photograph(page, "checkpoints", page.get_by_role("button", name="Download step 600"))
    page.get_by_role("button", name="Download step 600").click()
    page.get_by_role("button", name="Download and verify state.pt").click()
    page.get_by_text("verified", exact=True).wait_for()
    headers = {"access-control-allow-origin": "*"}
    page.route("**/packs/*", lambda route: route.fulfill(status=404, headers=headers))
    page.get_by_role("button", name="Download and verify baton.json").click()
    page.get_by_role("alert").wait_for()
    page.unroute("**/packs/*")
    answers = [lambda route: route.continue_()]
    page.route("**/packs/*", lambda route: answers.pop()(route) if answers else None)
    page.get_by_role("button", name="Download and verify unet/model.safetensors").click()
    photograph(page, "dialog-checkpoint", page.get_by_role("button", name="Cancel the download"))
    page.get_by_role("button", name="Close").click()
    page.unroute("**/packs/*")


def photograph_backtest(page: Any, stack: Stack, job: str) -> None:
    """Write the back-test of rules on a run that lost a machine."""
    page.goto(f"{stack.url}/console#/jobs/{job}?tab=rules")
    page.get_by_role("button", name="Add rules").click()
    page.get_by_role("textbox", name="Rules").fill(TRIED)
    page.get_by_role("button", name="Back-test", exact=True).click()
    curve = page.get_by_role("region", name="Firings in the curve")
    curve.wait_for()
    curve.scroll_into_view_if_needed()
    photograph(page, "rules-backtest", curve)


def photograph_rings(page: Any, stack: Stack) -> None:
    """Write the views of rings."""
    rings = f"{stack.url}/console#/rings"
    page.goto(rings)
    photograph(page, "rings-none", page.get_by_text("No rings"))
    with ring_work(stack, "brains", cap=60, samples_per_insert=(0.1, 4)) as work, ring_work(stack, "shapes") as other:
        other.put("gen-0", 30)
        work.put("epoch-1", 12)
        page.goto(f"{rings}/brains")
        for samples in (12, 20, 9, 15):
            work.put("epoch-1", samples // 2, waited_s=0.4)
            work.read("train-0", 2 * samples, waited_s=0.2)
            page.get_by_text(f"{work.ring.newest().inserted} so far", exact=True).first.wait_for()
        photograph(page, "ring", page.get_by_role("table", name="Writers"))
        page.goto(rings)
        photograph(page, "rings", page.get_by_role("table", name="Rings"))


def photograph_world(page: Any, stack: Stack) -> None:
    """Write the views of an elastic job."""
    work = rich_world(Scene(stack, "elastic"))
    page.goto(f"{stack.url}/console#/jobs?queue=elastic")
    photograph(page, "jobs-nodes", page.get_by_text("3 machines"))
    page.goto(f"{stack.url}/console#/jobs/{work.job}?tab=world")
    photograph(page, "world", page.get_by_role("table", name="Nodes"))
    page.get_by_role("button", name="Exclude nodes").click()
    page.get_by_role("checkbox").first.check()
    photograph(page, "dialog-exclude", page.get_by_role("dialog"))


def photograph_fleets(page: Any, stack: Stack) -> None:
    """Write the views of fleets, whose machines no tick changes meanwhile."""
    fleets = f"{stack.url}/console#/fleets"
    page.goto(fleets)
    photograph(page, "fleets-none", page.get_by_role("heading", name="No fleets yet"))
    with Rentals(stack) as rentals:
        rentals.apply("nights", tags={"team": "vision"})
        nights = Scene(stack, "nights")
        job = nights.submit("unet-rented", tags={"team": "vision"})
        rentals.night("nights", job)
        lost = rentals.serve("nights", 1)
        nights.claim(lost.id).fail("the GPU fell off the bus")
        rentals.change(lost, MachineState.LOST)
        Training(nights.claim(rentals.serve("nights", 2).id)).train(1, 40, 200)
        rentals.spend("nights", 9.84)
        small = {"min_vram_gib": 0, "disk_gib": 1, "max_usd_per_hour": 0.22}
        rentals.apply("days", providers=["loopback"], **small, budget={"total_usd": 20})
        shortage = "total_usd has 0.15 USD left, boot and one hour of the cheapest offer need 0.20 USD"
        rentals.spend("days", 19.85, waits=shortage)
        rentals.apply("tags", providers=["loopback", "vast"], **small, budget={"per_month_usd": 90})
        queue = Scene(stack, "tags")
        for needs in ({}, {}, {"min_vram_gib": 80}):
            queue.submit("tagger", requirements=needs)
        for name, place, shown in (
            ("fleets", "", page.get_by_role("table", name="Fleets")),
            ("fleets-doctor", "?tab=doctor", page.get_by_role("listitem")),
            ("fleet", "/nights", page.get_by_role("table", name="Machines")),
            ("fleet-offers", "/tags?tab=offers", page.get_by_role("table", name="Offers")),
            ("fleet-receipts", "/nights?tab=receipts", page.get_by_role("table", name="Receipts")),
            ("fleet-events", "/nights?tab=events", page.get_by_role("region", name="Events")),
        ):
            page.goto(f"{fleets}{place}")
            photograph(page, name, shown.first)
        page.goto(f"{stack.url}/console#/jobs/{job}?tab=machines")
        photograph(page, "job-machines", page.get_by_role("table", name="Fleets"))
        page.goto(f"{stack.url}/console#/jobs/{Scene(stack, 'days').submit('unet-waits')}")
        photograph(page, "job-waits", page.get_by_text("Fleet days rents no machine"))
        page.goto(f"{fleets}/nights")
        page.get_by_role("button", name="Stop").click()
        photograph(page, "dialog-stop-fleet", page.get_by_role("dialog"))


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
