"""Pictures are seen while a job trains, through interruptions and outages, and are among its outputs in the end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from baton.contract.jobs.job import AttemptEnd, InputRef, JobState, JobSubmit
from baton.contract.jobs.policy import Policy, Requirements
from baton.contract.objects.artifacts import StoredArtifact
from tests.kits.dreambooth.photographs import save_crops
from tests.kits.dreambooth.tiny_pipelines import save_tiny_sd
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]


def shown(shop: Workshop, job_id: str, path: str, epoch: int = 1, *, timeout_s: float = 60) -> StoredArtifact:
    """Wait until this attempt's file can be seen."""
    found: StoredArtifact = until(
        lambda: next(
            (one for one in shop.stack.client.artifacts(job_id).artifacts if (one.path, one.epoch) == (path, epoch)),
            None,
        ),
        timeout_s,
        what=f"{path} of attempt {epoch}",
    )
    return found


def fetched(one: StoredArtifact) -> bytes:
    """Fetch the artifact by its link alone."""
    answer = requests.get(one.url, timeout=60)
    assert answer.status_code == 200
    return answer.content


def go_on(shop: Workshop, step: int) -> None:
    (shop.tmp_path / f"go-{step}").touch()


def submitted(shop: Workshop) -> str:
    parameters = {"steps": 15, "go": str(shop.tmp_path / "go")}
    return shop.submit("shows.py", parameters, outputs=("validation",))


def test_a_picture_is_seen_while_the_job_runs_and_is_the_same_in_the_end(shop: Workshop) -> None:
    stack = shop.stack
    job_id = submitted(shop)
    shop.agent("w1")
    first = shown(shop, job_id, "validation/step-000005-0.png")
    assert stack.job(job_id).state is JobState.RUNNING and stack.job(job_id).artifacts == []
    assert (first.step, first.size_bytes) == (5, len(b"picture of step 5"))
    assert fetched(first) == b"picture of step 5"
    stack.wait_for_commit(job_id, 5)

    shop.lose(shop.agents[0], job_id)
    until(lambda: not shop.trainers(), what="the end of the trainer")
    assert fetched(shown(shop, job_id, "validation/step-000005-0.png")) == b"picture of step 5", "it stays"
    shop.agent("w2")
    go_on(shop, 10)
    assert fetched(shown(shop, job_id, "validation/step-000010-0.png", 2)) == b"picture of step 10"
    seen = [(one.epoch, one.step) for one in stack.client.artifacts(job_id).artifacts]
    assert (2, 5) not in seen, "what an earlier attempt has shown is not sent again while the job trains"
    go_on(shop, 15)
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.COMPLETE, job.reason
    assert [one.path for one in job.artifacts] == [f"validation/step-0000{step}-0.png" for step in ("05", "10", "15")]
    for step in (5, 10, 15):
        path = f"validation/step-{step:06}-0.png"
        assert stack.artifact(job_id, path) == f"picture of step {step}".encode()
    page = stack.client.artifacts(job_id)
    assert page.final and [(one.epoch, one.step) for one in page.artifacts] == [(2, 5), (2, 10), (2, 15)]


def test_pictures_wait_for_a_store_and_a_control_plane_that_are_away(shop: Workshop) -> None:
    stack = shop.stack
    front = shop.front()
    job_id = submitted(shop)
    with stack.s3.dropping("PUT .*/artifacts/") as away:
        shop.agent("w1", url=front.url)
        away.wait()
        stack.wait_for_step(job_id, 5)
        assert stack.client.artifacts(job_id).artifacts == []
    assert fetched(shown(shop, job_id, "validation/step-000005-0.png")) == b"picture of step 5"
    with front.dropping("POST /job/.*/artifacts") as away:
        go_on(shop, 5)
        away.wait()
        stack.wait_for_commit(job_id, 10)
        assert [one.step for one in stack.client.artifacts(job_id).artifacts] == [5], "training went on without"
    for step in (10, 15):
        go_on(shop, step)
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.COMPLETE, job.reason
    assert len(job.artifacts) == 3 and job.counters.attempts == 1


def test_the_dreambooth_recipe_shows_its_pictures_and_leaves_them_with_their_grid(shop: Workshop) -> None:
    stack = shop.stack
    parts: dict[str, Path] = {"instance": shop.tmp_path / "cats", "base": save_tiny_sd(shop.tmp_path / "sd")}
    save_crops(parts["instance"], "cat", 4)
    files = {
        f"{shop.queue}/{name}/{path.relative_to(folder).as_posix()}": path
        for name, folder in parts.items()
        for path in folder.rglob("*")
        if path.is_file()
    }
    stack.client.upload_files("training-data", files)
    parameters: dict[str, Any] = {
        "instance_prompt": "a photo of sks cat",
        "pretrained_model_name_or_path": "base",
        "resolution": 64,
        "max_train_steps": 200,
        "gradient_accumulation_steps": 1,
        "mixed_precision": "no",
        "validation_prompt": "sks cat on a chair",
        "validation_epochs": 25,
        "num_inference_steps": 4,
        "checkpointing_steps": 100,
        "with_prior_preservation": True,
        "class_prompt": "a cat",
        "num_class_images": 2,
    }
    job = stack.client.submit(
        JobSubmit(
            recipe="dreambooth-lora-sd@2",
            parameters=parameters,
            inputs=[InputRef(prefix=f"{shop.queue}/{name}/", into=name) for name in parts],
            requirements=Requirements(min_vram_gib=0, min_disk_gib=0),
            queue=shop.queue,
            policy=Policy(heartbeat_interval_s=2, max_failures=1),
        )
    )
    shop.agent("w1")
    first = shown(shop, job.id, "validation/step-000100-0.png", timeout_s=200)
    assert stack.job(job.id).state is JobState.RUNNING and first.step == 100
    picture = fetched(first)
    with Image.open(io.BytesIO(picture)) as image:
        assert (image.format, image.size) == ("PNG", (64, 64))
    ended = stack.wait_for(job.id, JobState.COMPLETE, JobState.FAILED, timeout_s=200)
    assert ended.state is JobState.COMPLETE, ended.reason
    names = [one.path for one in ended.artifacts]
    assert names == [
        "class_images.zip",
        "pytorch_lora_weights.safetensors",
        *(f"validation/step-000{step}-{number}.png" for step in (100, 200) for number in range(4)),
        "validation_grid.png",
    ]
    assert stack.artifact(job.id, "validation/step-000100-0.png") == picture
    assert [attempt.end for attempt in stack.attempts(job.id)] == [AttemptEnd.COMPLETE]
