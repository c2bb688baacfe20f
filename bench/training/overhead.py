"""Overhead of the agent: the digits example under the agent, with its session alone, and bare twice.

They take turns on one processor; see contenders.py and README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from bench.harness.figures import Figure
from bench.harness.local_stack import RunningStack
from bench.training.contenders import HEARTBEAT_INTERVAL_S, Bench, Loop, Processors, Run, added_percent, rounds_of

TARGET_RATIO = 1.03
CHECKPOINT_EVERY = 50
IMAGES = 400


def measure(
    stack: RunningStack,
    scratch: Path,
    *,
    rounds: int,
    steps: int,
    checkpoint_every: int = CHECKPOINT_EVERY,
    at_most: float = TARGET_RATIO,
) -> list[Figure]:
    """Run all modes each round; the order of their turns changes."""
    processors = Processors.split()
    write_images(scratch / "digits")
    loop = Loop(
        name="digits",
        module="bench.training.digits_process",
        data=scratch / "digits",
        params={"steps": steps, "checkpoint_every": checkpoint_every},
        outputs=["model.safetensors"],
    )
    with processors.excluded():
        runs = rounds_of(Bench(stack, scratch, processors, loop), rounds)
    return figures(runs, processors, steps, checkpoint_every, at_most)


def figures(
    runs: dict[str, list[Run]],
    processors: Processors,
    steps: int,
    checkpoint_every: int = CHECKPOINT_EVERY,
    at_most: float = TARGET_RATIO,
) -> list[Figure]:
    """Make the figures: wall against bare (the target), CPU against bare, and the parts of the overhead."""
    bare, control, alone, agent = runs["bare"], runs["control"], runs["session"], runs["agent"]
    details: dict[str, Any] = {
        "steps": steps,
        "checkpoint_every": checkpoint_every,
        "heartbeat_interval_s": HEARTBEAT_INTERVAL_S,
        "checkpoints written": [run.checkpoints for run in agent],
        "checkpoints committed": [run.committed for run in agent],
        "processors": {"trainer": list(processors.trainer), "agent and control plane": list(processors.rest)},
        "waited for the processor, s": {
            mode: [round(run.waited_s, 3) for run in of_mode] for mode, of_mode in runs.items()
        },
        "agent_cpu_s (whole job)": [round(run.agent_cpu_s, 3) for run in agent],
    }

    def against_bare(name: str, subject: list[Run], of: Callable[[Run], float], **more: Any) -> Figure:
        both = [(of(first) + of(second)) / 2 for first, second in zip(bare, control, strict=True)]
        values = [of(run) for run in subject]
        return Figure(name=name, unit="s", rounds=values, baseline_name="bare", baseline=both, **more)

    return [
        against_bare(
            "training loop under the agent: wall",
            agent,
            lambda run: run.wall_s,
            at_most=at_most,
            details=details,
        ),
        against_bare("training loop under the agent: wall less waiting", agent, lambda run: run.undisturbed_s),
        against_bare("training loop under the agent: CPU", agent, lambda run: run.cpu_s),
        against_bare("training loop with session alone: wall", alone, lambda run: run.wall_s),
        Figure(
            name="control: one bare loop against the other",
            unit="s",
            rounds=[run.wall_s for run in control],
            baseline_name="bare",
            baseline=[run.wall_s for run in bare],
        ),
        Figure(
            name="session.checkpoint under the agent: wall",
            unit="ms",
            rounds=[1000 * run.checkpoint_wall_s / run.checkpoints for run in agent],
            baseline_name="alone",
            baseline=[1000 * run.checkpoint_wall_s / run.checkpoints for run in alone],
        ),
        Figure(
            name="session.checkpoint: added to the steps, less waiting",
            unit="%",
            rounds=[added_percent(run) for run in agent],
            baseline_name="alone",
            baseline=[added_percent(run) for run in alone],
        ),
    ]


def write_images(folder: Path) -> None:
    """Write the first of scikit-learn's handwritten digits as `<label>/<index>.png`."""
    digits = load_digits()
    for index, (pixels, label) in enumerate(zip(digits.images[:IMAGES], digits.target, strict=False)):
        path = folder / str(label) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(path)
