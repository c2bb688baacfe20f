"""Train the example's transformer as a node, write down each inner step, and wait inside a round to be killed.

DEMO_FOLDER: directory of the traces, one file for each process, and of two files. The process that takes `kill` stops
before it sends its delta of the next round, when its peers wait for the delta. `end` names the last round.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton import Session
from gpu_client.elastic import node as elastic_node
from gpu_client.elastic.engines.engine import Bucket
from gpu_client.elastic.engines.wire.wire_engine import WireEngine
from gpu_client.training.byte_transformer import ByteTransformer, TextSettings, compute_loss, read_text

FOLDER = Path(os.environ.get("DEMO_FOLDER", "."))
KILL, END = "kill", "end"
INSIDE = "inside"
"""Prefix of the file's name after a process has taken the file; the process id follows."""


class DoomedEngine(WireEngine):
    """The wire, whose process waits inside a reduce if the demo asks for a victim."""

    def reduce(
        self,
        round_number: int,
        buckets: Sequence[Bucket],
        weights: Sequence[float],
        timeout_s: float,
        completed: Callable[[int], None],
    ) -> None:
        """Reduce; the first process that finds the file `kill` waits for its end."""
        try:
            (FOLDER / KILL).rename(FOLDER / f"{INSIDE}-{os.getpid()}")
        except FileNotFoundError:
            super().reduce(round_number, buckets, weights, timeout_s, completed)
        else:
            time.sleep(60)


def main() -> None:
    """Train until the world has committed all rounds."""
    elastic_node.WireEngine = DoomedEngine  # type: ignore[attr-defined]
    with Session.start() as session, (FOLDER / f"trace-{os.getpid()}.jsonl").open("a") as trace:
        settings = TextSettings(**session.params)
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        model = ByteTransformer(settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        outer = session.elastic(model, optimizer, inner_steps=settings.inner_steps)
        session.resume(model=model, elastic=outer)
        text = read_text()
        torch.seed()
        window = torch.arange(settings.context + 1)

        def write(**fields: object) -> None:
            trace.write(json.dumps({"at": time.time(), "node": outer.node, "round": outer.round, **fields}) + "\n")
            trace.flush()

        def last_round() -> int:
            try:
                return int((FOLDER / END).read_text())
            except FileNotFoundError:
                return settings.rounds

        outer.start()
        while outer.round < last_round() and not session.should_stop:
            starts = torch.randint(len(text) - len(window), (settings.batch_size, 1))
            loss = compute_loss(model, text[starts + window])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outer.step(tokens=settings.batch_size * settings.context)
            write(loss=loss.item())
            session.report(outer.round, settings.rounds, loss=loss)
            if outer.checkpoint_due:
                session.checkpoint(outer.round, model=model, elastic=outer)
        outer.leave()
        values = torch.cat([one.detach().flatten() for one in model.parameters()])
        write(sha256=hashlib.sha256(values.numpy().tobytes()).hexdigest())
        save_file(model.state_dict(), session.output_dir / "model.safetensors")


if __name__ == "__main__":
    main()
