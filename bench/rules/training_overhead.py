"""Cost of 20 rules in the digits example: a step with them against one without, in turns."""

from __future__ import annotations

import json
from pathlib import Path

from bench.harness.figures import Figure
from bench.harness.local_stack import RunningStack
from bench.rules.step_time import CONDITIONS, document
from bench.training import overhead
from bench.training.contenders import Bench, Loop, Processors, Run

TARGET_RATIO = 1.02
VARIANTS = ("none", "20 rules", "none again")
"""The last says how much of a difference this machine can show."""


def measure(stack: RunningStack, scratch: Path, *, rounds: int, steps: int) -> list[Figure]:
    """Measure sessions without an agent, so that rules are the only difference; the order changes each round.

    The rules are tried out only: a checkpoint that one of them asks for would be a cost of another kind.
    """
    processors = Processors.split()
    overhead.write_images(scratch / "digits")
    loop = Loop(
        name="ruled-digits",
        module="bench.training.digits_process",
        data=scratch / "digits",
        params={"steps": steps, "checkpoint_every": overhead.CHECKPOINT_EVERY},
        outputs=["model.safetensors"],
    )
    control = scratch / "control.json"
    control.write_text(json.dumps({"rules": {"revision": 1, "text": document(mode="dry_run")}}), encoding="utf-8")
    runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    with processors.excluded():
        bench = Bench(stack, scratch, processors, loop)
        for number in range(rounds):
            order = VARIANTS[number % 3 :] + VARIANTS[: number % 3]
            variables = {name: {"BATON_CONTROL": str(control)} if name == "20 rules" else {} for name in order}
            for name, run in bench.compare_sessions(variables).items():
                runs[name].append(run)

    def against_none(name: str, variant: str, **more: float) -> Figure:
        pairs = zip(runs["none"], runs["none again"], strict=True)
        return Figure(
            name=name,
            unit="ms",
            rounds=[_step_ms(run, steps) for run in runs[variant]],
            baseline_name="none",
            baseline=[(_step_ms(first, steps) + _step_ms(second, steps)) / 2 for first, second in pairs],
            details={"rules": len(CONDITIONS), "steps": steps},
            **more,  # type: ignore[arg-type]
        )

    return [
        against_none("digits with 20 rules: a step less waiting", "20 rules", at_most=TARGET_RATIO),
        against_none("digits, control: one without rules against both", "none again"),
    ]


def _step_ms(run: Run, steps: int) -> float:
    return 1000 * run.undisturbed_s / steps
