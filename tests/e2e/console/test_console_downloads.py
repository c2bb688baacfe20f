"""Verified downloads: the page compares a file with the stored checksum before the file is saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import requests
from playwright.sync_api import expect

from baton.contract.jobs.job import InputRef, JobSubmit
from baton.contract.worker.calls import CompleteRequest, DeclaredArtifact
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import HeldJob, Scene
from tests.e2e.console.trainings import Training
from tests.kits.files.declared_files import described

MODEL = random.Random(7).randbytes(300_001)
DATA = b"a,b\n1,2\n"


def finish(held: HeldJob, path: str, data: bytes) -> str:
    """Store an output and complete the job; returns the output's key."""
    worker, work = held.worker, held.work
    declared = DeclaredArtifact(**described(path, data))
    for upload in worker.declare_artifacts(work.id, work.lease_token, [declared]).missing:
        requests.put(upload.url, headers=upload.headers, data=data, timeout=30).raise_for_status()
    worker.complete(work.lease_token, CompleteRequest(job_id=work.id, step=1, artifacts=[declared]))
    return f"jobs/{work.id}/artifacts/{work.epoch}/{path}"


def saved_by(page: Any, name: str) -> tuple[str, bytes]:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=f"Download and verify {name}").click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def test_outputs_and_inputs_are_saved_after_they_were_verified(desk: Desk, scene: Scene) -> None:
    prefix = f"{scene.queue}/"
    scene.stack.write(f"{prefix}kurven/a+ 1%.csv", DATA, bucket="training-data")
    job = JobSubmit(command=["train"], queue=scene.queue, outputs=["out/model.bin"], inputs=[InputRef(prefix=prefix)])
    job_id = scene.stack.client.submit(job).id
    key = finish(scene.claim("m-1"), "out/model.bin", MODEL)
    page = desk.sign_in(f"/jobs/{job_id}?tab=files")
    assert saved_by(page, "out/model.bin") == ("model.bin", MODEL)
    expect(page.get_by_text("verified", exact=True)).to_be_visible()
    page.get_by_role("button", name="List the files").click()
    assert saved_by(page, f"{prefix}kurven/a+ 1%.csv") == ("a+ 1%.csv", DATA)
    assert desk.complaints(page) == []
    scene.stack.write(key, MODEL[:-1] + b"\0")
    downloads: list[Any] = []
    page.on("download", lambda found: downloads.append(found))  # noqa: PLW0108 - Playwright marks its handlers
    page.get_by_role("button", name="Download and verify out/model.bin").click()
    expect(page.get_by_role("alert")).to_contain_text("Nothing was saved.")
    assert downloads == []


def test_a_checkpoint_is_downloaded_by_a_command(desk: Desk, scene: Scene) -> None:
    job_id = scene.submit("saved")
    Training(scene.claim("m-1")).commit(10, 5000)
    page = desk.sign_in(f"/jobs/{job_id}?tab=checkpoints")
    page.get_by_role("button", name="Download step 10").click()
    dialog = page.get_by_role("dialog", name="Download step 10")
    expect(dialog.get_by_label("Command")).to_have_text(f"baton fetch {job_id} . --checkpoint 10")
    assert desk.complaints(page) == []
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)


def test_a_store_that_refuses_the_page_and_a_file_too_large_for_memory_are_told(desk: Desk, scene: Scene) -> None:
    job_id = scene.stack.client.submit(JobSubmit(command=["train"], queue=scene.queue, outputs=["model.bin"])).id
    finish(scene.claim("m-1"), "model.bin", MODEL)
    page = desk.sign_in("/jobs")
    page.route("**/artifacts/1/model.bin?*", lambda route: route.abort())
    page.goto(f"{scene.stack.url}/console#/jobs/{job_id}?tab=files")
    page.get_by_role("button", name="Download and verify model.bin").click()
    expect(page.get_by_role("alert")).to_contain_text("CORS")

    def enlarge(route: Any) -> None:
        answer = route.fetch()
        artifacts = answer.json()
        artifacts["artifacts"][0]["size_bytes"] = 2**30
        route.fulfill(response=answer, json=artifacts)

    page.route("**/artifacts?*", enlarge)
    page.reload()
    expect(page.get_by_text(f"baton fetch {job_id} result verifies")).to_be_visible()
    assert page.get_by_role("button", name="Download and verify").count() == 0
