"""Train a small transformer on bytes of Python's own library, on one or many machines, as an example to copy.

    python -m gpu_client.training.byte_transformer                       # one machine, without Baton
    torchrun --nproc-per-node 2 -m gpu_client.training.byte_transformer  # two processes, each with half of the model
    baton submit job.yaml                                                # nodes: {min: 2, max: 8} in the job's file

Any node may vanish at any time: the others go on, and a new node fetches their state. The job's parameters are the
fields of `TextSettings`. The training writes `model.safetensors` and `result.json` into the output directory.
"""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from baton import LearningRate, Session

TEXT_BYTES = 2_000_000
HELD_OUT_BYTES = 100_000


@dataclass(frozen=True)
class TextSettings:
    """Parameters of the job; other names are refused."""

    rounds: int = 20
    inner_steps: int = 20
    batch_size: int = 8
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    learning_rate: float = 3e-3
    seed: int = 0
    engine: str = "wire"
    codec: str = "int8"


def read_text() -> torch.Tensor:
    """Return the first bytes of the modules of Python's library, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8).long()


class ByteTransformer(nn.Module):  # type: ignore[misc]
    """Predict the next byte of each position."""

    def __init__(self, settings: TextSettings) -> None:
        super().__init__()
        width = settings.width
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(settings.context, width)
        layer = nn.TransformerEncoderLayer(
            width, settings.heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, settings.layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, context, 256) for bytes (batch, context)."""
        places = torch.arange(text.shape[1], device=text.device)
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        return self.head(self.layers(self.bytes(text) + self.places(places), mask=mask, is_causal=True))


def shard_model(model: ByteTransformer) -> None:
    """Leave each process of this machine its part of the parameters."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group()
    for layer in model.layers.layers:
        fully_shard(layer)
    fully_shard(model)


def compute_loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats of each byte of `text` (batch, context + 1) but the first."""
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    """Train until the world has committed all rounds."""
    with Session.start(output_dir="byte-transformer", resume=True) as session:
        settings = TextSettings(**session.params)
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)  # All nodes begin with the same model.
        device = "cpu"
        if torch.cuda.is_available():
            torch.cuda.set_device(device := f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        model = ByteTransformer(settings).to(device)
        if "RANK" in os.environ:  # torchrun: the processes of this machine share one model.
            shard_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        outer = session.elastic(
            model, optimizer, inner_steps=settings.inner_steps, engine=settings.engine, codec=settings.codec
        )
        session.steering.offer(knobs={"lr": LearningRate(optimizer)})  # for rules and `baton tell`
        session.resume(model=model, optimizer=optimizer, elastic=outer)
        text = read_text().to(device)
        training, held_out = text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]
        torch.seed()  # Each process draws its own batches.
        window = torch.arange(settings.context + 1, device=device)
        outer.start()
        while outer.round < settings.rounds and not session.should_stop:
            starts = torch.randint(len(training) - len(window), (settings.batch_size, 1), device=device)
            loss = compute_loss(model, training[starts + window])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outer.step(tokens=settings.batch_size * settings.context)
            session.report(outer.round, settings.rounds, loss=loss)
            if outer.checkpoint_due:
                session.checkpoint(outer.round, model=model, optimizer=optimizer, elastic=outer)
        outer.leave()
        if outer.checkpoint_due:
            session.checkpoint(outer.round, model=model, optimizer=optimizer, elastic=outer)
        if session.should_stop and outer.round < settings.rounds and not session.finishing:
            return

        model.eval()
        with torch.no_grad():
            windows = held_out[: len(held_out) // len(window) * len(window)].view(-1, len(window))
            losses = [compute_loss(model, part).item() for part in windows.split(256)]
        weights = {
            name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in model.state_dict().items()
        }
        if dist.is_initialized() and dist.get_rank() > 0:
            return  # The first process writes the outputs.
        save_file(weights, session.output_dir / "model.safetensors")
        result = {"rounds": outer.round, "held_out_loss": sum(losses) / len(losses)}
        (session.output_dir / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
