"""Dreambooth with prior preservation through real processes: killed twice, and class images made once in all.

Each attempt runs on a machine of its own: another workspace, another home, no cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file

from contract.jobs import InputRef, JobState, JobSubmit, JobView, Policy, Requirements
from gpu_client.training.dreambooth.lora import WEIGHTS_FILE
from gpu_client.training.dreambooth.shared_images import SHARED_FILE
from tests.photographs import save_crops
from tests.stack import ROOT, AgentProcess, clean_environment
from tests.tiny_pipelines import save_tiny_sd, save_tiny_sdxl
from tests.waiting import until
from tests.workshop import Workshop

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

CLASS_IMAGES = 4
SAVED = {"sd": save_tiny_sd, "sdxl": save_tiny_sdxl}
PIPELINES = {"sd": diffusers.StableDiffusionPipeline, "sdxl": diffusers.StableDiffusionXLPipeline}


class Studio:
    """One base model, some photographs in storage, and machines of which none knows another."""

    def __init__(self, shop: Workshop, kind: str) -> None:
        self.shop = shop
        self.kind = kind
        self.base = SAVED[kind](shop.tmp_path / "base")
        self.data = shop.tmp_path / "data"
        self.prefix = f"cat-{uuid.uuid4().hex[:8]}/"
        for path in save_crops(self.data / "instance", "cat", 5):
            shop.stack.write(f"{self.prefix}{path.name}", path.read_bytes(), "training-data")
        self.parameters: dict[str, Any] = {
            "instance_prompt": "a photo of sks cat",
            "class_prompt": "a photo of a cat",
            "pretrained_model_name_or_path": str(self.base),
            "pretrained_vae_model_name_or_path": str(self.base),
            "resolution": 64,
            "max_train_steps": 40,
            "checkpointing_steps": 5,
            "gradient_accumulation_steps": 1,
            "learning_rate": 1e-3,
            "text_encoder_lr": 1e-3,
            "mixed_precision": "no",
            "with_prior_preservation": True,
            "num_class_images": CLASS_IMAGES,
            "sample_batch_size": 2,
        }

    def submit(self) -> str:
        job = self.shop.stack.client.submit(
            JobSubmit(
                recipe=f"dreambooth-lora-{self.kind}@1",
                parameters=self.parameters,
                queue=self.shop.queue,
                inputs=[InputRef(prefix=self.prefix, into="instance")],
                requirements=Requirements(min_vram_gib=0, min_disk_gib=0),
                policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0, stop_grace_s=20),
            )
        )
        return job.id

    def machine(self, name: str) -> AgentProcess:
        """Nobody has ever worked there."""
        home = self.home(name)
        home.mkdir()
        return self.shop.agent(
            name,
            environment={"HOME": str(home), "HF_HUB_OFFLINE": "1"},
            workspace=self.shop.tmp_path / f"workspace-of-{name}",
        )

    def home(self, name: str) -> Path:
        return self.shop.tmp_path / f"home-of-{name}"

    def generated(self, *names: str) -> int:
        """How many class images have been generated on these machines: each keeps those for its next jobs."""
        return sum(len(list(self.home(name).rglob("class-images/*/*.jpg"))) for name in names)

    def lose(self, agent: AgentProcess) -> None:
        """SIGKILL to everything on the machine."""
        agent.kill_group()
        until(lambda: not self.shop.trainers(), 20, what="the end of the training")

    @contextmanager
    def alone(self) -> Iterator[subprocess.Popen[bytes]]:
        """The same training without any control plane, into `reference`."""
        config = self.shop.tmp_path / "config.json"
        config.write_text(json.dumps(self.parameters))
        self.home("reference").mkdir()
        program = [sys.executable, "-m", "gpu_client.training.dreambooth_lora"]
        process = subprocess.Popen(
            [*program, "--config", config, "--data-dir", self.data, "--output-dir", self.reference],
            cwd=ROOT,
            env={**clean_environment(), "HOME": str(self.home("reference")), "HF_HUB_OFFLINE": "1"},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)

    @property
    def reference(self) -> Path:
        return self.shop.tmp_path / "reference"

    def bits(self, job: JobView) -> dict[str, bytes]:
        """The weights that the job has left."""
        return bits(load(self.shop.stack.artifact(job.id, WEIGHTS_FILE)))

    def require_changed_pictures(self, job: JobView) -> None:
        """A plain diffusers pipeline takes the job's LoRA, and paints something else with it."""
        pipeline = PIPELINES[self.kind].from_pretrained(self.base)
        pipeline.set_progress_bar_config(disable=True)
        plain = self._painted(pipeline)
        assert np.array_equal(plain, self._painted(pipeline))
        lora = self.shop.tmp_path / WEIGHTS_FILE
        lora.write_bytes(self.shop.stack.artifact(job.id, WEIGHTS_FILE))
        pipeline.load_lora_weights(lora)
        assert np.abs(plain - self._painted(pipeline)).mean() > 0.01

    @staticmethod
    def _painted(pipeline: Any) -> np.ndarray[Any, Any]:
        painted: np.ndarray[Any, Any] = pipeline(
            "a photo of sks cat",
            width=64,
            height=64,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(1),
            output_type="np",
        ).images
        return painted


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def killed_twice(studio: Studio) -> JobView:
    """A job that lost one machine when its class images were made, and another one while it was trained."""
    stack, job_id = studio.shop.stack, studio.submit()
    first = studio.machine("m1")
    until(lambda: stack.job(job_id).checkpoint_step is not None, 120, what="the checkpoint of the class images")
    studio.lose(first)
    second = studio.machine("m2")
    stack.wait_for_commit(job_id, 5, timeout_s=120)
    studio.lose(second)
    third = studio.machine("m3")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=120)
    assert job.state is JobState.COMPLETE, job.reason
    studio.lose(third)
    assert job.counters.interruptions == 2 and job.counters.attempts == 3
    assert studio.generated("m1") == CLASS_IMAGES
    assert studio.generated("m2", "m3") == 0
    with zipfile.ZipFile(BytesIO(stack.artifact(job_id, SHARED_FILE))) as archive:
        assert len(archive.namelist()) == CLASS_IMAGES
    return job


def later_job(studio: Studio) -> JobView:
    """The same again, not interrupted, on a machine that has never seen a class image."""
    stack, job_id = studio.shop.stack, studio.submit()
    studio.machine("m4")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=120)
    assert job.state is JobState.COMPLETE, job.reason
    assert studio.generated("m1", "m2", "m3", "m4") == CLASS_IMAGES, "once in all"
    said = "class images: 0 came with the job, 4 were shared by another, 0 are generated now, 0 are missing"
    assert any(said in line for line in stack.log_lines(job_id))
    assert [artifact.path for artifact in job.artifacts] == [WEIGHTS_FILE], "it has nothing to add"
    return job


def test_stable_diffusion_is_bit_for_bit_what_it_is_without_any_control_plane(shop: Workshop) -> None:
    studio = Studio(shop, "sd")
    with studio.alone() as alone:
        job = killed_twice(studio)
        assert alone.wait(120) == 0
    assert shop.stack.artifact(job.id, SHARED_FILE) == (studio.reference / SHARED_FILE).read_bytes()
    uninterrupted = bits(load_file(studio.reference / WEIGHTS_FILE))
    assert studio.bits(job) == uninterrupted
    assert studio.bits(later_job(studio)) == uninterrupted
    studio.require_changed_pictures(job)


def test_sdxl_is_bit_for_bit_what_it_is_without_interruptions(shop: Workshop) -> None:
    studio = Studio(shop, "sdxl")
    job = killed_twice(studio)
    assert studio.bits(job) == studio.bits(later_job(studio))
    studio.require_changed_pictures(job)
