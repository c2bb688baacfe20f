"""The mathematics compared with plain torch; training reduces the loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline, UNet2DConditionModel
from PIL import Image
from torch.func import functional_call
from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.data.batches import PictureBatch, PictureBatches
from gpu_client.training.dreambooth.data.pictures import Picture, Placement, read_instance_pictures
from gpu_client.training.dreambooth.model.base_model import Conditioning, load_models
from gpu_client.training.dreambooth.model.encoding import Encoder
from gpu_client.training.dreambooth.model.lora import Lora
from gpu_client.training.dreambooth.model.optimization import Optimization
from gpu_client.training.dreambooth_lora import compute_denoising_loss, compute_min_snr_weights

CPU = torch.device("cpu")


class Parts:
    """The parts that `train` combines, without its loop."""

    def __init__(self, parameters: dict[str, Any], data_dir: Path, **changed: Any) -> None:
        torch.manual_seed(5)
        self.config = DreamboothConfig.of({**parameters, "train_batch_size": 2, "center_crop": True, **changed})
        self.models = load_models(self.config, CPU, data_dir)
        self.lora = Lora(self.models, self.config)
        self.encoder = Encoder(self.models, self.config)
        self.pictures = read_instance_pictures(self.config, data_dir)
        chosen = next(PictureBatches(self.pictures, self.config, purpose="instance"))
        self.items, self.random_state = chosen.items, chosen.generator.get_state()

    def generator(self) -> torch.Generator:
        """Make the generator of a batch."""
        generator = torch.Generator()
        generator.set_state(self.random_state)
        return generator

    def loss(self) -> torch.Tensor:
        return compute_denoising_loss(
            self.models, self.encoder, self.config, PictureBatch(self.items, self.generator())
        )


@pytest.mark.parametrize("snr_gamma", [None, 5.0])
@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sd2", "tiny_sdxl"])
def test_gradients_are_those_of_plain_torch(
    model: str,
    snr_gamma: float | None,
    parameters: dict[str, Any],
    data_dir: Path,
    request: pytest.FixtureRequest,
) -> None:
    base = request.getfixturevalue(model)
    parts = Parts(
        parameters,
        data_dir,
        pretrained_model_name_or_path=str(base),
        resolution=96,  # as large as the pictures: nothing is resized
        snr_gamma=snr_gamma,
        lora_alpha=6.0,
    )
    for parameter in parts.lora.parameters():
        # B is 0 at the start, and then A has no gradient.
        torch.nn.init.normal_(parameter, std=0.1)
    loss = parts.loss()
    loss.backward()

    reference = Reference(base, parts)
    reference_loss = reference.loss(parts, snr_gamma)
    reference_loss.backward()
    torch.testing.assert_close(loss, reference_loss, rtol=1e-5, atol=1e-6)
    compared = 0
    for name, place in reference.places.items():
        for letter in "AB":
            expected = reference.matrices[name][letter].grad
            found = place[letter].grad
            if expected is None:  # the last layer of an encoder of which the last but one is read
                assert found is None
                continue
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
            compared += found.abs().max() > 0
    assert compared >= 2 * len(reference.places) * 0.8


class Reference:
    """A LoRA step in plain torch: W + alpha / rank * B A in the place of W."""

    def __init__(self, base: Path, parts: Parts) -> None:
        self.base = base
        self.sdxl = "text_encoder_2" in parts.lora.modules
        self.modules: dict[str, Any] = {
            "unet": UNet2DConditionModel.from_pretrained(base, subfolder="unet"),
            "text_encoder": CLIPTextModel.from_pretrained(base / "text_encoder"),
        }
        if self.sdxl:
            self.modules["text_encoder_2"] = CLIPTextModelWithProjection.from_pretrained(base / "text_encoder_2")
        self.vae = AutoencoderKL.from_pretrained(base, subfolder="vae").eval()
        trained = parts.lora.trainable
        self.places: dict[str, dict[str, torch.nn.Parameter]] = {}
        for name, parameter in trained.items():
            place, letter = name.rsplit(".lora_", 1)
            self.places.setdefault(place, {})[letter[0]] = parameter
        self.matrices = {
            place: {letter: matrix.detach().clone().requires_grad_() for letter, matrix in pair.items()}
            for place, pair in self.places.items()
        }
        targets = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj")
        linear = {
            f"{module}.{name}"
            for module, model in self.modules.items()
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and name.endswith(targets)
        }
        assert linear == self.places.keys()

    def call(self, module: str, *arguments: Any, **keywords: Any) -> Any:
        model = self.modules[module].eval()
        changed = {}
        for place, pair in self.matrices.items():
            name, _, layer = place.partition(".")
            if name == module:
                weight = model.get_parameter(f"{layer}.weight").detach()
                changed[f"{layer}.weight"] = weight + 6.0 / 4 * pair["B"] @ pair["A"]
        return functional_call(model, changed, arguments, keywords)

    def loss(self, parts: Parts, snr_gamma: float | None) -> torch.Tensor:
        pixels = torch.stack([self.pixels(picture.source) for picture, _ in parts.items])
        generator = parts.generator()
        with torch.no_grad():
            distribution = self.vae.encode(pixels).latent_dist
        latents = distribution.mean + distribution.std * torch.randn(distribution.mean.shape, generator=generator)
        latents = latents * self.vae.config.scaling_factor
        noise = torch.randn(latents.shape, generator=generator)
        timesteps = torch.randint(1000, (len(latents),), generator=generator)
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        kept = torch.cumprod(1 - betas, 0)[timesteps][:, None, None, None]
        noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        tokens, added = self.conditioning(["a photo of sks cat"] * len(latents))
        predicted = self.call("unet", noisy, timesteps, tokens, added_cond_kwargs=added).sample
        velocity = "sd2" in str(self.base)
        target = kept.sqrt() * noise - (1 - kept).sqrt() * latents if velocity else noise
        each = (predicted - target).square().flatten(1).mean(1)
        if snr_gamma is not None:
            ratio = (kept / (1 - kept)).flatten()
            each = each * torch.minimum(ratio, torch.tensor(snr_gamma)) / (ratio + 1 if velocity else ratio)
        return each.mean()

    def conditioning(self, prompts: list[str]) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
        def ids(folder: str) -> torch.Tensor:
            tokenizer = AutoTokenizer.from_pretrained(self.base / folder)
            tokens = tokenizer(prompts, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
            assert isinstance(tokens.input_ids, torch.Tensor)
            return tokens.input_ids

        if not self.sdxl:
            return self.call("text_encoder", ids("tokenizer")).last_hidden_state, None
        first = self.call("text_encoder", ids("tokenizer"), output_hidden_states=True)
        second = self.call("text_encoder_2", ids("tokenizer_2"), output_hidden_states=True)
        tokens = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        times = torch.tensor([[96.0, 96.0, 0.0, 0.0, 96.0, 96.0]] * len(prompts))
        return tokens, {"text_embeds": second.text_embeds, "time_ids": times}

    @staticmethod
    def pixels(source: Any) -> torch.Tensor:
        with Image.open(source) as image:
            return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1


def test_sdxl_is_told_size_crop_and_shape_of_each_picture_in_its_pipelines_order(
    parameters: dict[str, Any], data_dir: Path, tiny_sdxl: Path
) -> None:
    models = Parts(parameters, data_dir, pretrained_model_name_or_path=str(tiny_sdxl)).models
    told: dict[str, torch.Tensor] = {}

    def unet(*_: Any, added_cond_kwargs: dict[str, torch.Tensor]) -> Any:
        told.update(added_cond_kwargs)
        return SimpleNamespace(sample=torch.zeros(1))

    models.unet = unet
    pictures = [Picture(f"{size}", b"", "a", size, "0") for size in ((90, 120), (200, 100))]
    places = [Placement((66, 88), 1, 20, (64, 64), flip=False), Placement((160, 80), 40, 8, (80, 64), flip=True)]
    nothing = torch.zeros(2, 1, 1, 1)
    conditioning = Conditioning(torch.zeros(2, 1, 1), torch.zeros(2, 24))
    models.predict(nothing, torch.zeros(2), conditioning, list(zip(pictures, places, strict=True)))
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl)
    expected = [
        pipeline._get_add_time_ids(
            picture.size, (place.top, place.left), place.shape, torch.float32, text_encoder_projection_dim=24
        )
        for picture, place in zip(pictures, places, strict=True)
    ]
    assert torch.equal(told["time_ids"], torch.cat(expected))


@pytest.mark.parametrize("unmasked_weight", [0.0, 0.25])
def test_a_masked_loss_is_the_weighted_mean_of_each_picture(
    unmasked_weight: float, parameters: dict[str, Any], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        mask = Image.new("L", (96, 96), 0)
        mask.paste(255, (0, 0, 48, 96) if number % 2 else (0, 0, 96, 24))
        mask.save(data_dir / "instance" / f"cat-{number:02}.mask.png")
    parts = Parts(
        parameters, data_dir, use_masks=True, unmasked_weight=unmasked_weight, train_batch_size=5, resolution=96
    )
    monkeypatch.setattr(parts.models, "predict", lambda noisy, *_: torch.zeros_like(noisy))
    generator = parts.generator()
    torch.randn((5, 4, 12, 12), generator=generator)  # for the latents
    squares = torch.randn((5, 4, 12, 12), generator=generator).square()
    expected = []
    for square, (picture, _) in zip(squares, parts.items, strict=True):
        left = int(picture.name[4:6]) % 2 == 1
        white, black = (square[..., :6], square[..., 6:]) if left else (square[:, :3], square[:, 3:])
        share = white.numel() / (white.numel() + unmasked_weight * black.numel())
        expected.append(share * white.mean() + (1 - share) * black.mean())
    torch.testing.assert_close(parts.loss(), torch.stack(expected).mean())


@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sdxl"])
def test_the_loss_of_a_fixed_batch_falls(
    model: str, parameters: dict[str, Any], data_dir: Path, request: pytest.FixtureRequest
) -> None:
    base = str(request.getfixturevalue(model))
    parts = Parts(
        parameters,
        data_dir,
        pretrained_model_name_or_path=base,
        gradient_accumulation_steps=1,
        learning_rate=2e-2,
        text_encoder_lr=2e-2,
        lora_rank=8,
    )
    optimization = Optimization(parts.lora, parts.config, 60, CPU)
    losses = []
    for _ in range(60):
        loss = parts.loss()
        losses.append(loss.item())
        optimization.backward(loss)
        optimization.update()
    assert min(losses[-5:]) < 0.8 * losses[0], losses
    assert sum(losses[-10:]) < sum(losses[:10])


def test_min_snr_weights(parameters: dict[str, Any], data_dir: Path, tiny_sd2: Path) -> None:
    timesteps = torch.tensor([0, 500, 999])
    epsilon = Parts(parameters, data_dir).models
    schedule = epsilon.noise_schedule.alphas_cumprod[timesteps]
    ratio = schedule / (1 - schedule)
    assert ratio[0] > 5 > ratio[1]
    found = compute_min_snr_weights(epsilon, timesteps, 5.0)
    torch.testing.assert_close(found, torch.tensor([5.0 / ratio[0], 1.0, 1.0]))
    epsilon.noise_schedule.alphas_cumprod[999] = 0.0  # as schedules are that end in nothing but noise
    assert compute_min_snr_weights(epsilon, timesteps, 5.0).isfinite().all()
    velocity = Parts(parameters, data_dir, pretrained_model_name_or_path=str(tiny_sd2)).models
    found = compute_min_snr_weights(velocity, timesteps, 5.0)
    torch.testing.assert_close(found, ratio.clamp(max=5.0) / (ratio + 1))


def test_the_average_is_what_is_shown_and_the_weights_are_what_is_trained(
    parameters: dict[str, Any], data_dir: Path
) -> None:
    parts = Parts(parameters, data_dir, use_ema=True, ema_decay=0.5, gradient_accumulation_steps=1)
    optimization = Optimization(parts.lora, parts.config, 10, CPU)
    seen = [[p.detach().clone() for p in parts.lora.parameters()]]
    for _ in range(3):
        optimization.backward(parts.loss())
        optimization.update()
        seen.append([p.detach().clone() for p in parts.lora.parameters()])
    trained = seen[-1]
    optimization.use_average()
    average = [parameter.detach().clone() for parameter in parts.lora.parameters()]
    optimization.use_weights()
    assert all(torch.equal(a, b) for a, b in zip(parts.lora.parameters(), trained, strict=True))
    # The first update is taken whole; then decays of 2 / 11 and 3 / 12 as long as they are below ema_decay.
    for mean, first, second, third in zip(average, *seen[1:], strict=True):
        expected = 0.25 * (2 / 11 * first + 9 / 11 * second) + 0.75 * third
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-7)


def test_an_overflow_changes_nothing_but_the_scale(parameters: dict[str, Any], data_dir: Path) -> None:
    parts = Parts(parameters, data_dir, mixed_precision="fp16", lr_scheduler="linear", use_ema=True)
    optimization = Optimization(parts.lora, parts.config, 10, CPU)
    before = [parameter.detach().clone() for parameter in parts.lora.parameters()]
    rate, scale = optimization.learning_rate, optimization.scaler.get_scale()
    optimization.backward(parts.loss() * float("inf"))
    optimization.update()
    assert all(torch.equal(a, b) for a, b in zip(parts.lora.parameters(), before, strict=True))
    assert optimization.learning_rate == rate
    assert optimization.scaler.get_scale() == scale / 2
    optimization.backward(parts.loss())
    optimization.update()
    assert any(not torch.equal(a, b) for a, b in zip(parts.lora.parameters(), before, strict=True))
    assert optimization.learning_rate < rate
