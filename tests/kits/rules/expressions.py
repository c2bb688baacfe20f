"""Evaluate single expressions of the rule language, or return their fault."""

from __future__ import annotations

from baton.contract.rules.engine.expression_compiler import Compiler
from baton.contract.rules.language.checker import check, check_condition
from baton.contract.rules.language.faults import ExpressionError
from baton.contract.rules.limits import LIMITS, Limits
from baton.contract.rules.metrics import Kind, Metric, MetricCatalog
from baton.contract.rules.windows.series import ObservationClock

METRICS = MetricCatalog([Metric("flag", Kind.BOOL), Metric("acc", goal="max")])


def value_of(text: str, **metrics: float) -> float | bool | None:
    """Evaluate an expression with one value of each metric."""
    checked = check(text, METRICS)
    assert checked.typed is not None, checked.faults
    clock = ObservationClock()
    compiler = Compiler(clock)
    read = compiler.compile(checked.typed)
    clock.now = 10.0
    for name, value in metrics.items():
        if name.replace("__", ".") in compiler.series:
            compiler.series[name.replace("__", ".")].push(value, 10.0)
    return read()


def fault_of(text: str, metrics: MetricCatalog = METRICS, limits: Limits = LIMITS) -> ExpressionError:
    checked = check_condition(text, metrics, limits)
    assert checked.typed is None
    return checked.faults[0]
