"""In bf16, an interrupted run equals an uninterrupted one: bit for bit on a CPU, nearly on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dreambooth_runs import Run, power_cut
from safetensors.torch import load_file

from gpu_client.training import dreambooth_lora

BF16 = {
    "mixed_precision": "bf16",
    "with_prior_preservation": True,
    "class_prompt": "a photo of a cat",
    "num_class_images": 4,
    "validation_prompt": "a photo of sks cat",
    "validation_epochs": 10,
    "use_ema": True,
    "deterministic": True,
}
LOSSES_A_STEP = 4
"""Number of losses a step: two batches, each with the loss of the instance and of the class."""
RTOL, ATOL = 2e-2, 2e-3
Weights = dict[str, torch.Tensor]


def lora_of(output: Path, step: int) -> Weights:
    return load_file(output / f"checkpoint-{step}" / "lora.safetensors")


def farthest(some: Weights, others: Weights) -> float:
    return max((some[name] - others[name]).abs().max().item() for name in some)


def resumed_and_not(
    run: Run, options: Mapping[str, Any], place: Path, *, steps: int, every: int, cut_in: int
) -> tuple[Weights, Weights]:
    """The LoRA of a training that was cut off within step `cut_in` and resumed, and of one that was not."""
    options = {**options, "max_train_steps": steps, "checkpointing_steps": every}
    uninterrupted = lora_of(run("uninterrupted", **options), steps)
    with power_cut(LOSSES_A_STEP * (cut_in - 1) + 2, "loss"):
        run("cut", **options)
    resumed_at = (cut_in - 1) // every * every
    # The weights still change after the resume: a training that was not resumed would end elsewhere.
    assert farthest(lora_of(place / "cut", resumed_at), uninterrupted) > 5 * ATOL
    loss, calls = dreambooth_lora.compute_denoising_loss, 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dreambooth_lora, "compute_denoising_loss", counted)
        resumed = lora_of(run("cut", **options), steps)
    assert calls == LOSSES_A_STEP * (steps - resumed_at), "it went on where it was"
    return resumed, uninterrupted


@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sdxl"])
def test_on_a_cpu_in_bf16_it_resumes_bit_for_bit(
    model: str, run: Run, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    options = {**BF16, "pretrained_model_name_or_path": str(request.getfixturevalue(model)), "learning_rate": 1e-2}
    resumed, uninterrupted = resumed_and_not(run, options, tmp_path, steps=4, every=2, cut_in=3)
    assert farthest(resumed, uninterrupted) == 0


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here: bf16 training on a GPU was not tried"
)
@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sdxl"])
def test_on_a_gpu_in_bf16_it_trains_for_50_steps_and_resumes(
    model: str, run: Run, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip(f"{torch.cuda.get_device_name()} has no bf16")
    options = {**BF16, "pretrained_model_name_or_path": str(request.getfixturevalue(model))}
    torch.cuda.reset_peak_memory_stats()
    resumed, uninterrupted = resumed_and_not(run, options, tmp_path, steps=50, every=10, cut_in=25)
    assert torch.cuda.max_memory_allocated() > 0, "it trained on the CPU"
    assert all(tensor.isfinite().all() for tensor in resumed.values())
    for name, tensor in uninterrupted.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=RTOL, atol=ATOL)
