"""The configuration: every field of the original's payload with its default, bounds, contradictions, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.dreambooth import DreamboothSubmit
from gpu_client.training.dreambooth.config import DreamboothConfig, read_config_file
from gpu_client.training.dreambooth.errors import ConfigError

NEEDED = {"instance_prompt": "a photo of sks dog"}


def test_the_original_payload_is_known_with_its_defaults() -> None:
    config = DreamboothConfig.of(NEEDED)
    fields = DreamboothSubmit.model_fields.keys() - {"instance_data_prefix", "class_data_prefix"}
    assert fields <= DreamboothConfig.model_fields.keys()
    submitted = DreamboothSubmit(instance_data_prefix="dogs/", **NEEDED)
    for name in fields - {"learning_rate"}:
        assert getattr(config, name) == getattr(submitted, name), name


def test_the_parameters_of_an_original_job_are_taken_with_their_nulls() -> None:
    body = DreamboothSubmit(instance_data_prefix="dogs/", **NEEDED).model_dump()
    del body["instance_data_prefix"], body["class_data_prefix"]
    assert body["class_prompt"] is None
    assert DreamboothConfig.of(body) == DreamboothConfig.of(NEEDED | {"learning_rate": 2e-6})


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"resolution": 100}, "resolution: 100 is not divisible by 8"),
        ({"bucket_step": 12}, "bucket_step: 12 is not divisible by 8"),
        (
            {"aspect_ratio_buckets": True, "resolution": 64, "bucket_step": 128},
            "bucket_step, resolution: a bucket_step of 128 leaves no bucket for a resolution of 64",
        ),
        ({"with_prior_preservation": True}, "class_prompt: with_prior_preservation needs a prompt"),
        (
            {"with_prior_preservation": True, "class_prompt": "a dog", "num_class_images": 0},
            "num_class_images: with_prior_preservation needs at least 1",
        ),
        ({"cache_text_embeddings": True}, "cache_text_embeddings, train_text_encoder: embeddings that are cached"),
        ({"cache_latents": True}, "cache_latents, center_crop: a cached latent is always the same crop"),
        ({"lr_warmup_steps": 501}, "lr_warmup_steps, max_train_steps: the warm-up of 501 steps does not end"),
        (
            {"lr_scheduler": "polynomial", "learning_rate": 1e-8},
            "learning_rate, lr_scheduler: polynomial ends at 1e-07",
        ),
        ({"learning_rate": "fast"}, "learning_rate: Input should be a valid number"),
        ({"learning_rate": float("nan")}, "learning_rate: Input should be a finite number"),
        ({"max_train_steps": -1}, "max_train_steps: Input should be greater than or equal to 1"),
        ({"lr_scheduler": "magic"}, "lr_scheduler: Input should be 'linear', 'cosine'"),
        ({"instance_prompt": ""}, "instance_prompt: String should have at least 1 character"),
        ({"instance_prompt": None}, "instance_prompt: is needed"),
        ({"max_steps": 5}, "max_steps: is no parameter of this training"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DreamboothConfig.of({**NEEDED, **changed})
    assert caught.value.problems[0].startswith(problem)
    assert len(caught.value.problems) == 1


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DreamboothConfig.of({"resolution": 100000, "seed": -1})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["instance_prompt", "resolution", "seed"]


def test_steps_and_epochs() -> None:
    config = DreamboothConfig.of({**NEEDED, "gradient_accumulation_steps": 4})
    assert config.total_steps(batches_per_epoch=3) == 500
    epochs = DreamboothConfig.of({**NEEDED, "gradient_accumulation_steps": 4, "num_train_epochs": 3})
    assert epochs.total_steps(batches_per_epoch=3) == 3  # 9 batches, 4 to a step
    one_epoch = DreamboothConfig.of({**NEEDED, "num_train_epochs": 1, "gradient_accumulation_steps": 1})
    assert one_epoch.total_steps(batches_per_epoch=3) == 3
    both = DreamboothConfig.of({**NEEDED, "num_train_epochs": 1, "max_train_steps": 7})
    assert both.total_steps(batches_per_epoch=3) == 7  # as the original's payload says it


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.yaml", "instance_prompt: a dog\nresolution: 512\n"),
        ("job.json", '{"instance_prompt": "a dog", "resolution": 512}'),
    ],
)
def test_a_file_of_parameters(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_config_file(tmp_path / name) == {"instance_prompt": "a dog", "resolution": 512}


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "a: [1"), ("a.json", "{"), ("a.yaml", "- 1"), ("none.yaml", None)]
)
def test_a_file_that_is_none(name: str, text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=name):
        read_config_file(tmp_path / name)
