"""Verified downloads: the page compares a file with the stored checksum before the file is saved."""

from __future__ import annotations

import random
from typing import Any

import requests
from playwright.sync_api import expect

from baton.contract.jobs.job import InputRef, JobSubmit
from baton.contract.worker.calls import CompleteRequest, DeclaredArtifact
from tests.e2e.console.desk import Desk
from tests.e2e.console.saved_files import note_downloads, save_file
from tests.e2e.console.scenes import HeldJob, Scene
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


def test_outputs_and_inputs_are_saved_after_they_were_verified(desk: Desk, scene: Scene) -> None:
    prefix = f"{scene.queue}/"
    scene.stack.write(f"{prefix}kurven/a+ 1%.csv", DATA, bucket="training-data")
    job = JobSubmit(command=["train"], queue=scene.queue, outputs=["out/model.bin"], inputs=[InputRef(prefix=prefix)])
    job_id = scene.stack.client.submit(job).id
    key = finish(scene.claim("m-1"), "out/model.bin", MODEL)
    page = desk.sign_in(f"/jobs/{job_id}?tab=files")
    assert save_file(page, "out/model.bin") == ("model.bin", MODEL)
    expect(page.get_by_text("verified", exact=True)).to_be_visible()
    page.get_by_role("button", name="List the files").click()
    assert save_file(page, f"{prefix}kurven/a+ 1%.csv") == ("a+ 1%.csv", DATA)
    assert desk.complaints(page) == []
    scene.stack.write(key, MODEL[:-1] + b"\0")
    downloads = note_downloads(page)
    page.get_by_role("button", name="Download and verify out/model.bin").click()
    expect(page.get_by_role("alert")).to_contain_text("Nothing was saved.")
    assert downloads == []


# The next body of an output breaks after its first bytes, as a lost connection breaks a body.
_BREAK = """() => {
  const kept = window.fetch;
  window.fetch = async (path, options) => {
    const answer = await kept(path, options);
    if (!String(path).includes("/artifacts/1/")) return answer;
    window.fetch = kept;
    const reader = answer.body.getReader();
    const pull = async (body) => {
      if (reader.begun) throw new TypeError("network error");
      reader.begun = true;
      body.enqueue((await reader.read()).value.slice(0, 3000));
    };
    return new Response(new ReadableStream({ pull }));
  };
}"""


def test_a_store_that_fails_and_a_file_too_large_for_memory_are_told(desk: Desk, scene: Scene) -> None:
    job_id = scene.stack.client.submit(JobSubmit(command=["train"], queue=scene.queue, outputs=["model.bin"])).id
    finish(scene.claim("m-1"), "model.bin", MODEL)
    page = desk.sign_in("/jobs")
    page.route("**/artifacts/1/model.bin?*", lambda route: route.abort())
    page.goto(f"{scene.stack.url}/console#/jobs/{job_id}?tab=files")
    page.get_by_role("button", name="Download and verify model.bin").click()
    expect(page.get_by_role("alert")).to_contain_text("CORS")
    page.unroute("**/artifacts/1/model.bin?*")
    page.evaluate(_BREAK)
    page.get_by_role("button", name="Download and verify model.bin").click()
    expect(page.get_by_role("alert")).to_have_text("The connection broke after 3 kB. Nothing was saved.")
    assert save_file(page, "model.bin") == ("model.bin", MODEL)

    def enlarge(route: Any) -> None:
        answer = route.fetch()
        artifacts = answer.json()
        artifacts["artifacts"][0]["size_bytes"] = 2**30
        route.fulfill(response=answer, json=artifacts)

    page.route("**/artifacts?*", enlarge)
    page.reload()
    expect(page.get_by_text(f"baton fetch {job_id} result verifies")).to_be_visible()
    assert page.get_by_role("button", name="Download and verify").count() == 0
