"""Time the replay of a recorded run: 20 typical rules, five metrics in each report."""

from __future__ import annotations

import timeit
from statistics import median

import numpy as np

from baton.contract.rules.backtest.history import Column, History
from baton.contract.rules.backtest.replay import replay
from baton.contract.rules.document.loader import load
from bench.harness.figures import Figure
from bench.rules.step_time import CONDITIONS, document

REPORTS = 100_000
TARGET_US = 20.0
"""For one report; a million reports then take 20 s."""


def measure(*, rounds: int, reports: int = REPORTS) -> list[Figure]:
    """Measure the microseconds for one report, all 20 rules together."""
    loaded = load(document())
    if loaded.rules is None:
        raise RuntimeError(f"the bench's own rules are wrong: {loaded.faults}")
    history = _history_of(reports)
    taken: list[float] = []
    for _ in range(rounds):
        began = timeit.default_timer()
        replay(loaded.rules, history, lambda rows: None)
        taken.append(1e6 * (timeit.default_timer() - began) / reports)
    details = {"rules": len(CONDITIONS), "reports": reports, "reports per second": round(1e6 / median(taken))}
    return [Figure(name="backtest, 20 rules, one report", unit="us", rounds=taken, at_most=TARGET_US, details=details)]


def _history_of(rows: int) -> History:
    """Make a run with five metrics in each row, and an `eval.loss` in a hundred of them."""
    chance = np.random.default_rng(1)
    steps = np.arange(rows)
    metrics = {
        "loss": 2.0 + np.exp(-steps / 1e4) + chance.normal(0, 0.1, rows),
        "grad_norm": np.abs(chance.normal(1, 0.2, rows)),
        "lr": np.full(rows, 1e-4),
        "step.time": np.abs(chance.normal(0.2, 0.01, rows)),
        "data.wait": np.abs(chance.normal(0.01, 0.005, rows)),
    }
    columns = {name: Column(range(rows), values.tolist()) for name, values in metrics.items()}
    evaluated = range(0, rows, max(1, rows // 100))
    columns["eval.loss"] = Column(evaluated, (metrics["loss"][evaluated] + 0.1).tolist())
    return History(range(rows), steps.astype(float).tolist(), columns, "bench", ())
