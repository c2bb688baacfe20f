"""Replay a recorded run through the evaluator of trainings, and record each rule's firings and clearings."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.contract.rules.backtest.history import EVALUATE, STEP, History
from baton.contract.rules.document.rule import Rule, RuleSet
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import Operand, State

BLOCK_ROWS = 512
"""Rows of a block; memory contains the reports of one block at a time."""


@dataclass(frozen=True)
class Trial:
    """Decisions of the evaluator about one rule, in rising order of rows."""

    rule: Rule
    fired: Sequence[int]
    cleared: Sequence[int]
    operands: tuple[Operand, ...]
    """Operands of the rule's condition at the first firing; empty without a firing."""


def replay(rules: RuleSet, history: History, advance: Callable[[int], object]) -> list[Trial]:
    """Evaluate all rules on all rows of a history; the trials are in the order of the rules.

    The replay performs no actions, therefore no rule influences another rule. The function calls `advance` after each
    block with the number of its rows.
    """
    groups = {on: _evaluator(rules, on) for on in {rule.on for rule in rules.rules}}
    names = list(dict.fromkeys(name for rule in rules.rules for name in rule.metrics))
    rows: dict[tuple[str, State], array[int]] = {
        (rule.name, state): array("q") for rule in rules.rules for state in (State.FIRED, State.CLEARED)
    }
    operands: dict[str, tuple[Operand, ...]] = {}
    for low in range(0, history.rows, BLOCK_ROWS):
        high = min(low + BLOCK_ROWS, history.rows)
        reports = history.reports(names, low, high)
        for on, evaluator in groups.items():
            events = [STEP if happens else EVALUATE for happens in history.happens(on, low, high)]
            for row, event, (metrics, step, now) in zip(range(low, high), events, reports, strict=True):
                for verdict in evaluator.observe(metrics, step=step, now=now, event=event):
                    if verdict.state is State.FIRED:
                        operands.setdefault(verdict.rule, verdict.operands)
                    if (verdict.rule, verdict.state) in rows:
                        rows[verdict.rule, verdict.state].append(row)
        advance(high - low)
    return [
        Trial(
            rule,
            rows[rule.name, State.FIRED],
            rows[rule.name, State.CLEARED],
            operands.get(rule.name, ()),
        )
        for rule in rules.rules
    ]


def _evaluator(rules: RuleSet, on: frozenset[str]) -> Evaluator:
    """Make the evaluator of the rules that are checked at the events `on`.

    A row can be several events at once, but the evaluator takes one event per observation. Therefore the evaluator
    checks the rules at steps, and the replay passes a row with any event of `on` as a step, every other row as an
    evaluation.
    """
    events = frozenset((STEP,)) if on else on
    return Evaluator(rules._replace(rules=tuple(replace(rule, on=events) for rule in rules.rules if rule.on == on)))
