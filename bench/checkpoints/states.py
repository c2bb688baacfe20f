"""Train small models into checkpoint directories: `python -m bench.checkpoints.states KIND DIRECTORY [--quick]`.

| kind | directories |
|---|---|
| `full` | `1`, `2`: `accelerate.save_state` of a transformer under AdamW, fp32, 1.26 GB; one step apart |
| `lora` | `1`, `2`: the same of a frozen base with LoRA, saved without a hook, so with the base, 1.04 GB; 3 steps |
| `bf16` | `1`, `2`: weights alone, pure bf16, AdamW at a learning rate of 1e-5, 25 MB; 25 steps |
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

VOCABULARY, CONTEXT = 2048, 64
LORA_RANK = 8


class Lora(nn.Module):
    """A frozen linear layer with a low-rank correction (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(LORA_RANK, base.in_features) * 0.02)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, LORA_RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.lora_a.T) @ self.lora_b.T


class Block(nn.Module):
    """Attention and MLP, each with its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder of GPT's kind: 12.4 million parameters at width 384 with 6 layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]]))


def batches(seed: int = 0) -> Iterator[torch.Tensor]:
    """Make text from a first-order Markov chain: learnable without a download."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=generator)
    while True:
        tokens = torch.randint(VOCABULARY, (4, 1), generator=generator)
        for _ in range(CONTEXT):
            choice = torch.randint(4, (4, 1), generator=generator)
            tokens = torch.cat([tokens, following[tokens[:, -1:]].squeeze(1).gather(1, choice)], dim=1)
        yield tokens


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], steps: int) -> None:
    """Train next-token prediction."""
    for _, tokens in zip(range(steps), data, strict=False):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def full(target: Path, quick: bool) -> None:
    """Write weights and both moments of AdamW: every byte changes."""
    model = Transformer(256, 2) if quick else Transformer(1024, 8)
    _two_states(target, model, torch.optim.AdamW(model.parameters(), lr=1e-4), steps=1)


def lora(target: Path, quick: bool) -> None:
    """Write a LoRA state: under 4 % of the bytes change."""
    model = Transformer(256, 2) if quick else Transformer(1024, 20)
    for block in model.blocks:
        block.qkv, block.proj = Lora(block.qkv), Lora(block.proj)
    trained = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    _two_states(target, model, torch.optim.AdamW(trained, lr=1e-4), steps=3)


def bf16(target: Path, quick: bool) -> None:
    """Write a trained model before and after a careful fine-tune in bf16."""
    model = Transformer(128, 2) if quick else Transformer(384, 6)
    data = batches()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data, 5 if quick else 60)
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for name in ("1", "2"):
        train(model, optimizer, data, 5 if quick else 25)
        (target / name).mkdir(parents=True)
        save_file(model.state_dict(), target / name / "model.safetensors")


def _two_states(target: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = batches()
    for name in ("1", "2"):
        train(model, optimizer, data, steps)
        accelerator.save_state(str(target / name))


def main() -> None:
    """Make the states of one kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("target", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    KINDS[options.kind](options.target, options.quick)


KINDS = {"full": full, "lora": lora, "bf16": bf16}

if __name__ == "__main__":
    main()
