"""Rules on a running training: observations in, verdicts out.

An observation costs what its metrics and the rules that it makes due cost, however long the history is. Nothing that
is observed makes it raise: a rule that cannot be checked counts an error, and is disabled after three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from baton.contract.rules.arithmetic import number_of
from baton.contract.rules.document.actions import Action, Stop
from baton.contract.rules.document.durations import Period
from baton.contract.rules.document.rule import EVENTS, REPORT, RuleSet
from baton.contract.rules.engine.compiler import Compiler
from baton.contract.rules.engine.group_statistics import GroupValues
from baton.contract.rules.engine.rule_state_machine import MAX_ERRORS, Machine
from baton.contract.rules.engine.verdicts import Operand, State, Verdict
from baton.contract.rules.language.typed_ast import Aggregate, Grouped, Reading, walk
from baton.contract.rules.numbers import decoded, encoded
from baton.contract.rules.windows.series import Clock, Series
from baton.contract.rules.windows.window_fast_paths import Reader, Value

STATE_VERSION = 1
MAX_PROBLEM_CHARS = 120
MAX_COMBINATIONS = 256
_LOGGED = "logged"
"""A `log` of a step that was observed already: the step itself is nothing new."""


class Plan:
    """What is to be done about observations of one event with the same metrics."""

    __slots__ = ("conditions", "due", "expected", "looked_up", "passed", "steps", "taken")

    def __init__(self, taken: list[tuple[str, Series]], steps: Series | None, due: list[Machine]) -> None:
        """`taken`: the metrics that are read. `steps`: that of steps, where it is not among them."""
        self.taken = taken
        self.steps = steps
        self.due = due
        """The rules that such an observation makes due."""
        self.conditions = [machine.condition for machine in due]
        self.expected: list[object] = []
        """The results that change nothing for any of them."""
        self.looked_up = -1
        """After so many changes of rules."""
        self.passed = 0
        """How often exactly these have come since the rules were told."""

    def settle(self) -> None:
        """Tell the rules how often they were checked."""
        if self.passed:
            for machine in self.due:
                machine.checks += self.passed
                machine.truth = machine.inert
            self.passed = 0

    def look_up(self, changes: int) -> None:
        """What is expected from now on; a rule that has to be told of every result expects none."""
        if self.looked_up != changes:
            self.expected = [self if machine.inert is None else machine.inert for machine in self.due]
            self.looked_up = changes


class StateError(ValueError):
    """A saved state cannot be taken back; the evaluator is as new."""


class Carried(NamedTuple):
    """What became of a rule's counters when a state was taken back."""

    rule: str
    kept: bool
    """It goes on as it stood."""
    reason: str = ""


class Evaluator:
    """A rule set with its history."""

    def __init__(self, rules: RuleSet, group: GroupValues | None = None) -> None:
        """`group`: where it is evaluated in the control plane, what the jobs of the job's group report."""
        self.rules = rules
        self._group = group
        self._assemble()

    def _assemble(self) -> None:
        """Clock, series and machines, as before the first observation."""
        rules = self.rules
        self._clock = Clock()
        compiler = Compiler(self._clock, rules.limits, self._group)
        self._machines: list[Machine] = []
        self._operands: dict[str, list[tuple[str, Reader]]] = {}
        for rule in rules.rules:
            release = compiler.compiled(rule.clear) if rule.clear is not None else None
            self._machines.append(Machine(rule, compiler.compiled(rule.when), release))
            leaves = {one.text: one for one in walk(rule.when) if isinstance(one, (Reading, Aggregate, Grouped))}
            self._operands[rule.name] = [(text, compiler.compiled(one)) for text, one in leaves.items()]
            for name in rule.told:
                compiler.keep(name)
        self._series: dict[str, Series] = compiler.series
        self._samples = compiler.samples
        known = rules.metrics()
        clocks = {name for name in self._series if name in known and known[name].clock}
        self._by_metric: dict[str, list[Machine]] = {name: [] for name in self._series}
        self._by_event: dict[str, list[Machine]] = {name: [] for name in EVENTS}
        self._always: list[Machine] = []
        self._periodic: list[Machine] = []
        for index, machine in enumerate(self._machines):
            machine.index = index
            machine.reads = [self._series[name] for name in machine.rule.metrics]
            self._subscribe(machine, clocks)
        self._by_event[REPORT] = [*self._by_event["step"], *self._by_event["log"]]
        self._by_event[_LOGGED] = self._by_event["log"]
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._changes = 0
        """Of what is expected of rules."""
        self._step = 0
        self._looked: int | None = None
        """The step at which rules with `every` were looked at before."""

    def _subscribe(self, machine: Machine, clocks: set[str]) -> None:
        rule = machine.rule
        if rule.every is not None:
            self._periodic.append(machine)
        elif rule.on:
            for event in rule.on:
                self._by_event[event].append(machine)
        elif rule.moves_by_itself or not rule.metrics:
            self._always.append(machine)
        else:
            # what moves with every step makes a rule due only if there is nothing else
            names = [name for name in rule.metrics if name not in clocks] or rule.metrics
            for name in names:
                self._by_metric[name].append(machine)

    def observe(
        self, metrics: Mapping[str, object], *, step: int, now: float, event: str = "step"
    ) -> Sequence[Verdict]:
        """Take what came with a step or another event, and tell which rules fired, were cleared or failed.

        `metrics`: by their names in rules; None for what was looked for and is not there. `now`: seconds, from any
        beginning that stays the same when the training is resumed; a clock that goes back stands still. The order of
        verdicts is that of the rules.
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
                    number = number_of(value)
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

    def _checked(self, plan: Plan, step: int, now: float) -> Sequence[Verdict]:
        due = self._with_periodic(plan.due, step, now) if self._periodic else plan.due
        results: list[Value] | None = None
        if due is plan.due:
            try:
                results = [condition() for condition in plan.conditions]
            except Exception:  # noqa: BLE001, S110 - it comes again below, where it is seen whose it is
                pass
            else:
                # Nearly always nothing comes of any rule: then they are not looked at one by one.
                if results == plan.expected and plan.looked_up == self._changes:
                    plan.passed += 1
                    return ()
        found = self._check(due, results, step, now)
        plan.look_up(self._changes)
        return found

    def _check(self, due: list[Machine], results: list[Value] | None, step: int, now: float) -> Sequence[Verdict]:
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
        """Before anything about rules is read or changed."""
        for plan in self._plans.values():
            plan.settle()

    def _plan_of(self, event: str, metrics: Mapping[str, object]) -> Plan:
        """Worked out once for each combination, of which a training has few."""
        again = event is _LOGGED
        names = {*metrics, *(() if again else ("step",))} & self._by_metric.keys()
        found = {machine for name in names for machine in self._by_metric[name]}
        found.update(() if again else self._always, self._by_event.get(event, ()))
        due = sorted((one for one in found if one.errors < MAX_ERRORS), key=lambda machine: machine.index)
        taken = [(name, self._series[name]) for name in metrics if name in self._series]
        plan = Plan(taken, None if again or "step" in metrics else self._series.get("step"), due)
        if len(self._plans) >= MAX_COMBINATIONS:
            self._settle()
            self._plans.clear()
        self._plans[event, *metrics] = plan
        return plan

    def _with_periodic(self, due: list[Machine], step: int, now: float) -> list[Machine]:
        """Besides them, the rules whose `every` is over."""
        found: list[Machine] = []
        before, self._looked = self._looked, step
        for machine in self._periodic:
            every = machine.rule.every
            if every is None or machine.errors >= MAX_ERRORS:
                continue
            if every.measure == "steps":
                # multiples of the period, wherever the training was resumed
                number = step // every.amount
                if machine.due_step is not None:
                    is_due = number > machine.due_step
                elif before is not None:
                    is_due = number > before // every.amount
                else:
                    # what lies behind when a rule comes into force is not made up for
                    is_due = number > 0 and step % every.amount == 0
                if is_due:
                    found.append(machine)
                machine.due_step = number
            elif machine.due_at is None or now >= machine.due_at:
                machine.due_at = now + every.amount
                found.append(machine)
        return sorted((*due, *found), key=lambda machine: machine.index) if found else due

    def statuses(self) -> list[Verdict]:
        """How every rule stands after the newest observation."""
        self._settle()
        step, now = self._step, self._clock.now
        return [self._verdict(machine, machine.state(step, now), "") for machine in self._machines]

    def _verdict(self, machine: Machine, state: State, reason: str) -> Verdict:
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
            measure=machine.hold_period.measure,
            of=machine.hold_of,
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
        """The rules that were never checked, or whose condition is not known now."""
        self._settle()
        return {one.rule.name for one in self._machines if one.truth is None or not one.checks}

    def values(self) -> dict[str, float | None]:
        """The newest value of every metric that a rule reads or tells: what texts are rendered with."""
        return {name: series.current for name, series in self._series.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that later verdicts depend on, as plain JSON."""
        self._settle()
        return {
            "version": STATE_VERSION,
            "document": self.rules.digest,
            "step": self._step,
            "now": encoded(self._clock.now),
            "metrics": {name: series.state() for name, series in self._series.items()},
            "followers": {
                name: {key: follower.state() for key, follower in series.followers.items()}
                for name, series in self._series.items()
            },
            "rules": {machine.rule.name: machine.saved() for machine in self._machines},
        }

    def load_state_dict(self, state: Any) -> list[Carried]:
        """Go on where that was saved, with these rules or others.

        A rule keeps its counters if its name, its expressions, `for`, `on` and `every` are the same; the others begin
        anew, and are told with the reason. One whose mode or actions are others can fire again, with its windows and
        what counts towards `for`; so can one that was disabled, if this is another document. Raises StateError if the
        state is damaged or of another version.
        """
        try:
            if state["version"] != STATE_VERSION:
                raise ValueError("its version is not known")
            self._assemble()
            return self._restored(state)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
            self._assemble()
            raise StateError(f"the state cannot be taken back: {type(error).__name__}: {error}") from error

    def _restored(self, state: Any) -> list[Carried]:
        now, step = decoded(state["now"]), state["step"]
        if now is None or math.isnan(now) or type(step) is not int:
            raise ValueError("step or time is damaged")
        self._clock.now, self._step = now, step
        self._looked = step if now > -math.inf else None
        other = state.get("document", self.rules.digest) != self.rules.digest
        for name, series in self._series.items():
            if name not in state["metrics"]:
                continue
            series.restore(state["metrics"][name])
            saved = state["followers"][name]
            for key, follower in series.followers.items():
                follower.restore(saved.get(key))
        told: list[Carried] = []
        for machine in self._machines:
            name, saved = machine.rule.name, state["rules"].get(machine.rule.name)
            if saved is None:
                told.append(Carried(name, False, "the rule is new"))
            elif saved["identity"] != machine.rule.identity:
                told.append(Carried(name, False, "its condition, 'for', 'on' or 'every' has changed"))
            else:
                machine.restore(saved)
                reason = machine.revised(saved.get("deeds"), elsewhere=other)
                told.append(Carried(name, not reason, reason))
        new = {machine.rule.name for machine in self._machines}
        return told + [Carried(name, False, "the rule is gone") for name in state["rules"] if name not in new]


def _value(reader: Reader) -> float | bool | None:
    try:
        return reader()
    except (ArithmeticError, LookupError, TypeError, ValueError):
        # arithmetic on points can fail so, and in no other way; the rule that reads it has told the error already
        return None


def _next_step(every: Period | None, step: int) -> int | None:
    if every is None or every.measure != "steps":
        return None
    return int((step // every.amount + 1) * every.amount)
