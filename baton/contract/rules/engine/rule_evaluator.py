"""Evaluator: observations of a training become verdicts.

The cost of an observation depends on its metrics and on the rules that are due, not on the length of the history.
Evaluation never raises: a failed check counts an error, and three errors disable the rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from baton.contract.rules.arithmetic import to_number
from baton.contract.rules.document.actions import Action, Stop
from baton.contract.rules.document.durations import Period
from baton.contract.rules.document.rule import EVENTS, REPORT, RuleSet
from baton.contract.rules.engine.expression_compiler import Compiler
from baton.contract.rules.engine.group_statistics import GroupValues
from baton.contract.rules.engine.rule_state_machine import MAX_ERRORS, RuleStateMachine
from baton.contract.rules.engine.verdicts import Operand, State, Verdict
from baton.contract.rules.language.typed_ast import Aggregate, Grouped, Reading, walk
from baton.contract.rules.numbers import decode, encode
from baton.contract.rules.windows.series import ObservationClock, Series
from baton.contract.rules.windows.window_closures import Reader, Value

STATE_VERSION = 1
MAX_PROBLEM_CHARS = 120
MAX_COMBINATIONS = 256
_LOGGED = "logged"
"""Event of a `log` at a step that was observed already, therefore it is no new step."""


class ObservationPlan:
    """Cached work for observations of one event with the same metrics."""

    __slots__ = ("conditions", "due", "expected", "expected_at", "passed", "steps", "taken")

    def __init__(self, taken: list[tuple[str, Series]], steps: Series | None, due: list[RuleStateMachine]) -> None:
        """Create a plan. `taken`: series of the metrics that rules read; `steps`: the series of `step`, if it is not
        among them.
        """
        self.taken = taken
        self.steps = steps
        self.due = due
        """Rules that such an observation makes due."""
        self.conditions = [machine.condition for machine in due]
        self.expected: list[object] = []
        """Results that change no rule."""
        self.expected_at = -1
        """Value of the change counter at which `expected` was computed."""
        self.passed = 0
        """Observations with expected results since the last `settle`."""

    def settle(self) -> None:
        """Add the skipped checks to the counters of the rules."""
        if self.passed:
            for machine in self.due:
                machine.checks += self.passed
                machine.truth = machine.inert
            self.passed = 0

    def refresh(self, changes: int) -> None:
        """Recompute the expected results; a rule that needs every result expects none."""
        if self.expected_at != changes:
            self.expected = [self if machine.inert is None else machine.inert for machine in self.due]
            self.expected_at = changes


class StateError(ValueError):
    """Fault of a saved state; the evaluator is reset."""


class RestoredRule(NamedTuple):
    """Outcome of restoring one rule's counters."""

    rule: str
    kept: bool
    """True if the counters continue."""
    reason: str = ""


class Evaluator:
    """A rule set with its histories and counters."""

    def __init__(self, rules: RuleSet, group: GroupValues | None = None) -> None:
        """Create an evaluator; in the control plane, `group` gives the values of the other jobs of the group."""
        self.rules = rules
        self._group = group
        self._assemble()

    def _assemble(self) -> None:
        """Create clock, series and state machines in their initial state."""
        rules = self.rules
        self._clock = ObservationClock()
        compiler = Compiler(self._clock, rules.limits, self._group)
        self._machines: list[RuleStateMachine] = []
        self._operands: dict[str, list[tuple[str, Reader]]] = {}
        for rule in rules.rules:
            release = compiler.compile(rule.clear) if rule.clear is not None else None
            self._machines.append(RuleStateMachine(rule, compiler.compile(rule.when), release))
            leaves = {one.text: one for one in walk(rule.when) if isinstance(one, (Reading, Aggregate, Grouped))}
            self._operands[rule.name] = [(text, compiler.compile(one)) for text, one in leaves.items()]
            for name in rule.text_metrics:
                compiler.keep(name)
        self._series: dict[str, Series] = compiler.series
        self._samples = compiler.samples
        known = rules.metrics()
        clocks = {name for name in self._series if name in known and known[name].clock}
        self._by_metric: dict[str, list[RuleStateMachine]] = {name: [] for name in self._series}
        self._by_event: dict[str, list[RuleStateMachine]] = {name: [] for name in EVENTS}
        self._always: list[RuleStateMachine] = []
        self._periodic: list[RuleStateMachine] = []
        for index, machine in enumerate(self._machines):
            machine.index = index
            machine.reads = [self._series[name] for name in machine.rule.metrics]
            self._subscribe(machine, clocks)
        self._by_event[REPORT] = [*self._by_event["step"], *self._by_event["log"]]
        self._by_event[_LOGGED] = self._by_event["log"]
        self._plans: dict[tuple[str, ...], ObservationPlan] = {}
        self._changes = 0
        """Counter of changes of expected results."""
        self._step = 0
        self._periodic_step: int | None = None
        """Step of the previous check of rules with `every`."""

    def _subscribe(self, machine: RuleStateMachine, clocks: set[str]) -> None:
        rule = machine.rule
        if rule.every is not None:
            self._periodic.append(machine)
        elif rule.on:
            for event in rule.on:
                self._by_event[event].append(machine)
        elif rule.is_time_dependent or not rule.metrics:
            self._always.append(machine)
        else:
            # A metric that changes with every step makes a rule due only if the rule reads no other metric.
            names = [name for name in rule.metrics if name not in clocks] or rule.metrics
            for name in names:
                self._by_metric[name].append(machine)

    def observe(
        self, metrics: Mapping[str, object], *, step: int, now: float, event: str = "step"
    ) -> Sequence[Verdict]:
        """Take an observation and return the verdicts of the rules that fired, were cleared or failed, in the order of
        the rules.

        `metrics`: values by their names in rules; None marks a value as missing. `now`: seconds from an origin that
        survives a resume; an earlier time counts as the previous one.
        """
        clock = self._clock
        if now > clock.now:
            clock.now = now
        else:
            now = clock.now
        event = _LOGGED if event == "log" and step == self._step else event
        self._step = step
        plan = self._plans.get((event, *metrics))
        if plan is None:
            plan = self._plan_of(event, metrics)
        for name, series in plan.taken:
            value = metrics[name]
            try:
                series.problem = ""
                if type(value) is float:
                    series.push(value + 0.0, now)
                else:
                    number = to_number(value)
                    series.current = None
                    if number is not None:
                        series.push(number, now)
            except Exception as error:  # noqa: BLE001 - a value can be any object, and fail in any way
                series.current = None
                series.problem = f"{name} is no number ({type(value).__name__}: {error})"[:MAX_PROBLEM_CHARS]
        if plan.steps is not None:
            plan.steps.push(float(step), now)
        for sample in self._samples:
            sample.take()
        return self._checked(plan, step, now)

    def _checked(self, plan: ObservationPlan, step: int, now: float) -> Sequence[Verdict]:
        due = self._with_periodic(plan.due, step, now) if self._periodic else plan.due
        results: list[Value] | None = None
        if due is plan.due:
            try:
                results = [condition() for condition in plan.conditions]
            except Exception:  # noqa: BLE001, S110 - it comes again below, where it is seen whose it is
                pass
            else:
                # Nearly all observations change no rule, therefore compare all results at once first.
                if results == plan.expected and plan.expected_at == self._changes:
                    plan.passed += 1
                    return ()
        found = self._check(due, results, step, now)
        plan.refresh(self._changes)
        return found

    def _check(
        self, due: list[RuleStateMachine], results: list[Value] | None, step: int, now: float
    ) -> Sequence[Verdict]:
        self._settle()
        found: list[Verdict] | None = None
        for index, machine in enumerate(due):
            inert = machine.inert
            try:
                truth = machine.condition() if results is None else results[index]
                if truth is inert and truth is not None:
                    machine.truth = truth
                    machine.checks += 1
                    continue
                reason = ""
                if truth is None:
                    for series in machine.reads:
                        if series.problem:
                            reason = series.problem
                            break
                    else:
                        if inert is not None:
                            machine.truth = None
                            machine.checks += 1
                            continue
                state = machine.fail() if reason else machine.check(truth, step, now)  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - whatever is wrong in here, the training goes on
                state, reason = machine.fail(), f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS]
            if machine.inert is not inert:
                self._changes += 1
            if state is not None:
                if machine.errors >= MAX_ERRORS:
                    self._plans.clear()
                found = [] if found is None else found
                found.append(self._verdict(machine, state, reason))
        return found or ()

    def _settle(self) -> None:
        """Bring the rules' counters up to date before they are read or changed."""
        for plan in self._plans.values():
            plan.settle()

    def _plan_of(self, event: str, metrics: Mapping[str, object]) -> ObservationPlan:
        """Create the plan of a combination of event and metrics; a training has few combinations."""
        again = event is _LOGGED
        names = {*metrics, *(() if again else ("step",))} & self._by_metric.keys()
        found = {machine for name in names for machine in self._by_metric[name]}
        found.update(() if again else self._always, self._by_event.get(event, ()))
        due = sorted((one for one in found if one.errors < MAX_ERRORS), key=lambda machine: machine.index)
        taken = [(name, self._series[name]) for name in metrics if name in self._series]
        plan = ObservationPlan(taken, None if again or "step" in metrics else self._series.get("step"), due)
        if len(self._plans) >= MAX_COMBINATIONS:
            self._settle()
            self._plans.clear()
        self._plans[event, *metrics] = plan
        return plan

    def _with_periodic(self, due: list[RuleStateMachine], step: int, now: float) -> list[RuleStateMachine]:
        """Add the rules whose `every` has elapsed."""
        found: list[RuleStateMachine] = []
        before, self._periodic_step = self._periodic_step, step
        for machine in self._periodic:
            every = machine.rule.every
            if every is None or machine.errors >= MAX_ERRORS:
                continue
            if every.measure == "steps":
                # Periods are multiples from step 0, therefore independent of the step of a resume.
                number = step // every.amount
                if machine.due_step is not None:
                    is_due = number > machine.due_step
                elif before is not None:
                    is_due = number > before // every.amount
                else:
                    # A new rule does not catch up on periods before it came into force.
                    is_due = number > 0 and step % every.amount == 0
                if is_due:
                    found.append(machine)
                machine.due_step = number
            elif machine.due_at is None or now >= machine.due_at:
                machine.due_at = now + every.amount
                found.append(machine)
        return sorted((*due, *found), key=lambda machine: machine.index) if found else due

    def statuses(self) -> list[Verdict]:
        """Return the state of every rule after the newest observation."""
        self._settle()
        step, now = self._step, self._clock.now
        return [self._verdict(machine, machine.state(step, now), "") for machine in self._machines]

    def _verdict(self, machine: RuleStateMachine, state: State, reason: str) -> Verdict:
        rule, step, now = machine.rule, self._step, self._clock.now
        actions: tuple[Action, ...] = ()
        if state is State.FIRED and not reason:
            actions = rule.actions
        elif state is State.ERROR and rule.on_error == "stop":
            actions = (Stop(outcome="failed"),)
        return Verdict(
            rule=rule.name,
            state=state,
            step=step,
            at=now,
            operands=tuple(Operand(text, _value(reader)) for text, reader in self._operands[rule.name]),
            done=machine.progress(step, now),
            needed=machine.needed,
            measure=machine.pending_period.measure,
            of=machine.pending_of,
            fires=machine.fires,
            next_step=_next_step(rule.every, step),
            next_at=machine.due_at,
            left=machine.left(state, step, now),
            actions=actions,
            severity=rule.severity,
            mode=rule.mode,
            reason=reason,
            onset=machine.fired_onset if state is State.FIRED and machine.fired_onset is not None else step,
        )

    def unknown(self) -> set[str]:
        """List the rules without a check or with an unknown condition."""
        self._settle()
        return {one.rule.name for one in self._machines if one.truth is None or not one.checks}

    def values(self) -> dict[str, float | None]:
        """Return the newest values of all metrics that rules read or name in texts."""
        return {name: series.current for name, series in self._series.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later verdicts depend on, as plain JSON."""
        self._settle()
        return {
            "version": STATE_VERSION,
            "document": self.rules.digest,
            "step": self._step,
            "now": encode(self._clock.now),
            "metrics": {name: series.state() for name, series in self._series.items()},
            "followers": {
                name: {key: follower.state() for key, follower in series.followers.items()}
                for name, series in self._series.items()
            },
            "rules": {machine.rule.name: machine.save() for machine in self._machines},
        }

    def load_state_dict(self, state: Any) -> list[RestoredRule]:
        """Restore a saved state for this rule set or a revised one.

        A rule keeps its counters if its name, expressions, `for`, `on` and `every` are unchanged; the result names the
        reason for every other rule. A rule with a changed mode or changed actions can fire again and keeps its windows
        and its progress towards `for`; so does a disabled rule in a revised document. Raises StateError if the state
        is damaged or has another version.
        """
        try:
            if state["version"] != STATE_VERSION:
                raise ValueError("its version is not known")
            self._assemble()
            return self._restored(state)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
            self._assemble()
            raise StateError(f"the state cannot be taken back: {type(error).__name__}: {error}") from error

    def _restored(self, state: Any) -> list[RestoredRule]:
        now, step = decode(state["now"]), state["step"]
        if now is None or math.isnan(now) or type(step) is not int:
            raise ValueError("step or time is damaged")
        self._clock.now, self._step = now, step
        self._periodic_step = step if now > -math.inf else None
        other = state.get("document", self.rules.digest) != self.rules.digest
        for name, series in self._series.items():
            if name not in state["metrics"]:
                continue
            series.restore(state["metrics"][name])
            saved = state["followers"][name]
            for key, follower in series.followers.items():
                follower.restore(saved.get(key))
        restored: list[RestoredRule] = []
        for machine in self._machines:
            name, saved = machine.rule.name, state["rules"].get(machine.rule.name)
            if saved is None:
                restored.append(RestoredRule(name, False, "the rule is new"))
            elif saved["identity"] != machine.rule.identity:
                restored.append(RestoredRule(name, False, "its condition, 'for', 'on' or 'every' has changed"))
            else:
                machine.restore(saved)
                reason = machine.apply_revision(saved.get("deeds"), elsewhere=other)
                restored.append(RestoredRule(name, not reason, reason))
        new = {machine.rule.name for machine in self._machines}
        return restored + [RestoredRule(name, False, "the rule is gone") for name in state["rules"] if name not in new]


def _value(reader: Reader) -> float | bool | None:
    try:
        return reader()
    except (ArithmeticError, LookupError, TypeError, ValueError):
        # Arithmetic on points can raise these errors only; the verdict of the rule reports the error already.
        return None


def _next_step(every: Period | None, step: int) -> int | None:
    if every is None or every.measure != "steps":
        return None
    return int((step // every.amount + 1) * every.amount)
