"""What rules would have meant for a run: where it would have ended, the GPU hours after that, and whether they were
wasted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from baton.contract.rules.actions import NAMES, Pause, Requeue, Rollback, Stop
from baton.contract.rules.faults import did_you_mean
from baton.contract.rules.metrics import Goal, Metrics
from baton.contract.rules.placing import is_control_planes
from baton.contract.rules.rule import CONTROL_PLANE_EVENTS, Rule, RuleSet
from baton.contract.rules.typed import Aggregate, Grouped, Typed, walk
from gpu_client.backtest.history import EVENTS, History
from gpu_client.backtest.trying import Trial, tried

ENDS = (Stop, Pause)
"""The machine is given back for good: what comes after is not paid for."""
TURNS = (Rollback, Requeue)
"""The run goes on, but on another way than the one that was recorded."""
_GOALS = ("eval.loss", "loss")


class Use(StrEnum):
    """What the GPU hours after a firing were good for."""

    SAVED = "saved"
    """The run failed, or ended with a loss or goal that is no finite number, or never got better again."""
    WRONGLY = "wrongly"
    """The run got better again, and ended well."""
    UNKNOWN = "unknown"
    """Nobody knows what is better."""


class Aim(NamedTuple):
    """What the run was to make better."""

    metric: str
    goal: Goal


@dataclass(frozen=True)
class Run:
    """A history, and what else is known of it. `gpus`: how many it kept busy. `failed`: it ended so.

    held: when it had a machine, in the history's times; None for from its first row to its last.
    """

    history: History
    gpus: float = 1.0
    failed: bool = False
    aim: Aim | None = None
    held: Sequence[tuple[float, float]] | None = None

    def seconds_after(self, row: int) -> float | None:
        """From that row to the last one, on a machine; None without times."""
        if self.history.times is None:
            return None
        clock = self.history.clock
        begin, end = float(clock[row]), float(clock[-1])
        if self.held is None:
            return end - begin
        return sum(max(0.0, min(till, end) - max(since, begin)) for since, till in self.held)


class Best(NamedTuple):
    """The best value of the aim."""

    value: float
    row: int


@dataclass(frozen=True)
class After:
    """What came after a row."""

    use: Use
    gpu_hours: float | None
    seconds: float | None
    why: str
    better: Best | None = None
    """The best value, if that came later."""


@dataclass(frozen=True)
class Finding:
    """What one rule would have done."""

    rule: Rule
    trial: Trial | None
    """None if it could not be tried."""
    reason: str = ""
    """Why not; or what it would have needed besides."""
    action: str = ""
    """`stop`, `pause`, `rollback` or `requeue`, if it does one of those."""
    after: After | None = None
    """Of its first firing, if that gives the machine back."""

    @property
    def first(self) -> int | None:
        """The row in which it first fired."""
        return int(self.trial.fired[0]) if self.trial is not None and len(self.trial.fired) else None


@dataclass(frozen=True)
class Verdict:
    """All rules on one run."""

    run: Run
    findings: tuple[Finding, ...]
    end: Finding | None
    """The rule in force that would have changed its way first."""


def judged(rules: RuleSet, run: Run) -> Verdict:
    """Each rule for itself; and which of those in force would have come first."""
    metrics = rules.metrics()
    possible = tuple(rule for rule in rules.rules if not why_not(rule, metrics, run.history))
    trials = {trial.rule.name: trial for trial in tried(rules._replace(rules=possible), run.history)}
    findings = tuple(_finding(rule, trials.get(rule.name), metrics, run) for rule in rules.rules)
    ending = [one for one in findings if one.action and one.first is not None and one.rule.mode == "enforce"]
    return Verdict(run, findings, min(ending, key=lambda one: one.first or 0, default=None))


def _finding(rule: Rule, trial: Trial | None, metrics: Metrics, run: Run) -> Finding:
    if trial is None:
        reason = why_not(rule, metrics, run.history)
    else:
        elsewhere = "the control plane evaluates it, at heartbeats" if is_control_planes(rule, metrics) else ""
        reason = "; ".join(filter(None, (never_reported(rule, run.history), elsewhere)))
    kinds = [type(action) for action in rule.actions if isinstance(action, (*ENDS, *TURNS))]
    found = Finding(rule, trial, reason, NAMES[kinds[0]] if kinds else "")
    if found.first is None or not kinds or kinds[0] not in ENDS:
        return found
    return Finding(rule, trial, reason, found.action, after(run, found.first))


def why_not(rule: Rule, metrics: Metrics, history: History) -> str:
    """Why it cannot be tried on this history; "" if it can."""
    if any(isinstance(part, Grouped) for part in _parts(rule)):
        return "not in this history: the other jobs of its group"
    seen = rule.on
    if rule.on and is_control_planes(rule, metrics):
        seen = rule.on & CONTROL_PLANE_EVENTS
        if not seen:
            return "the control plane evaluates it, and sees none of its events"
    if seen and not seen & EVENTS:
        return f"not in this history: the events {', '.join(sorted(seen))}"
    named = [name for name in rule.metrics if not (name in metrics and metrics[name].clock)] or list(rule.metrics)
    if named and not any(history.has(name) for name in named):
        return f"not in this history: {_nearest(named, history)}"
    if history.times is None and _needs_times(rule):
        return "this history has no times"
    return ""


def never_reported(rule: Rule, history: History) -> str:
    """The metrics that it waits for in vain."""
    missing = [name for name in rule.metrics if not history.has(name)]
    return f"never reported: {_nearest(missing, history)}" if missing else ""


def _nearest(missing: Iterable[str], history: History) -> str:
    said = []
    for name in missing:
        hint = did_you_mean(name, history.columns)
        said.append(f"{name} ({hint})" if hint.startswith("Did") else name)
    return ", ".join(said)


def _parts(rule: Rule) -> list[Typed]:
    return [part for typed in (rule.when, rule.clear) if typed is not None for part in walk(typed)]


def _needs_times(rule: Rule) -> bool:
    periods = [rule.every, rule.hold.period, rule.warmup, rule.cooldown]
    if any(period is not None and period.measure == "seconds" for period in periods):
        return True
    for part in _parts(rule):
        if isinstance(part, Aggregate):
            window = part.summary.window
            if part.summary.function == "age" or (window is not None and window.seconds):
                return True
    return False


def aim_of(history: History, metrics: Metrics, said: str | None, keep_best: Aim | None = None) -> Aim | None:
    """What the run was to make better: as is said (`eval.f1:max`, or `eval.f1` if rules know its goal), as the job's
    retention has it, else the evaluation's loss, else the loss. Raises ValueError for one that nobody can know."""
    if said is None:
        if keep_best is not None and history.has(keep_best.metric):
            return keep_best
        return next((Aim(name, "min") for name in _GOALS if history.has(name)), None)
    name, _, goal = said.partition(":")
    if not history.has(name):
        raise ValueError(f"the metric {name[:64]} is not in this history. {did_you_mean(name, history.columns)}")
    if goal in ("min", "max"):
        return Aim(name, "min" if goal == "min" else "max")
    known = metrics[name].goal if name in metrics else None
    if goal or known is None:
        raise ValueError(f"nobody knows which values of {name} are better. Write {name}:min or {name}:max.")
    return Aim(name, known)


def after(run: Run, row: int) -> After:
    """What the time after that row was good for."""
    seconds = run.seconds_after(row)
    hours = None if seconds is None else seconds / 3600 * run.gpus
    aim = run.aim
    later: Best | None = None
    if aim is not None:
        before, best = best_until(run.history, aim, row), best_until(run.history, aim, run.history.rows - 1)
        if best is not None and best.row > row and (before is None or best.value != before.value):
            later = best
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


def best_until(history: History, aim: Aim, row: int) -> Best | None:
    """The best finite value up to that row, and where it first was."""
    column = history.column(aim.metric)
    values = column.values[: int(np.searchsorted(column.rows, row, side="right"))]
    finite = np.isfinite(values)
    if not finite.any():
        return None
    sign = 1.0 if aim.goal == "min" else -1.0
    place = int(np.argmin(np.where(finite, values * sign, np.inf)))
    return Best(float(values[place]), int(column.rows[place]))
