"""Time and memory that the agent adds to the Dreambooth script, and the time that its caches save.

The script trains the tiny SDXL of `tests/kits/dreambooth/tiny_pipelines.py`. The pictures are so large that a step
takes about 100 ms. The script runs in the same turns as the digits example: see contenders.py and README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.figures import Figure
from bench.harness.local_stack import RunningStack
from bench.training.contenders import HEARTBEAT_INTERVAL_S, Bench, Loop, Processors, Run, added_percent, rounds_of

LEAST_SPEED = 0.97
"""Steps per second under the agent, of those of the bare loop."""
MOST_MEMORY = 1.05
PICTURES = 8
RESOLUTION = 256
CHECKPOINT_EVERY = 20
CACHES = {"cache_latents": True, "cache_text_embeddings": True}
FROZEN_ENDS = {"train_text_encoder": False, "center_crop": True}
"""Parameters that both caches require."""


def measure(
    stack: RunningStack, scratch: Path, *, rounds: int, steps: int, resolution: int = RESOLUTION
) -> list[Figure]:
    """Run the loop in all modes each round, and then bare with and without its caches."""
    processors = Processors.split()
    loop = loop_of(scratch, steps, resolution)
    with processors.excluded():
        bench = Bench(stack, scratch, processors, loop)
        runs = rounds_of(bench, rounds)
        cached = cache_rounds(bench, rounds)
    details = {
        "parameters": loop.params,
        "heartbeat_interval_s": HEARTBEAT_INTERVAL_S,
        "processors": {"trainer": list(processors.trainer), "agent and control plane": list(processors.rest)},
    }
    return [*overhead(runs, steps, details), *savings(cached, steps)]


def cache_rounds(bench: Bench, rounds: int) -> dict[str, list[Run]]:
    """Run bare with and without the caches; the order changes each round."""
    variants = {"encoded anew": FROZEN_ENDS, "cached": FROZEN_ENDS | CACHES}
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for number in range(rounds):
        order = sorted(variants, reverse=number % 2 == 1)
        for name, run in bench.compare({name: variants[name] for name in order}).items():
            runs[name].append(run)
    return runs


def loop_of(scratch: Path, steps: int, resolution: int) -> Loop:
    """Make the job: a tiny SDXL, crops of a photograph, and the recipe's defaults but for the named parameters."""
    from tests.kits.dreambooth.photographs import save_crops
    from tests.kits.dreambooth.tiny_pipelines import save_tiny_sdxl

    save_crops(scratch / "photographs", "cat", PICTURES, (resolution, resolution))
    return Loop(
        name="dreambooth",
        module="bench.training.dreambooth_process",
        data=scratch / "photographs",
        params={
            "instance_prompt": "a photo of sks cat",
            "pretrained_model_name_or_path": str(save_tiny_sdxl(scratch / "sdxl")),
            "resolution": resolution,
            "max_train_steps": steps,
            "checkpointing_steps": min(CHECKPOINT_EVERY, max(1, steps // 2)),
            "gradient_accumulation_steps": 1,
            "mixed_precision": "no",
            "cache_dir": "",
        },
        outputs=["pytorch_lora_weights.safetensors"],
        environment={"HF_HUB_OFFLINE": "1"},
    )


def overhead(runs: dict[str, list[Run]], steps: int, details: dict[str, Any]) -> list[Figure]:
    """Compare a step under the agent with a bare one: wall (the target: steps per second), CPU, memory, checkpoints."""
    agent = runs["agent"]

    def against_bare(name: str, subject: list[Run], unit: str, of: Callable[[Run], float], **more: Any) -> Figure:
        both = [(of(bare) + of(control)) / 2 for bare, control in zip(runs["bare"], runs["control"], strict=True)]
        rounds = [of(run) for run in subject]
        return Figure(name=name, unit=unit, rounds=rounds, baseline_name="bare", baseline=both, **more)

    def ms(seconds: float) -> float:
        return 1000 * seconds / steps

    return [
        against_bare(
            "Dreambooth, a step under the agent: wall",
            agent,
            "ms",
            lambda run: ms(run.wall_s),
            at_most=1 / LEAST_SPEED,
            details={
                **details,
                "checkpoints written": [run.checkpoints for run in agent],
                "checkpoints committed": [run.committed for run in agent],
                "waited for the processor, s": {
                    mode: [round(run.waited_s, 3) for run in of_mode] for mode, of_mode in runs.items()
                },
                "agent_cpu_s (whole job)": [round(run.agent_cpu_s, 3) for run in agent],
            },
        ),
        against_bare(
            "Dreambooth, a step under the agent: wall less waiting", agent, "ms", lambda run: ms(run.undisturbed_s)
        ),
        against_bare("Dreambooth, a step under the agent: CPU", agent, "ms", lambda run: ms(run.cpu_s)),
        against_bare("Dreambooth, a step with session alone: wall", runs["session"], "ms", lambda run: ms(run.wall_s)),
        Figure(
            name="Dreambooth, control: one bare loop against the other",
            unit="ms",
            rounds=[ms(run.wall_s) for run in runs["control"]],
            baseline_name="bare",
            baseline=[ms(run.wall_s) for run in runs["bare"]],
        ),
        Figure(
            name="Dreambooth, checkpoints: added to the steps, less waiting",
            unit="%",
            rounds=[added_percent(run) for run in agent],
            baseline_name="alone",
            baseline=[added_percent(run) for run in runs["session"]],
        ),
        against_bare(
            "Dreambooth, peak memory under the agent",
            agent,
            "MiB",
            lambda run: run.peak_bytes / 2**20,
            at_most=MOST_MEMORY,
        ),
    ]


def savings(cached: dict[str, list[Run]], steps: int) -> list[Figure]:
    """Compare a bare step with cached latents and embeddings to one without; no target."""

    def against_anew(name: str, of: Callable[[Run], float]) -> Figure:
        return Figure(
            name=name,
            unit="ms",
            rounds=[1000 * of(run) / steps for run in cached["cached"]],
            baseline_name="encoded anew",
            baseline=[1000 * of(run) / steps for run in cached["encoded anew"]],
        )

    return [
        against_anew("Dreambooth, a step with cached latents and embeddings: wall", lambda run: run.wall_s),
        against_anew("Dreambooth, a step with cached latents and embeddings: CPU", lambda run: run.cpu_s),
    ]
