"""Learning rates over time and one update of the weights, against their formulas."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.model.optimization import Optimization

CPU = torch.device("cpu")
WARM_UP, TOTAL = 3, 12
UNET_RATE, TEXT_RATE = 1e-2, 4e-3
POLYNOMIAL_END = 1e-7


class FakeLora:
    """LoRA weights without models: two matrices of a UNet, and a vector of a text encoder."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shapes = {"unet": [(2, 3), (3, 2)], "text_encoder": [(4,)]}
        self.modules: dict[str, list[nn.Parameter]] = {
            name: [nn.Parameter(torch.randn(shape, generator=generator)) for shape in of_module]
            for name, of_module in shapes.items()
        }

    def parameters(self, *names: str) -> list[nn.Parameter]:
        return [each for name, of_module in self.modules.items() if not names or name in names for each in of_module]


def optimization_with(lora: FakeLora, **changed: Any) -> Optimization:
    needed = {"instance_prompt": "a sks cat", "mixed_precision": "no", "learning_rate": UNET_RATE}
    config = DreamboothConfig.of({**needed, "text_encoder_lr": TEXT_RATE, "max_train_steps": TOTAL, **changed})
    return Optimization(lora, config, TOTAL, CPU)  # type: ignore[arg-type]


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "constant_with_warmup": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "cosine_with_restarts": lambda progress: (1 + math.cos(math.pi * (2 * progress % 1))) / 2,
    "polynomial": lambda progress: ((UNET_RATE - POLYNOMIAL_END) * (1 - progress) ** 3 + POLYNOMIAL_END) / UNET_RATE,
}
"""Compute the share of the rate at a share of the time after the warm-up; two cycles, third power."""


@pytest.mark.parametrize("name", SHAPES)
def test_the_rate_rises_and_falls_as_the_scheduler_says_for_both_parts(name: str) -> None:
    lora = FakeLora()
    optimization = optimization_with(lora, lr_scheduler=name, lr_warmup_steps=WARM_UP, lr_num_cycles=2, lr_power=3.0)
    found = []
    for _ in range(TOTAL):
        rates = [group["lr"] for group in optimization.optimizer.param_groups]
        assert optimization.learning_rate == rates[0]
        found.append(rates)
        _one_step(optimization, lora, [1.0])
    for step, rates in enumerate(found):
        warm = step < WARM_UP
        share = step / WARM_UP if warm else SHAPES[name]((step - WARM_UP) / (TOTAL - WARM_UP))
        assert rates == pytest.approx([UNET_RATE * share, TEXT_RATE * share], rel=1e-9), step


def test_all_schedulers_of_the_payload_are_among_them() -> None:
    annotation = DreamboothConfig.model_fields["lr_scheduler"].annotation
    assert set(annotation.__args__) == SHAPES.keys()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SHAPES)
def test_a_warm_up_may_take_the_whole_training(name: str) -> None:
    lora = FakeLora()
    optimization = optimization_with(lora, lr_scheduler=name, lr_warmup_steps=TOTAL)
    found = []
    for _ in range(TOTAL):
        found.append(optimization.learning_rate)
        _one_step(optimization, lora, [1.0])
    assert found == pytest.approx([UNET_RATE * step / TOTAL for step in range(TOTAL)], rel=1e-9)


def test_the_average_of_a_checkpoint_goes_where_the_weights_are() -> None:
    lora, elsewhere = FakeLora(), FakeLora()
    stored = optimization_with(lora, use_ema=True)
    _one_step(stored, lora, [1.0])
    # A device that is not the CPU, on which what a checkpoint holds is read.
    for of_module in elsewhere.modules.values():
        of_module[:] = [nn.Parameter(parameter.detach().to("meta")) for parameter in of_module]
    resumed = optimization_with(elsewhere, use_ema=True).states["ema"]
    resumed.load_state_dict(stored.states["ema"].state_dict())
    assert {average.device.type for average in resumed.shadow_params} == {"meta"}
    assert resumed.optimization_step == 1
    resumed.step(elsewhere.parameters())


def _one_step(optimization: Optimization, lora: FakeLora, factors: list[float]) -> None:
    """A batch for each factor; the gradient of each element is factor x (its number + 1), a part of the step's."""
    for factor in factors:
        weighted = [
            (parameter * torch.arange(1, parameter.numel() + 1).reshape(parameter.shape)).sum()
            for parameter in lora.parameters()
        ]
        optimization.backward(factor * torch.stack(weighted).sum())
    optimization.update()


def test_updates_are_those_of_adamw_with_clipping_accumulation_and_two_rates() -> None:
    lora, plain = FakeLora(), FakeLora()
    beta1, beta2, decay, epsilon, largest_norm, batches = 0.8, 0.95, 0.1, 1e-3, 20.0, [1.0, -0.5, 2.0]
    optimization = optimization_with(
        lora,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_weight_decay=decay,
        adam_epsilon=epsilon,
        max_grad_norm=largest_norm,
        gradient_accumulation_steps=len(batches),
    )
    values = {name: [each.detach().clone() for each in of_module] for name, of_module in plain.modules.items()}
    moments = {name: [torch.zeros_like(v) for v in of_module] for name, of_module in values.items()}
    squares = {name: [torch.zeros_like(v) for v in of_module] for name, of_module in values.items()}
    for step in (1, 2, 3):
        _one_step(optimization, lora, [step * factor for factor in batches])
        mean = step * sum(batches) / len(batches)
        gradients = {
            name: [mean * torch.arange(1.0, v.numel() + 1).reshape(v.shape) for v in of_module]
            for name, of_module in values.items()
        }
        norm = math.sqrt(sum(g.square().sum().item() for of_module in gradients.values() for g in of_module))
        assert (norm > largest_norm) is (step > 1), "the first is not clipped, or only its direction would be compared"
        for name, rate in (("unet", UNET_RATE), ("text_encoder", TEXT_RATE)):
            for number, gradient in enumerate(gradients[name]):
                clipped = gradient * min(1.0, largest_norm / norm)
                moment = moments[name][number] = beta1 * moments[name][number] + (1 - beta1) * clipped
                square = squares[name][number] = beta2 * squares[name][number] + (1 - beta2) * clipped**2
                change = (moment / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + epsilon)
                values[name][number] = values[name][number] * (1 - rate * decay) - rate * change
    for name, of_module in values.items():
        for found, expected in zip(lora.modules[name], of_module, strict=True):
            torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-7)


def test_adam_in_8_bits_is_the_one_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class AdamW8bit(torch.optim.AdamW):
        pass

    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", SimpleNamespace(AdamW8bit=AdamW8bit))
    small = optimization_with(FakeLora(), use_8bit_adam=True, adam_beta1=0.5).optimizer
    assert type(small) is AdamW8bit
    assert [(group["lr"], group["betas"]) for group in small.param_groups] == [
        (UNET_RATE, (0.5, 0.999)), (TEXT_RATE, (0.5, 0.999)),
    ]  # fmt: skip
    assert type(optimization_with(FakeLora()).optimizer) is torch.optim.AdamW
