"""Files of a checkpoint: joined from stored parts and verified in the browser before they are saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from baton.contract.admin.shares import ShareRequest
from baton.contract.checkpoints.manifest import Manifest
from tests.e2e.console.desk import Desk
from tests.e2e.console.saved_files import note_downloads, save_file
from tests.e2e.console.scenes import Scene
from tests.e2e.console.trainings import commit_files
from tests.kits.stack.stack import Stack

STEP = 1200
MODEL = "unet/model.safetensors"
HOSTILE = "x/..\u202egpj.<b>|exe"
RANDOM = np.random.default_rng(3)
FILES: dict[str, bytes | int] = {
    MODEL: RANDOM.normal(0, 0.02, 60_000).astype(np.float32).tobytes(),
    HOSTILE: RANDOM.bytes(90_000),
    "trainer_state.json": b'{"step": 1200}',
    "optimizer.pt": 256 * 2**20 + 1,
}


@pytest.fixture
def saved(scene: Scene, tmp_path: Path) -> tuple[str, Manifest]:
    """A job with a checkpoint of compressed and raw chunks, a hostile name, and a file too large for a page."""
    job_id = scene.submit("saved")
    held = scene.claim("m-1")
    manifest = commit_files(held, tmp_path, FILES, STEP)
    held.worker.close()
    return job_id, manifest


def open_files(page: Any) -> Any:
    page.get_by_role("button", name="Download step 1,200", exact=True).click()
    dialog = page.get_by_role("dialog", name="Download step 1,200")
    expect(dialog.get_by_role("listitem")).to_have_count(4)
    return dialog


def pack_of(manifest: Manifest, path: str) -> str:
    """Return the pack of the first chunk of a file."""
    (file,) = (file for file in manifest.files if file.path == path)
    pack = manifest.chunks[file.chunks[0]].pack
    assert pack is not None
    return manifest.packs[pack].blake3


def test_files_are_verified_before_they_are_saved(
    desk: Desk, browser: Any, stack: Stack, saved: tuple[str, Manifest]
) -> None:
    job_id, manifest = saved
    assert "planes" in {chunk.codec for chunk in manifest.chunks}
    page = desk.sign_in(f"/jobs/{job_id}?tab=checkpoints")
    expect(page.get_by_role("row").nth(1)).to_contain_text(re.compile(r"1,200.*269 MB.*293 kB.*loss 0\.5.*best loss"))
    assert not any("/console/reader-" in one for one in desk.requests), "the decoder comes with the first download"
    dialog = open_files(page)
    assert save_file(page, MODEL) == ("model.safetensors", FILES[MODEL])
    expect(dialog.get_by_text("verified", exact=True)).to_be_visible()
    name, content = save_file(page, HOSTILE)
    assert content == FILES[HOSTILE]
    assert re.fullmatch(r"[._]*gpj\._b__exe", name), name
    expect(dialog.get_by_role("listitem").filter(has_text="optimizer.pt")).to_contain_text("use the command")
    expect(dialog.get_by_label("Command")).to_have_text(f"baton fetch {job_id} . --checkpoint {STEP}")
    assert desk.complaints(page) == []

    reader = Desk(browser, stack)
    shared = reader.open(stack.client.share_job(job_id, ShareRequest()).url)
    shared.get_by_role("link", name="Checkpoints", exact=True).click()
    expect(shared.get_by_role("row")).to_have_count(2)
    expect(shared.get_by_role("button", name=re.compile("Download"))).to_have_count(0)
    assert reader.faults == []
    reader.close()


def test_urls_that_run_out_are_asked_for_again_and_a_download_can_be_canceled(
    desk: Desk, saved: tuple[str, Manifest]
) -> None:
    job_id, _ = saved
    page = desk.sign_in(f"/jobs/{job_id}?tab=checkpoints")
    dialog = open_files(page)
    held: list[Any] = []
    page.route("**/packs/*", lambda route: held.append(route))  # noqa: PLW0108 - Playwright marks its handlers
    downloads = note_downloads(page)
    begin = page.get_by_role("button", name=f"Download and verify {MODEL}", exact=True)
    begin.click()
    page.get_by_role("button", name=f"Cancel the download of {MODEL}").click()
    expect(begin).to_be_enabled()
    assert downloads == [] and len(held) == 1
    page.unroute("**/packs/*")

    expired = [403]

    def refuse_once(route: Any) -> None:
        headers = {"access-control-allow-origin": "*"}
        route.fulfill(status=expired.pop(), headers=headers) if expired else route.continue_()

    page.route("**/packs/*", refuse_once)
    desk.requests.clear()
    assert save_file(page, "trainer_state.json") == ("trainer_state.json", b'{"step": 1200}')
    assert [one for one in desk.requests if "/urls" in one] == [
        f"POST {desk.stack.url}/job/{job_id}/checkpoints/{STEP}/urls"
    ]
    expect(dialog.get_by_role("alert")).to_have_count(0)


def test_damaged_and_truncated_packs_are_refused(desk: Desk, stack: Stack, saved: tuple[str, Manifest]) -> None:
    job_id, manifest = saved
    key = f"packs/{pack_of(manifest, MODEL)}"
    stored = stack.read(key)
    page = desk.sign_in(f"/jobs/{job_id}?tab=checkpoints")
    dialog = open_files(page)
    downloads = note_downloads(page)
    for damaged, reason in (
        (bytes(byte ^ 1 for byte in stored), "does not match its BLAKE3: the checkpoint is damaged."),
        (stored[:100], "is shorter than the"),
    ):
        stack.write(key, damaged)
        page.get_by_role("button", name=f"Download and verify {MODEL}", exact=True).click()
        expect(dialog.get_by_role("alert")).to_contain_text(reason)
        expect(dialog.get_by_role("alert")).to_contain_text("Nothing was saved.")
    assert desk.complaints(page) == []
    stack.write(key, stored)
    assert save_file(page, MODEL)[0] == "model.safetensors"
    assert len(downloads) == 1, "the intact one alone"


def test_a_page_from_before_an_update_says_so(desk: Desk, saved: tuple[str, Manifest]) -> None:
    """An update of the control plane replaces the script that the page has not loaded yet."""
    job_id, _ = saved
    page = desk.sign_in("/jobs")
    page.route("**/console/reader-*.js", lambda route: route.fulfill(status=404))
    page.goto(f"{desk.stack.url}/console#/jobs/{job_id}?tab=checkpoints")
    page.get_by_role("button", name="Download step 1,200", exact=True).click()
    dialog = page.get_by_role("dialog", name="Download step 1,200")
    expect(dialog.get_by_role("alert")).to_contain_text("Load the page again.")
    expect(dialog.get_by_label("Command")).to_contain_text("baton fetch")
