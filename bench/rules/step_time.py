"""Time a training step with 20 typical rules, after short and long histories, against IBM's evaluator.

The whole controller is timed, as a training has it: `session.report` with rules in force, in one process. The original,
IBM's trainer controller, evaluates with simpleeval; here it is given the same conditions, and the values of all windows
for nothing.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import random
import re
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from baton import Session
from baton.contract.rules.document.loader import load
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.language.typed_ast import Aggregate, Reading, walk
from baton.contract.rules.metrics import Kind
from bench.harness.figures import Figure

STEP_TARGET_US = 40.0
HISTORY_RATIO = 1.1
ORIGINAL_RATIO = 0.2
LOAD_TARGET_MS = 1.0
HISTORY = 100_000
WARM = 1_000
"""Steps after which all windows are full."""
SLICE = 50
"""Steps in a row, before it is the next one's turn: a machine whose speed changes is as fast for all."""
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
"""Conditions of presets and users; most of them read only metrics that every step reports."""


def document(*, mode: str = "enforce") -> str:
    """Write a document with these conditions."""
    rules = [
        {
            "name": f"rule-{number}",
            "when": condition,
            "for": "3 of 5" if number % 4 == 0 else "2 checks",
            "do": "save",
            "mode": mode,
        }
        for number, condition in enumerate(CONDITIONS)
    ]
    return json.dumps({"rules": rules})


def measure(*, rounds: int, steps: int = 5_000, history: int = HISTORY) -> list[Figure]:
    """Measure the median step of each round; the three subjects take turns of a few steps."""
    loads = [_load_ms() for _ in range(rounds)]  # first: collecting garbage takes longer with all that comes after
    with training() as young, training() as old:
        metrics = stream(seed=1)
        for count, session in ((WARM, young), (history, old)):
            for step in range(1, count + 1):
                session.report(step, 10**9, **metrics())
        original, anew = Original(sound_rules()), Original(sound_rules(), each=True)
        at = {"young": WARM, "old": history}
        times: dict[str, list[float]] = {"young": [], "old": [], "original": [], "each": [], "turns": []}
        for _ in range(rounds):
            taken: dict[str, list[float]] = {name: [] for name in times}
            for _ in range(max(1, steps // SLICE)):
                for name, session in (("young", young), ("old", old)):
                    taken[name] += _steps_us(session, [metrics() for _ in range(SLICE)], at[name])
                    at[name] += SLICE
                taken["original"] += _timed_us(original.step, [metrics()])
                taken["each"] += _timed_us(anew.step, [metrics()])
                taken["turns"] += _timed_us(_turns, [None])
            for name, each in taken.items():
                times[name].append(median(each))
    details: dict[str, Any] = {
        "rules": len(CONDITIONS),
        "metrics per step": len(metrics()),
        "steps of history": {"young": WARM, "old": history},
    }
    return [
        Figure(
            name="20 rules, session.report: one step",
            unit="us",
            rounds=times["young"],
            at_most=STEP_TARGET_US,
            details=details,
        ),
        Figure(
            name=f"20 rules, session.report: one step after {history:,}",
            unit="us",
            rounds=times["old"],
            baseline_name=f"after {WARM:,}",
            baseline=times["young"],
            at_most=HISTORY_RATIO,
        ),
        Figure(
            name="20 rules, session.report: one step against the original",
            unit="us",
            rounds=times["young"],
            baseline_name="simpleeval, each",
            baseline=times["each"],
            at_most=ORIGINAL_RATIO,
            details={"with one evaluator for all rules, us": [round(one, 1) for one in times["original"]]},
        ),
        Figure(
            name="20 rules, session.report: one step against a loop",
            unit="us",
            rounds=times["young"],
            baseline_name="1,000 turns of an empty loop",
            baseline=times["turns"],
        ),
        Figure(name="a rule read and checked: CPU", unit="ms", rounds=loads, at_most=LOAD_TARGET_MS),
    ]


@contextmanager
def training() -> Iterator[Session]:
    """Start a session of one process with these rules in force and its log disabled."""
    rules_log = logging.getLogger("baton.rules")
    before, rules_log.disabled = rules_log.disabled, True
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            rules = Path(folder, "rules.json")
            rules.write_text(document(), encoding="utf-8")
            with Session.start(output_dir=Path(folder, "output"), rules=rules, variables={}) as session:
                yield session
    finally:
        rules_log.disabled = before


class Original:
    """IBM's evaluator: each rule is parsed once; an event makes an evaluator with all names for all rules."""

    def __init__(self, rules: RuleSet, *, each: bool = False) -> None:
        """Parse the rules; `each`: an evaluator per rule. Raises ImportError without simpleeval (extra `dev`)."""
        self._simpleeval: Any = importlib.import_module("simpleeval")
        self._each = each
        self._windows: dict[str, object] = {}
        """Values of windows. The evaluator has no windows; the values do not affect its time."""
        self._rules: list[tuple[str, Any]] = []
        for rule in rules.rules:
            text = rule.when.text
            parts = list(walk(rule.when))
            for aggregate in (one for one in parts if isinstance(one, Aggregate)):
                name = re.sub(r"\W", "_", aggregate.text)
                text = text.replace(aggregate.text, name)
                self._windows[name] = False if aggregate.kind is Kind.BOOL else 1.0
            for reading in (one for one in parts if isinstance(one, Reading)):
                text = text.replace(reading.metric, _python(reading.metric))
            self._rules.append((text, self._simpleeval.SimpleEval.parse(text)))

    def step(self, metrics: Mapping[str, object]) -> None:
        """Evaluate one event."""
        known = {"step": 1.0, "cost": 0.0, **self._windows}
        known.update({_python(name): value for name, value in metrics.items()})
        evaluator = self._evaluator(known)
        for text, parsed in self._rules:
            if self._each:
                evaluator = self._evaluator(known)
            if not isinstance(evaluator.eval(text, previously_parsed=parsed), bool):
                raise TypeError(text)

    def _evaluator(self, known: Mapping[str, object]) -> Any:
        package = self._simpleeval
        functions = {
            **{"abs": abs, "len": len, "round": round, "sum": sum, "math_trunc": math.trunc, "math_ceil": math.ceil},
            **{"math_floor": math.floor, "math_sqrt": math.sqrt, "isnan": math.isnan, "isfinite": math.isfinite},
            **package.DEFAULT_FUNCTIONS.copy(),
        }
        return package.EvalWithCompoundTypes(functions=functions, names={**known, **package.DEFAULT_NAMES.copy()})


def _python(name: str) -> str:
    return name.replace(".", "_")


def sound_rules() -> RuleSet:
    """Load the 20 rules; raises RuntimeError if they are faulty."""
    loaded = load(document())
    if loaded.rules is None:
        raise RuntimeError(f"the bench's own rules are wrong: {loaded.faults}")
    return loaded.rules


def stream(seed: int) -> Callable[[], dict[str, float]]:
    """Generate the metrics of a healthy training, one step after the other."""
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


def _load_ms(times: int = 5) -> float:
    """Time reading and checking one of the 20 rules in ms; the median of some tries."""
    text = document()
    return median(1e3 * timeit.timeit(lambda: load(text), time.process_time, number=1) for _ in range(times)) / len(
        CONDITIONS
    )


def _timed_us(work: Callable[[Any], object], arguments: Sequence[Any]) -> list[float]:
    took: list[float] = []
    for argument in arguments:
        began = time.perf_counter_ns()
        work(argument)
        took.append((time.perf_counter_ns() - began) / 1e3)
    return took


def _steps_us(session: Session, observed: Sequence[dict[str, float]], begin: int) -> list[float]:
    took: list[float] = []
    report = session.report
    for step, metrics in enumerate(observed, begin + 1):
        began = time.perf_counter_ns()
        report(step, 10**9, **metrics)
        took.append((time.perf_counter_ns() - began) / 1e3)
    return took


def _turns(_: None) -> None:
    for _number in range(1000):
        pass
