"""Rules on a history: when each would have fired and been cleared, exactly as a training would have it.

Conditions are worked out for thousands of rows at a time, and the rule's counters jump over what changes nothing. A
rule of which too many rows are too close to call, or which has a part that is not worked out so, is given to the
evaluator of trainings instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.contract.rules.evaluating import Evaluator
from baton.contract.rules.readers import Value
from baton.contract.rules.rule import Rule, RuleSet
from baton.contract.rules.typed import Aggregate, Grouped, Reading, Typed, walk
from baton.contract.rules.verdicts import State
from gpu_client.backtest.blocks import BLOCK_ROWS, Block
from gpu_client.backtest.expressions import Expressions, OneRow, has_median, is_understood
from gpu_client.backtest.history import EVALUATE, STEP, Flags, Floats, History, Whole
from gpu_client.backtest.machine import Checks, decide
from gpu_client.backtest.values import Truth

_AT_ONCE = 20
"""Rules: one byte a row is kept of each."""
_MAX_BLOCK_ROWS = 65_536
_PATIENCE = 200_000
"""Points that rows which are too close to call may take, besides one for each row of the history."""


@dataclass(frozen=True)
class Trial:
    """What one rule would have decided."""

    rule: Rule
    fired: Whole
    """Rows, rising."""
    cleared: Whole
    operands: tuple[tuple[str, Value], ...] = ()
    """Of its condition, when it first fired."""
    streamed: bool = False
    """It took the evaluator of trainings to say so."""


class _Kept:
    """The results of one rule so far."""

    def __init__(self, rule: Rule) -> None:
        self.rough = [one for one in (rule.when, rule.clear) if one is not None and has_median(one)]
        """What a rough look at the rows may be enough for."""
        self.results: list[np.ndarray[tuple[int], np.dtype[np.int8]]] = []
        self.releases: list[Flags] = []
        self.rows: list[Whole] = []
        """Empty where every row is a check."""
        self.spent = 0
        self.due_at: float | None = None


def tried(rules: RuleSet, history: History) -> list[Trial]:
    """All rules, each for itself: nothing that they would have done changes what was reported."""
    found: dict[str, Trial] = {}
    plain = [rule for rule in rules.rules if _is_plain(rule, history)]
    for begin in range(0, len(plain), _AT_ONCE):
        found.update(_Group(rules, plain[begin : begin + _AT_ONCE], history).trials())
    return [found.get(rule.name) or streamed(rules, rule, history) for rule in rules.rules]


def _is_plain(rule: Rule, history: History) -> bool:
    understood = is_understood(rule.when) and (rule.clear is None or is_understood(rule.clear))
    return understood and history.rising and history.rows > 0


def streamed(rules: RuleSet, rule: Rule, history: History) -> Trial:
    """By the evaluator of trainings, row by row."""
    # a row can be several events at once: here it is a step where it is one of the rule's, else none of them
    said = replace(rule, on=frozenset((STEP,))) if rule.on else rule
    happens = history.happens(rule.on, 0, history.rows).tolist()
    evaluator = Evaluator(rules._replace(rules=(said,)))
    rows: dict[State, list[int]] = {State.FIRED: [], State.CLEARED: []}
    operands: tuple[tuple[str, Value], ...] = ()
    for row, (metrics, step, now) in enumerate(history.observations(rule.metrics)):
        event = STEP if happens[row] else EVALUATE
        for verdict in evaluator.observe(metrics, step=step, now=now, event=event):
            if verdict.state is State.FIRED and not rows[State.FIRED]:
                operands = tuple((one.text, one.value) for one in verdict.operands)
            if verdict.state in rows:
                rows[verdict.state].append(row)
    fired, cleared = (np.array(rows[state], np.int64) for state in (State.FIRED, State.CLEARED))
    return Trial(rule, fired, cleared, operands, streamed=True)


class _Group:
    """Rules that share what is worked out."""

    def __init__(self, rules: RuleSet, group: Sequence[Rule], history: History) -> None:
        self._rules = rules
        self._group = group
        self._history = history
        conditions = [one for rule in group for one in (rule.when, rule.clear) if one is not None]
        self._expressions = Expressions(conditions, rules.limits)
        # a long window is summed up once a block
        self._size = min(max(BLOCK_ROWS, self._expressions.reach // 2), _MAX_BLOCK_ROWS)
        known = rules.metrics()
        self._clocks = {name for rule in group for name in rule.metrics if name in known and known[name].clock}
        self._at_rows = {
            rule.name: (OneRow(rule.when, rules.limits), OneRow(rule.clear, rules.limits) if rule.clear else None)
            for rule in group
        }
        self._kept = {rule.name: _Kept(rule) for rule in group}

    def trials(self) -> Iterator[tuple[str, Trial]]:
        """Of those that could be worked out."""
        blocks = -(-self._history.rows // self._size)
        with np.errstate(all="ignore"):
            for number in range(blocks):
                block = Block(self._history, number, self._size)
                self._expressions.open(block)
                for rule in self._group:
                    if rule.name in self._kept:
                        self._pass(rule, block)
            for rule in self._group:
                kept = self._kept.pop(rule.name, None)
                if kept is not None:
                    yield rule.name, self._trial(rule, kept)

    def _pass(self, rule: Rule, block: Block) -> None:
        """Check a rule at the rows of a block."""
        kept = self._kept[rule.name]
        due = self._due(rule, block, kept)
        when, clear = self._at_rows[rule.name]
        truth = self._decided(rule.when, when, due, kept)
        release = self._decided(rule.clear, clear, due, kept) if rule.clear is not None and clear is not None else None
        if kept.spent > _PATIENCE + self._history.rows:
            del self._kept[rule.name]
            return
        results = truth.yes.view(np.int8) * np.int8(2) + truth.no.view(np.int8)
        if due is not None:
            results = results[due]
            kept.rows.append(np.flatnonzero(due) + block.low)
        kept.results.append(results)
        if release is not None:
            kept.releases.append(release.yes if due is None else release.yes[due])

    def _decided(self, typed: Typed, one_row: OneRow | None, due: Flags | None, kept: _Kept) -> Truth:
        """With the rows that are too close to call looked at one by one."""
        if typed in kept.rough:
            truth = self._expressions.roughly(typed)
            if truth.vague is None or not (truth.vague if due is None else truth.vague & due).any():
                return Truth(truth.yes, truth.no)
            # where bounds once were too wide they will be again
            kept.rough.remove(typed)
        truth = self._expressions.truth(typed)
        if truth.vague is None or one_row is None:
            return truth
        rows = np.flatnonzero(truth.vague if due is None else truth.vague & due)
        if not len(rows):
            return truth
        kept.spent += len(rows) * self._expressions.cost_of(typed)
        if kept.spent > _PATIENCE + self._history.rows:
            return truth
        yes, no = truth.yes.copy(), truth.no.copy()
        for row in rows.tolist():
            found = one_row.truth(self._expressions, row)
            yes[row], no[row] = found is True, found is False
        return Truth(yes, no)

    def _due(self, rule: Rule, block: Block, kept: _Kept) -> Flags | None:
        """The rows at which it is checked; None for all of them."""
        if rule.every is not None:
            if rule.every.measure == "steps":
                return self._by_steps(int(rule.every.amount), block)
            return self._by_time(rule.every.amount, block, kept)
        if rule.on:
            return self._history.happens(rule.on, block.low, block.high)
        if rule.moves_by_itself or not rule.metrics:
            return None
        due: Flags | None = np.zeros(block.rows, bool)
        for name in [name for name in rule.metrics if name not in self._clocks] or rule.metrics:
            present = block.present(name)
            due = None if due is None or present is None else due | present
        return due

    def _by_steps(self, amount: int, block: Block) -> Flags:
        steps = self._history.steps[max(block.low - 1, 0) : block.high]
        numbers = steps // amount
        due: Flags = numbers[1:] > numbers[:-1]
        if block.low:
            return due
        # what lies behind the first row is not made up for
        return np.concatenate((numbers[:1] * (steps[:1] % amount == 0) > 0, due))

    def _by_time(self, amount: float, block: Block, kept: _Kept) -> Flags:
        due = np.zeros(block.rows, bool)
        row = 0
        while row < block.rows:
            if kept.due_at is not None:
                row = max(row, int(np.searchsorted(block.now, kept.due_at)))
                if row >= block.rows:
                    break
            due[row] = True
            kept.due_at = block.now[row].item() + amount
            row += 1
        return due

    def _trial(self, rule: Rule, kept: _Kept) -> Trial:
        history = self._history
        results = np.concatenate(kept.results)
        steps: Whole = history.steps
        times: Floats = history.clock
        rows: Whole | None = np.concatenate(kept.rows) if kept.rows else None
        if rows is not None:
            steps, times = steps[rows], times[rows]
        releases = np.concatenate(kept.releases) if kept.releases else None
        decided = decide(rule, Checks(results, releases, steps, times))
        fired, cleared = decided if rows is None else (rows[decided.fired], rows[decided.cleared])
        operands = self._operands(rule, int(fired[0])) if len(fired) else ()
        return Trial(rule, fired, cleared, operands)

    def _operands(self, rule: Rule, row: int) -> tuple[tuple[str, Value], ...]:
        """What its condition looked at in that row."""
        number, place = divmod(row, self._size)
        expressions = self._expressions
        if expressions.block.number != number:
            expressions.open_again(Block(self._history, number, self._size))
        leaves = {one.text: one for one in walk(rule.when) if isinstance(one, (Reading, Aggregate, Grouped))}
        return tuple((text, expressions.value_at(one, place)) for text, one in leaves.items())
