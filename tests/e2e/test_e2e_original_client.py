"""The original orchestrator's client and worker run jobs to their end on the local stack, over real HTTP."""

from __future__ import annotations

import io
import random
import time
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.functional.api.original_client import JOB_BODY, PART_BYTES, OriginalClient
from tests.kits.stack.original_job import relay_to, run_whole_job
from tests.kits.stack.stack import Stack
from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

IMAGES = {f"timber/IMG_{n:04d}.jpg": b"image %d" % n for n in range(3)} | {"timber/sub dir/ü+%:1.jpg": b"odd"}
SECRET_HEADERS = {"x-api-key", "x-upload-token", "x-download-token", "cookie"}
MODEL = "pytorch_lora_weights.safetensors"


@pytest.fixture
def workers(stack: Stack) -> Iterator[tuple[OriginalClient, OriginalClient]]:
    """Two machines with the one key that the original knows."""
    both = tuple(OriginalClient(stack.url, stack.keys["admin"], f"machine-{n}") for n in (1, 2))
    yield both[0], both[1]
    for client in both:
        client.close()


def zipped(step: int, filler: bytes = b"") -> bytes:
    """A checkpoint directory as the original's worker zips it: flat."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("optimizer.bin", f"optimizer at {step}")
        archive.writestr(MODEL, filler or f"weights at {step}".encode())
    return buffer.getvalue()


def poll_work(client: OriginalClient) -> dict[str, Any]:
    """Poll as the original's worker does, only faster."""
    job: dict[str, Any] = until(client.work, what="work", every_s=0.25)
    return job


def test_a_job_from_submission_to_the_model_over_two_machines(
    stack: Stack, workers: tuple[OriginalClient, OriginalClient]
) -> None:
    first, second = workers
    for key, data in IMAGES.items():
        assert first.upload("training-data", key, data) == 200
    row = first.submit(JOB_BODY)
    assert row["status"] == "pending" and row["num_failures"] == 0 and row["model_key"] is None
    assert {name: row[name] for name in JOB_BODY} == JOB_BODY
    assert row["class_data_prefix"] == f"loras/{row['id']}-class/"
    class_key = f"{row['class_data_prefix']}0.jpg"
    assert first.upload("training-data", class_key, b"a dog") == 200

    job = first.work()
    assert job is not None and second.work() is None, "one job, one machine"
    assert job["id"] == row["id"] and job["status"] == "running" and job["resume_from"] is None
    assert sorted(job["instance_data_keys"]) == sorted(IMAGES) and job["class_data_keys"] == [class_key]
    assert {name: job[name] for name in JOB_BODY} == JOB_BODY
    assert job["training_script"] == "train_dreambooth_lora_sdxl.py"
    assert time.strptime(job["created_at"], "%Y-%m-%d %H:%M:%S") <= time.gmtime()
    for key in job["instance_data_keys"]:
        assert first.download(job["data_bucket"], key) == IMAGES[key]
    assert first.heartbeat(job["id"]) == 200

    # The second of these takes two parts.
    checkpoints = {50: zipped(50), 100: zipped(100, random.Random(1).randbytes(PART_BYTES + 1000))}
    for step, data in checkpoints.items():
        key = f"{job['checkpoint_prefix']}checkpoint-{step}.zip"
        assert first.upload(job["checkpoint_bucket"], key, data) == 200
        assert first.report("progress", job, key)["status"] == "ok"
        assert first.heartbeat(job["id"]) == 200
    assert first.report("fail", job)["status"] == "ok"
    assert first.heartbeat(job["id"]) == 400, "the original's order to stop"
    # The pause after a failure is not waited for.
    stack.client.pause(job["id"])
    stack.client.resume(job["id"])

    again = poll_work(second)
    assert again["id"] == job["id"] and again["resume_from"] == f"{job['checkpoint_prefix']}checkpoint-100.zip"
    assert first.work() is None
    data = second.download(again["checkpoint_bucket"], again["resume_from"])
    assert data == checkpoints[100]
    assert zipfile.ZipFile(io.BytesIO(data)).read("optimizer.bin") == b"optimizer at 100"
    with pytest.raises(KeyError, match="token"):
        first.upload(again["checkpoint_bucket"], again["resume_from"], b"from a machine that lost the job")
    with pytest.raises(requests.HTTPError, match="409"):
        first.report("complete", job, again["resume_from"])
    assert second.heartbeat(job["id"]) == 200
    with pytest.raises(requests.HTTPError, match="409"):
        second.report("complete", again, f"{again['checkpoint_prefix']}{MODEL}")
    assert second.upload(again["checkpoint_bucket"], f"{again['checkpoint_prefix']}{MODEL}", b"trained") == 200
    assert second.report("complete", again, f"{again['checkpoint_prefix']}{MODEL}")["status"] == "ok"

    done = second.job(job["id"])
    assert done["status"] == "complete" and done["num_failures"] == 1
    assert second.download(done["model_bucket"], done["model_key"]) == b"trained"
    assert second.heartbeat(job["id"]) == 400
    names = [event["event_type"] for event in second.events(job["id"])]
    assert names[0] == "created" and names.count("started") == 2 and names[-1] == "complete"
    assert "heartbeat" not in names


@pytest.mark.parametrize("relayed", [False, True], ids=["direct", "relayed"])
def test_a_worker_s_job_survives_its_machine(stack: Stack, tmp_path: Path, relayed: bool) -> None:
    """Directly against the local stack, and by the relay; the object store learns no secret of the worker's."""
    with relay_to(stack.url) if relayed else nullcontext(stack.url) as url:
        run_whole_job(stack, url, tmp_path)
    assert stack.s3.requests("PUT .*checkpoint-30.zip")
    assert not SECRET_HEADERS & stack.s3.header_names


def test_a_canceled_job_is_told_with_a_400(workers: tuple[OriginalClient, OriginalClient]) -> None:
    first, second = workers
    row = first.submit({"instance_prompt": "dog", "instance_data_prefix": "dog/", "class_prompt": "a dog"})
    assert row["class_data_prefix"] == f"loras/{row['id']}-class/"
    job = first.work()
    assert job is not None and first.heartbeat(job["id"]) == 200
    assert second.stop(job["id"])["status"] == "ok"
    assert first.heartbeat(job["id"]) == 400
    assert first.heartbeat("00000000-0000-4000-8000-000000000000") == 400
    with pytest.raises(requests.HTTPError, match="409"):
        first.report("complete", job, "x")
    assert first.job(job["id"])["status"] == "canceled"
    assert first.work() is None
