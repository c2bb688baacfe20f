"""Tiny models, photographs, and trainings in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dreambooth_runs import Run, short_training, train_in
from PIL import Image

from gpu_client.training.dreambooth.sampling import class_images
from tests.kits.dreambooth.photographs import save_crops
from tests.kits.dreambooth.tiny_pipelines import save_tiny_sd, save_tiny_sdxl


@pytest.fixture(autouse=True)
def no_traces() -> Iterator[None]:
    """Restore the process settings that a training changes; keep the hub offline."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark, variables = torch.backends.cudnn.benchmark, dict(os.environ)
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)  # tiny tensors gain nothing from several threads
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark
    os.environ.clear()
    os.environ.update(variables)


@pytest.fixture(scope="session")
def tiny_sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd(tmp_path_factory.mktemp("models") / "sd")


@pytest.fixture(scope="session")
def tiny_sd2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sd(tmp_path_factory.mktemp("models") / "sd2", prediction_type="v_prediction")


@pytest.fixture(scope="session")
def tiny_sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_sdxl(tmp_path_factory.mktemp("models") / "sdxl")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Make five crops of a photograph of a cat, 96 x 96 pixels."""
    save_crops(tmp_path / "data" / "instance", "cat", 5)
    return tmp_path / "data"


@pytest.fixture
def parameters(tiny_sd: Path) -> dict[str, Any]:
    return short_training(tiny_sd)


@pytest.fixture
def run(tmp_path: Path, data_dir: Path, parameters: dict[str, Any]) -> Run:
    """Return a function that trains with changed `parameters` and returns the output directory; an existing one
    resumes.
    """

    def begin(name: str = "out", *, variables: Mapping[str, str] | None = None, **changed: Any) -> Path:
        return train_in(tmp_path / name, data_dir, {**parameters, **changed}, variables)

    return begin


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the generated batches."""
    calls: list[int] = []
    sample = class_images.sample

    def counted(*arguments: Any) -> list[Image.Image]:
        images = sample(*arguments)
        calls.append(len(images))
        return images

    monkeypatch.setattr(class_images, "sample", counted)
    return calls
