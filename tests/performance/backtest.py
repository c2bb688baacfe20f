"""How fast rules are tried on a history: 20 of them on a million values, against the evaluator that trainings have."""

from __future__ import annotations

import timeit

import numpy as np

from baton.contract.rules.document import load
from baton.contract.rules.evaluating import Evaluator
from gpu_client.backtest.history import Column, History
from gpu_client.backtest.trying import tried
from tests.performance.figures import Figure
from tests.performance.rules import CONDITIONS, document

POINTS = 1_000_000
"""Values of metrics: so many a second are the target."""
STREAMED_ROWS = 10_000


def measure(*, rounds: int, points: int = POINTS) -> list[Figure]:
    """Microseconds for each value of a metric, all 20 rules together; less than one is a million a second."""
    loaded = load(document())
    if loaded.rules is None:
        raise RuntimeError(f"the bench's own rules are wrong: {loaded.faults}")
    whole = history_of(points // 5)
    part = history_of(STREAMED_ROWS)
    taken: list[float] = []
    streamed: list[float] = []
    for _ in range(rounds):
        began = timeit.default_timer()
        trials = tried(loaded.rules, whole)
        taken.append(1e6 * (timeit.default_timer() - began) / whole.points)
        slow = [trial.rule.name for trial in trials if trial.streamed]
        if slow:
            raise RuntimeError(f"rules of the bench went the slow way: {', '.join(slow)}")
        names = [name for rule in loaded.rules.rules for name in rule.metrics]
        rows = list(part.observations(names))
        evaluator = Evaluator(loaded.rules)
        began = timeit.default_timer()
        for metrics, step, now in rows:
            evaluator.observe(metrics, step=step, now=now)
        streamed.append(1e6 * (timeit.default_timer() - began) / part.points)
    details = {"rules": len(CONDITIONS), "rows": whole.rows, "values": whole.points, "values streamed": part.points}
    return [
        Figure(name="backtest, 20 rules, one value", unit="us", rounds=taken, at_most=1.0, details=details),
        Figure(
            name="backtest against the evaluator",
            unit="us",
            rounds=taken,
            baseline_name="row by row",
            baseline=streamed,
        ),
    ]


def history_of(rows: int) -> History:
    """Five metrics in each row, of a training that goes its way, and an evaluation's loss now and then."""
    chance = np.random.default_rng(1)
    steps = np.arange(rows)
    metrics = {
        "loss": 2.0 + np.exp(-steps / 1e4) + chance.normal(0, 0.1, rows),
        "grad_norm": np.abs(chance.normal(1, 0.2, rows)),
        "lr": np.full(rows, 1e-4),
        "step.time": np.abs(chance.normal(0.2, 0.01, rows)),
        "data.wait": np.abs(chance.normal(0.01, 0.005, rows)),
    }
    nothing = np.zeros(0, np.int64)
    columns = {name: Column(steps, values, nothing) for name, values in metrics.items()}
    evaluated = steps[:: max(1, rows // 100)]
    columns["eval.loss"] = Column(evaluated, metrics["loss"][evaluated] + 0.1, nothing)
    return History(steps, steps.astype(float), columns)
