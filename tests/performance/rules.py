"""What rules cost: 20 typical ones at each step of a training, short and long histories, and reading a document."""

from __future__ import annotations

import json
import math
import random
import timeit
from collections.abc import Callable
from statistics import median

from contract.rules.document import load
from contract.rules.evaluating import Evaluator
from tests.performance.figures import Figure

STEP_TARGET_US = 40.0
LOAD_TARGET_MS = 1.0
HISTORY = 100_000
CONDITIONS = (
    "isnan(loss) or not isfinite(loss)",
    "loss > 10 and step > 100",
    "zscore(loss, 100) > 6",
    "mean(loss, 50) > 2 * best(loss)",
    "slope(loss, 200) > 0.001",
    "std(loss, 100) < 1e-6",
    "since_best(loss) > 500",
    "ema(loss, 50) > 1.5 * median(loss, 101)",
    "rising(loss, 10)",
    "not changed(loss, 50)",
    "grad_norm > 100",
    "isnan(grad_norm)",
    "max(grad_norm, 20) > 5 * mean(grad_norm, 200)",
    "mean(data.wait, 50) > 0.5 * mean(step.time, 50)",
    "step.time > 3 * median(step.time, 51)",
    "loss < 0.01",
    "0 < lr < 1e-9",
    "min(loss, 50) > 4",
    "delta(loss, 10) > 1",
    "cost > 40 and since_best(loss) > 100",
)
"""What presets and users ask for; most in nothing but the metrics that come with every step."""


def document(conditions: tuple[str, ...] = CONDITIONS) -> str:
    """Rules with these conditions."""
    rules = [
        {"name": f"rule-{number}", "when": condition, "for": "3 of 5" if number % 4 == 0 else "2 checks", "do": "save"}
        for number, condition in enumerate(conditions)
    ]
    return json.dumps({"rules": rules})


def measure(*, rounds: int, steps: int = 5_000, history: int = HISTORY) -> list[Figure]:
    """The median step of each round."""
    loaded = load(document())
    if loaded.rules is None:
        raise RuntimeError(f"the bench's own rules are wrong: {loaded.faults}")
    young, old = Evaluator(loaded.rules), Evaluator(loaded.rules)
    metrics = stream(seed=1)
    for step in range(history):
        old.observe(metrics(), step=step, now=float(step))
    for step in range(1_000):
        young.observe(metrics(), step=step, now=float(step))
    times: dict[str, list[float]] = {"young": [], "old": []}
    for number in range(rounds):
        for name, evaluator, begin in (("young", young, 1_000), ("old", old, history)):
            times[name].append(_median_step_us(evaluator, metrics, begin + number * steps, steps))
    loads = [1e3 * timeit.timeit(lambda: load(document()), number=3) / 3 / len(CONDITIONS) for _ in range(rounds)]
    details = {"rules": len(CONDITIONS), "metrics per step": len(metrics()), "steps of history": history}
    return [
        Figure(name="20 rules, one step", unit="us", rounds=times["young"], at_most=STEP_TARGET_US, details=details),
        Figure(
            name=f"20 rules, one step after {history:,}",
            unit="us",
            rounds=times["old"],
            baseline_name="after 1,000",
            baseline=times["young"],
            at_most=1.25,
        ),
        Figure(name="20 rules, one step after a long history", unit="us", rounds=times["old"], at_most=STEP_TARGET_US),
        Figure(name="reading and checking, per rule", unit="ms", rounds=loads, at_most=LOAD_TARGET_MS),
    ]


def stream(seed: int) -> Callable[[], dict[str, float]]:
    """Metrics of one step after the other, of a training that goes its way."""
    chance = random.Random(seed)
    step = 0

    def metrics() -> dict[str, float]:
        nonlocal step
        step += 1
        return {
            "loss": 2.0 + math.exp(-step / 1e4) + chance.gauss(0, 0.1),
            "grad_norm": abs(chance.gauss(1, 0.2)),
            "lr": 1e-4,
            "step.time": abs(chance.gauss(0.2, 0.01)),
            "data.wait": abs(chance.gauss(0.01, 0.005)),
        }

    return metrics


def _median_step_us(evaluator: Evaluator, metrics: Callable[[], dict[str, float]], begin: int, steps: int) -> float:
    took: list[float] = []
    for step in range(begin, begin + steps):
        given = metrics()
        began = timeit.default_timer()
        evaluator.observe(given, step=step, now=float(step))
        took.append(timeit.default_timer() - began)
    return 1e6 * median(took)
