"""Hostile rules: accepted wrong rules, CPU time of the worst ones, exceptions raised into a training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median

from baton.contract.rules.document.loader import load_values
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.language.checker import check_condition
from baton.contract.rules.language.messages import MessageError, parse_message
from bench.harness.figures import Figure
from tests.kits.rules import random_rules
from tests.kits.rules.corpora import HEAVIEST, HOSTILE, HOSTILE_TEXTS, KNOWN, wrong_conditions

SLOWEST_MS = 1.0
FUZZED_RULES = 100_000
FULL, SHORT = 100_100, 1_000
"""Steps after which the longest windows are full, and all others."""
VALUES = (1e308, 5e-324, -1e308, 1.5)
"""Values with the largest differences in magnitude among floats."""


def measure(*, rounds: int, fuzzed: int = FUZZED_RULES, full: int = FULL) -> list[Figure]:
    """Measure exact counts, and the CPU time of the slowest rule as the least of some tries."""
    wrong = list(wrong_conditions())
    passed = [text for text in wrong if check_condition(text, KNOWN).typed is not None]
    harmful = [text for text in HOSTILE if check_condition(text).typed is not None]
    harmful += [text for text in HOSTILE_TEXTS if not _is_refused(text)]
    refusing = [_slowest_ms([lambda text=text: check_condition(text) for text in HOSTILE]) for _ in range(rounds)]
    return [
        Figure(
            name="wrong names, types and units: accepted",
            unit="rules",
            rounds=[len(passed)],
            at_most=0,
            counted=True,
            details={"of": len(wrong), "accepted": passed},
        ),
        Figure(
            name="hostile rules: accepted",
            unit="rules",
            rounds=[len(harmful)],
            at_most=0,
            counted=True,
            details={"of": len(HOSTILE) + len(HOSTILE_TEXTS), "accepted": harmful},
        ),
        Figure(name="hostile rules: the slowest to refuse", unit="ms", rounds=refusing, at_most=SLOWEST_MS),
        Figure(
            name="heaviest rules: the slowest step, full windows",
            unit="ms",
            rounds=_heaviest_ms(rounds, full),
            at_most=SLOWEST_MS,
            details={"rules": [text[:80] for text in HEAVIEST], "steps before": full},
        ),
        _fuzzed(fuzzed),
    ]


def _fuzzed(rules: int) -> Figure:
    """Run random rules; the details name the seed, which changes each time."""
    rules_log = logging.getLogger("baton.rules")
    before, rules_log.disabled = rules_log.disabled, True
    seed, began = time.time_ns() // 10**9, time.perf_counter()
    try:
        found = random_rules.run(seed, rules)
    finally:
        rules_log.disabled = before
    return Figure(
        name=f"{found.rules:,} random rules and streams: crashes",
        unit="crashes",
        rounds=[len(found.crashes)],
        at_most=0,
        counted=True,
        details={
            "seed": seed,
            "refused by the check": found.refused,
            "steps": found.steps,
            "fired": found.fired,
            "seconds": round(time.perf_counter() - began, 1),
            "crashes": found.crashes[:20],
        },
    )


def _is_refused(text: str) -> bool:
    try:
        parse_message(text)
    except MessageError:
        return True
    return False


def _heaviest_ms(rounds: int, full: int) -> list[float]:
    """Measure the median step of the slowest rule in ms: one rule at a time, its windows full."""
    found: list[list[float]] = [[] for _ in range(rounds)]
    for text in HEAVIEST:
        loaded = load_values({"rules": [{"name": "heavy", "when": text, "do": "save"}]})
        if loaded.rules is None:
            raise RuntimeError(f"a heavy rule is refused: {loaded.faults}")
        evaluator, steps = Evaluator(loaded.rules), count()

        def step(evaluator: Evaluator = evaluator, steps: count[int] = steps) -> None:
            number = next(steps)
            value = VALUES[number % 4] if number % 1000 else math.nan
            evaluator.observe({"loss": value}, step=number, now=number * 5.0)

        for _ in range(full if "00)" in text or "6h" in text else SHORT):
            step()
        for one in found:
            one.append(median(_cpu_ms(step) for _ in range(101)))
    return [max(one) for one in found]


def _slowest_ms(works: Sequence[Callable[[], object]]) -> float:
    return max(min(_cpu_ms(work) for _ in range(5)) for work in works)


def _cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1e6
