"""A real training in the console: its worker is killed, the next worker goes on, and the page shows each of these."""

from __future__ import annotations

import io
import random
import re

import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.e2e.console.desk import Desk
from tests.e2e.console.saved_files import save_file
from tests.kits.stack.workshop import Workshop

pytestmark = [pytest.mark.emulator, pytest.mark.processes]


def test_a_training_is_watched_through_the_loss_of_its_machine(desk: Desk, shop: Workshop) -> None:
    stack, rng = shop.stack, random.Random(7)
    for number in range(30):
        Image.frombytes("L", (8, 8), rng.randbytes(64)).save(file := io.BytesIO(), "PNG")
        stack.write(f"{shop.queue}/{number % 3}/{number}.png", file.getvalue(), bucket="training-data")
    gate = shop.gate(100)
    page = desk.sign_in(f"/jobs?queue={shop.queue}")
    job_id = shop.submit(
        "",
        {"steps": 200, "checkpoint_every": 20, "batch_size": 2, "hidden": 8},
        command=["python", "-m", "gpu_client.training.digits"],
        outputs=("model.safetensors",),
        inputs=(f"{shop.queue}/",),
        environment=gate.of_sessions,
    )
    row = page.get_by_role("row").filter(has_text=job_id[:8])
    expect(row).to_contain_text("Waiting")
    lost = shop.agent("w1")
    expect(row).to_contain_text(re.compile(r"\d+ of 200"))
    row.get_by_role("link").first.click()
    expect(page.get_by_role("img", name=re.compile("^loss over steps"))).to_be_visible()
    stack.wait_for_commit(job_id, 1)
    shop.lose(lost, job_id)
    expect(page.get_by_text("1 mark in words")).to_be_visible()
    gate.open()
    shop.agent("w2")
    expect(page.get_by_text("2 marks in words")).to_be_visible()
    expect(page.locator("main")).to_contain_text("Complete")
    expect(page.get_by_role("img", name=re.compile("attempt 2"))).to_be_visible()

    newest = stack.client.checkpoints(job_id).checkpoints[0]
    page.get_by_role("link", name="Checkpoints", exact=True).click()
    page.get_by_role("button", name=f"Download step {newest.step}", exact=True).click()
    for path, content in stack.files_of(stack.manifest(newest.manifest_key)).items():
        assert save_file(page, path) == (path, content)
    expect(page.get_by_text("verified", exact=True)).not_to_have_count(0)
