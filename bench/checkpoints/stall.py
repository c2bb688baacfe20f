"""Measure the stall by `session.checkpoint` as a process that prints one JSON document.

The other end of the channel is the agent's own; what lies in the arena is given back at once, as if it were committed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from baton import Session
from bench.checkpoints.states import Transformer
from gpu_client.agent.control.channel_server import ChannelServer
from gpu_client.agent.workspace.arena import find_checkpoint, release_checkpoint

MEMORY_CHECKPOINTS = 8
LAYERS = {"float32": 8, "bfloat16": 16}
"""Number of layers by data type; both models have the same size in bytes."""


def main() -> None:
    """Measure `--rounds` rounds on a state of about 1.25 GB: weights and both moments of AdamW, all of one dtype."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dtype", choices=LAYERS, default="float32")
    options = parser.parse_args()
    # Threads that wait for each other measure what else runs on the machine.
    torch.set_num_threads(1)
    model = Transformer(256, 2) if options.quick else Transformer(1024, LAYERS[options.dtype])
    model = model.to(getattr(torch, options.dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values() if t.dim())]
    state_bytes = sum(tensor.nbytes for tensor in tensors)
    rounds: dict[str, list[float]] = {"memcpy": [], "checkpoint": [], "overlapped": [], "torch.save": []}
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-", dir="/dev/shm") as shared,
        tempfile.TemporaryDirectory(prefix="baton-bench-") as disk,
    ):
        output, arena = Path(disk, "output"), Path(shared)
        output.mkdir()
        with ChannelServer(output, arena=arena) as channel:
            os.environ |= {
                "BATON_OUTPUT_DIR": str(output),
                "BATON_CHANNEL": str(channel.path),
                "BATON_ARENA": shared,
                "BATON_JOB_ID": "bench",
                "BATON_EPOCH": "1",
            }
            with Session.start() as session:
                step = 0

                def take(overlap: bool) -> None:
                    nonlocal step
                    step += 1
                    session.checkpoint(step, overlap=overlap, model=model, optimizer=optimizer)

                def release() -> None:
                    # An overlapped copy ends by itself; then the arena is given back, as the agent does.
                    until = time.monotonic() + 60
                    while find_checkpoint(arena) is None:
                        if time.monotonic() > until:
                            raise TimeoutError("nothing was staged")
                        time.sleep(0.001)
                    release_checkpoint(arena)

                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
                before_bytes = _memory_bytes("VmRSS")
                for _ in range(MEMORY_CHECKPOINTS):  # the first one allocates
                    take(False)
                    release()
                extra_bytes = _memory_bytes("VmHWM") - before_bytes
                warm = [torch.empty_like(tensor) for tensor in tensors]
                _copy(warm, tensors)
                for _ in range(options.rounds):
                    rounds["memcpy"].append(_timed(lambda: [a.copy_(b) for a, b in zip(warm, tensors, strict=True)]))
                    rounds["checkpoint"].append(_timed(lambda: take(False)))
                    release()
                    rounds["overlapped"].append(_timed(lambda: take(True)))
                    release()
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    rounds["torch.save"].append(_timed(partial(torch.save, state, Path(disk, "state.pt"))))
    print(json.dumps({"rounds": rounds, "state_bytes": state_bytes, "extra_bytes": extra_bytes}))


def _copy(target: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for there, tensor in zip(target, source, strict=True):
        there.copy_(tensor)


def _memory_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
