"""Judge rules by a recorded run: find the end that rules would have caused, and the GPU hours wasted after the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from baton.contract.rules.backtest.history import ROW_EVENTS, History
from baton.contract.rules.backtest.replay import Trial, replay
from baton.contract.rules.document.actions import NAMES, Pause, Requeue, RollbackAction, Stop
from baton.contract.rules.document.rule import CONTROL_PLANE_EVENTS, Rule, RuleSet
from baton.contract.rules.document.rule_placement import runs_in_control_plane
from baton.contract.rules.language.faults import suggest_name
from baton.contract.rules.language.typed_ast import Aggregate, Grouped, Typed, walk
from baton.contract.rules.metrics import Goal, MetricCatalog

_ENDING = (Stop, Pause)
"""Actions that release the machine and therefore end the costs."""
_DIVERTING = (RollbackAction, Requeue)
"""Actions after which the run continues in a way that the recording does not show."""
_DEFAULT_GOALS = ("eval.loss", "loss")


class Use(StrEnum):
    """Verdict on the GPU hours after a rule first fired."""

    SAVED = "saved"
    """The run failed, or its last loss or goal is not finite, or its goal did not improve after the firing."""
    WRONGLY = "wrongly"
    """The goal of the run improved after the firing, and the run ended well."""
    UNKNOWN = "unknown"
    """The run has no goal."""


class Aim(NamedTuple):
    """Goal of a run: a metric, and its better direction (lower or higher)."""

    metric: str
    goal: Goal


@dataclass(frozen=True)
class Run:
    """A recorded run. `gpus`: number of GPUs in use. `failed`: True if the job failed.

    `held`: intervals with a machine, in the times of the history; None for the whole history.
    """

    history: History
    gpus: float = 1.0
    failed: bool = False
    aim: Aim | None = None
    held: Sequence[tuple[float, float]] | None = None

    def seconds_after(self, row: int) -> float | None:
        """Return the seconds on a machine between a row and the last row; None if the history has no times."""
        if self.history.times is None:
            return None
        clock = self.history.clock
        begin, end = float(clock[row]), float(clock[-1])
        if self.held is None:
            return end - begin
        return sum(max(0.0, min(till, end) - max(since, begin)) for since, till in self.held)

    def seconds_until(self, row: int) -> float | None:
        """Return the seconds from the first row to `row`; None if the history has no times."""
        return None if self.history.times is None else self.history.clock[row] - self.history.clock[0]


class Best(NamedTuple):
    """Best value of a goal, and its row."""

    value: float
    row: int


@dataclass(frozen=True)
class After:
    """Part of a run after a row, and the verdict on this part."""

    use: Use
    gpu_hours: float | None
    seconds: float | None
    why: str
    better: Best | None = None
    """Best value of the goal, if the run reached the value after the row."""


@dataclass(frozen=True)
class Finding:
    """Result of one rule on one run."""

    rule: Rule
    trial: Trial | None
    """Decisions on the rule; None if the history does not suffice."""
    reason: str
    """Reason of a missing trial, or the rule's metrics that the history lacks and the rule's evaluator; else ""."""
    action: str
    """First of the rule's actions `stop`, `pause`, `rollback` and `requeue`; "" without such an action."""
    after: After | None
    """Time after the first firing, if the firing releases the machine."""

    @property
    def first(self) -> int | None:
        """Return the row of the rule's first firing."""
        return self.trial.fired[0] if self.trial is not None and len(self.trial.fired) else None

    def action_names(self) -> list[str]:
        """Return the names of the rule's actions, each once."""
        return list(dict.fromkeys(NAMES[type(action)] for action in self.rule.actions))


@dataclass(frozen=True)
class RunVerdict:
    """Results of all rules on one run."""

    run: Run
    findings: tuple[Finding, ...]
    end: Finding | None
    """Finding of the enforced rule that would have been the first to end or divert the run."""


def judged(rules: RuleSet, run: Run, advance: Callable[[int], object] = lambda rows: None) -> RunVerdict:
    """Judge each rule separately, and find the enforced rule with the first effect. `advance`: see `replay`."""
    metrics = rules.metrics()
    possible = tuple(rule for rule in rules.rules if not _why_not(rule, metrics, run.history))
    trials = {trial.rule.name: trial for trial in replay(rules._replace(rules=possible), run.history, advance)}
    best = _best(run)
    findings = tuple(_finding(rule, trials.get(rule.name), metrics, run, best) for rule in rules.rules)
    ending = [one for one in findings if one.action and one.first is not None and one.rule.mode == "enforce"]
    return RunVerdict(run, findings, min(ending, key=lambda one: one.first or 0, default=None))


def _finding(rule: Rule, trial: Trial | None, metrics: MetricCatalog, run: Run, best: Best | None) -> Finding:
    if trial is None:
        reason = _why_not(rule, metrics, run.history)
    else:
        elsewhere = "the control plane evaluates it, at heartbeats" if runs_in_control_plane(rule, metrics) else ""
        reason = "; ".join(filter(None, (_never_reported(rule, run.history), elsewhere)))
    kinds = [type(action) for action in rule.actions if isinstance(action, (*_ENDING, *_DIVERTING))]
    found = Finding(rule, trial, reason, NAMES[kinds[0]] if kinds else "", None)
    if found.first is None or not kinds or kinds[0] not in _ENDING:
        return found
    return replace(found, after=_after(run, found.first, best))


def _why_not(rule: Rule, metrics: MetricCatalog, history: History) -> str:
    """Return why the history does not suffice for a rule; "" if the history does."""
    if any(isinstance(part, Grouped) for part in _parts(rule)):
        return "not in this history: the other jobs of its group"
    seen = rule.on
    if rule.on and runs_in_control_plane(rule, metrics):
        seen = rule.on & CONTROL_PLANE_EVENTS
        if not seen:
            return "the control plane evaluates it, and sees none of its events"
    if seen and not seen & ROW_EVENTS:
        return f"not in this history: the events {', '.join(sorted(seen))}"
    named = [name for name in rule.metrics if not (name in metrics and metrics[name].clock)] or list(rule.metrics)
    if named and not any(history.has(name) for name in named):
        return f"not in this history: {_nearest(named, history)}"
    if history.times is None and _needs_times(rule):
        return "this history has no times"
    return ""


def _never_reported(rule: Rule, history: History) -> str:
    """Return a text on the rule's metrics that the history lacks; "" without such metrics."""
    missing = [name for name in rule.metrics if not history.has(name)]
    return f"never reported: {_nearest(missing, history)}" if missing else ""


def _nearest(missing: Iterable[str], history: History) -> str:
    names = []
    for name in missing:
        hint = suggest_name(name, history.columns)
        names.append(f"{name} ({hint})" if hint.startswith("Did") else name)
    return ", ".join(names)


def _parts(rule: Rule) -> list[Typed]:
    return [part for typed in (rule.when, rule.clear) if typed is not None for part in walk(typed)]


def _needs_times(rule: Rule) -> bool:
    periods = [rule.every, rule.pending.period, rule.warmup, rule.cooldown]
    if any(period is not None and period.measure == "seconds" for period in periods):
        return True
    for part in _parts(rule):
        if isinstance(part, Aggregate):
            window = part.summary.window
            if part.summary.function == "age" or (window is not None and window.seconds):
                return True
    return False


def aim_of(history: History, metrics: MetricCatalog, option: str | None, keep_best: Aim | None = None) -> Aim | None:
    """Choose the goal of a run: the option `--goal`, else the goal of the job's retention, else `eval.loss` or `loss`.

    The option is `METRIC:min`, `METRIC:max`, or `METRIC` if the rules declare the better direction. Raises ValueError
    if the direction is undeclared or the history lacks the metric.
    """
    if option is None:
        if keep_best is not None and history.has(keep_best.metric):
            return keep_best
        return next((Aim(name, "min") for name in _DEFAULT_GOALS if history.has(name)), None)
    name, _, goal = option.partition(":")
    if not history.has(name):
        raise ValueError(f"the metric {name[:64]} is not in this history. {suggest_name(name, history.columns)}")
    if goal in ("min", "max"):
        return Aim(name, "min" if goal == "min" else "max")
    known = metrics[name].goal if name in metrics else None
    if goal or known is None:
        raise ValueError(f"nobody knows which values of {name} are better. Write {name}:min or {name}:max.")
    return Aim(name, known)


def _after(run: Run, row: int, best: Best | None) -> After:
    """Judge the part of a run after a row. `best`: the best value of the goal in the whole run."""
    seconds = run.seconds_after(row)
    hours = None if seconds is None else seconds / 3600 * run.gpus
    aim = run.aim
    later = best if best is not None and best.row > row else None
    if run.failed:
        return After(Use.SAVED, hours, seconds, "the run failed", later)
    for name in dict.fromkeys(("loss", *([aim.metric] if aim is not None else []))):
        column = run.history.column(name)
        if column.total and not math.isfinite(column.values[-1]):
            return After(Use.SAVED, hours, seconds, f"{name} was not finite at the end", later)
    if aim is None:
        return After(Use.UNKNOWN, hours, seconds, "no goal is known: name one with --goal")
    if later is not None:
        return After(Use.WRONGLY, hours, seconds, f"the best {aim.metric} came later", later)
    return After(Use.SAVED, hours, seconds, f"{aim.metric} never got better again")


def _best(run: Run) -> Best | None:
    """Find the best finite value of the goal, with its first row; None without a goal or a finite value."""
    if run.aim is None:
        return None
    column = run.history.column(run.aim.metric)
    finite = [(value, row) for value, row in zip(column.values, column.rows, strict=True) if math.isfinite(value)]
    if not finite:
        return None
    value, row = min(finite) if run.aim.goal == "min" else max(finite, key=lambda one: (one[0], -one[1]))
    return Best(value, row)
