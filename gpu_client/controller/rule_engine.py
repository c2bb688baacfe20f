"""Evaluate the rules in force: observations in, orders and decisions out. The module uses neither clock nor torch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.contract.rules.arithmetic import to_number
from baton.contract.rules.document.actions import NAMES
from baton.contract.rules.document.loader import load
from baton.contract.rules.document.rule import REPORT
from baton.contract.rules.document.rule_placement import split
from baton.contract.rules.engine.rule_evaluator import Evaluator, StateError
from baton.contract.rules.engine.verdicts import State, Verdict
from baton.contract.rules.metrics import BUILT_IN, Reduce, name_in_rules
from baton.contract.rules.numbers import encode
from gpu_client.controller.orders import Order, make_orders

BUDGET_S = 200e-6
"""Mean processor time for each step, in seconds."""
MEASURE_EVERY = 8
"""Observations per measurement, because a measurement costs a system call."""
SAMPLES = 32
"""Measurements per judgement, because other processes may disturb a single measurement."""
MAX_EVERY = 64
MAX_KINDS = 64
"""Maximum number of remembered sets of metric names."""


class EvaluationBudget:
    """Limit of the rules' processor time; expensive rules are checked at fewer steps."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: processor time of this thread, in seconds."""
        self.clock = clock
        self.every = 1
        """Interval of the checks, in steps."""
        self._observations = 0
        self._spent_s = 0.0
        self._samples = 0
        self.checked_steps: dict[frozenset[str], int] = {}
        """The newest checked step, by the set of the report's metrics that rules read."""

    def skips(self, step: int, metrics: Mapping[str, object]) -> bool:
        """Return True if the rules skip this step. Never True for a step with NaN or an infinity.

        Within each interval, the rules check the first step with these metrics, because a loop may report these metrics
        rarely.
        """
        names = frozenset(metrics)
        if len(self.checked_steps) >= MAX_KINDS:
            self.checked_steps.clear()
        before = self.checked_steps.setdefault(names, step if step % self.every else -1)
        if before == -1 or before // self.every != step // self.every:
            self.checked_steps[names] = step
            return False
        return all(
            value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in metrics.values()
        )

    def is_due(self) -> bool:
        """Return True if this observation is measured; called for each evaluated observation.

        With an interval above 1 every observation is measured.
        """
        self._observations += 1
        return self.every > 1 or self._observations % MEASURE_EVERY == 0

    def spent(self, seconds: float) -> str:
        """Add a measurement in seconds. Returns a text about the changed interval, or ""."""
        self._spent_s += seconds
        self._samples += 1
        if self._samples < SAMPLES:
            return ""
        mean_s, self._spent_s, self._samples = self._spent_s / SAMPLES, 0.0, 0
        interval = min(MAX_EVERY, max(1, math.ceil(mean_s / BUDGET_S)))
        # The interval shrinks only with a wide margin, to prevent oscillation.
        if interval == self.every or (interval < self.every and mean_s > self.every * BUDGET_S / 4):
            return ""
        self.every = interval
        at = "every step" if interval == 1 else f"every {interval} steps"
        return f"rules take {mean_s * 1e6:.0f} us (budget {BUDGET_S * 1e6:.0f}): checked at {at} from now on"


log = logging.getLogger("baton.rules")

STATE_VERSION = 1
MAX_STATUS_CHARS = 200
MISSING_AFTER = 200
"""Observations after which a rule with missing metrics is reported."""
MAX_REPORTED = 20
MAX_NAMES = 4096
"""Limit of the known names, for loops that put the step into metric names."""
MAX_COMBINATIONS = 256

_EVENTS = {State.FIRED: "rule.fired", State.CLEARED: "rule.cleared", State.ERROR: "rule.error"}
_PASSED_OVER = frozenset({"step", REPORT})
"""Events that the budget may skip."""
_NO_ORDERS: tuple[Order, ...] = ()

OnDecision = Callable[[dict[str, Any]], object]


class RuleEngine:
    """Rule set with its counters.

    `on_decision` receives each decision: a dictionary with `type`, `rule`, `step`, `operands`, `actions`, `message`.
    """

    def __init__(self, on_decision: OnDecision, budget: EvaluationBudget | None = None) -> None:
        self._on_decision = on_decision
        self._budget = budget or EvaluationBudget()
        self._evaluator: Evaluator | None = None
        self._names: dict[str, str] = {}
        self._canonical: set[tuple[str, ...]] = set()
        """Combinations of names that equal their names in rules."""
        self._usual: tuple[str, ...] = ()
        """Combination of names in the last observation."""
        self._observations = 0
        self._awaited: set[str] = set()
        """Metrics that rules read and that no observation has contained yet."""
        self._reported_missing: set[str] = set()
        """Rules with a report on their missing metrics."""
        self._anew: frozenset[str] = frozenset()
        """Rules whose counters are not from the checkpoint."""
        self.revision = 0
        self.reads: frozenset[str] = frozenset()
        """Metrics that rules read, in conditions and in texts."""
        self.presets_off: frozenset[str] = frozenset()
        """Presets that the document switches off; the agent evaluates presets."""
        self.reducers: Mapping[str, Reduce] = {}
        """Reduction over ranks, by metric that rules read."""

    @property
    def active(self) -> bool:
        """Return True if a rule is in force."""
        return self._evaluator is not None

    def install(self, revision: int, text: str, *, step: int) -> str:
        """Put the rules of the training into force; unchanged rules keep their counters. Never raises.

        Returns "" or the reason for a rejection, which leaves the earlier rules in force.
        """
        try:
            loaded = load(text) if text.strip() else None
            if loaded is not None and loaded.rules is None:
                first = loaded.faults[0]
                place = f"line {first.line}: " if first.line else ""
                return f"{place}{first.field}: {first.reason}. {first.remedy}".strip()
            rules = split(loaded.rules).training if loaded is not None and loaded.rules else None
            evaluator = Evaluator(rules) if rules is not None and rules.rules else None
        except Exception as error:
            log.exception("revision %d of the rules cannot be read", revision)
            return f"rules cannot be read here: {type(error).__name__}: {error}"
        old, self._evaluator = self._evaluator, evaluator
        text = f"revision {revision} is in force"
        if old is not None and evaluator is not None:
            text += _carried(evaluator, old.state_dict())[1]
        self.revision = revision
        self.presets_off = loaded.rules.presets_off if loaded is not None and loaded.rules else frozenset()
        here = evaluator.rules.rules if evaluator is not None else ()
        self.reads = frozenset(name for rule in here for name in (*rule.metrics, *rule.text_metrics))
        known = evaluator.rules.metrics() if evaluator is not None else BUILT_IN
        self.reducers = {name: known[name].reduced_by for name in self.reads if name in known}
        self._observations = 0
        self._awaited, self._reported_missing = self._not_come(), set()
        self._decide("rule.updated", step=step, severity="info", message=text)
        return ""

    def _not_come(self) -> set[str]:
        """Return the metrics without a value that conditions read."""
        if self._evaluator is None:
            return set()
        values, rules = self._evaluator.values(), self._evaluator.rules.rules
        return {name for rule in rules for name in rule.metrics if name != "step" and values.get(name) is None}

    def observe(self, metrics: Mapping[str, object], *, step: int, now: float, event: str = "step") -> Sequence[Order]:
        """Evaluate a step or another event; return the orders. Never raises.

        `metrics`: values by the loop's names. `now`: seconds that continue when a training resumes.
        """
        evaluator = self._evaluator
        if evaluator is None:
            return _NO_ORDERS
        found = self.renamed(metrics)
        budget = self._budget
        if budget.every > 1:
            found = {**found, **(read := self._read(found))}
            if event in _PASSED_OVER and budget.skips(step, read):
                return _NO_ORDERS
        measured = budget.is_due()
        if measured and budget.every == 1 and not all(type(value) is float for value in found.values()):
            # Reading a metric can wait for the GPU, therefore the measured time begins afterwards.
            found = {**found, **self._read(found)}
        began = budget.clock() if measured else 0.0
        verdicts = evaluator.observe(found, step=step, now=now, event=event)
        if measured and (text := budget.spent(budget.clock() - began)):
            self._decide("rule.updated", step=step, message=text)
        if self._awaited:
            self._report_missing_metrics(evaluator, found, step)
        if not verdicts:
            return _NO_ORDERS
        orders: list[Order] = []
        for verdict in verdicts:
            self._record(verdict)
            if verdict.actions:
                orders += make_orders(verdict, self.revision, evaluator.values())
        return orders

    def _read(self, found: Mapping[str, object]) -> dict[str, object]:
        """Convert the metrics that rules read into numbers; other values stay unchanged."""
        read: dict[str, object] = {}
        for name in self.reads & found.keys():
            value = found[name]
            try:
                read[name] = to_number(value)
            except Exception:  # noqa: BLE001 - any object is possible: the evaluator reports the fault
                read[name] = value
        return read

    def renamed(self, metrics: Mapping[str, object]) -> Mapping[str, object]:
        """Return the metrics by their names in rules."""
        given = (*metrics,)
        if given == self._usual:
            return metrics
        if given in self._canonical:
            self._usual = given
            return metrics
        names, found = self._names, {}
        for name, value in metrics.items():
            known = names.get(name)
            if known is None:
                if len(names) >= MAX_NAMES:
                    names.clear()
                    self._canonical.clear()
                known = names[name] = name_in_rules(name)
            found[known] = value
        if (*found,) == given and len(self._canonical) < MAX_COMBINATIONS:
            self._canonical.add(given)
        return found

    def statuses(self) -> list[dict[str, Any]]:
        """Return the status of each rule."""
        if self._evaluator is None:
            return []
        return [
            {
                "rule": one.rule,
                "state": str(one.state),
                "said": one.describe()[:MAX_STATUS_CHARS],
                "fires": one.fires,
            }
            for one in self._evaluator.statuses()
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all rules as plain JSON."""
        return {
            "version": STATE_VERSION,
            "rules": self._evaluator.state_dict() if self._evaluator else None,
            "seen": self._observations,
            "every": self._budget.every,
            "looked": [[sorted(names), step] for names, step in self._budget.checked_steps.items()],
            "unseen_told": sorted(self._reported_missing),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Restore saved counters; report the rules whose counters restart. Never raises."""
        saved = state.get("rules")
        if self._evaluator is None or saved is None:
            return
        self._anew = frozenset(rule.name for rule in self._evaluator.rules.rules)
        if state.get("version") == STATE_VERSION:
            self._anew, text = _carried(self._evaluator, saved)
            self._budget.every = int(state.get("every", 1))
            self._budget.checked_steps = {frozenset(names): int(step) for names, step in state.get("looked", ())}
            self._observations, self._reported_missing = int(state.get("seen", 0)), set(state.get("unseen_told", ()))
            self._awaited = self._not_come()
        else:
            text = "; all counters begin anew: their version is not known"
        if text:
            self._decide("rule.updated", step=step, severity="info", message=f"resumed{text}")

    def is_in_force(self, rule: str, action: str) -> bool:
        """Return True if a rule is unchanged since the checkpoint and still has the action."""
        rules = self._evaluator.rules.rules if self._evaluator is not None else ()
        for one in rules:
            if one.name == rule and one.name not in self._anew and one.mode == "enforce":
                return action in {NAMES[type(each)] for each in one.actions} or (
                    action == "stop" and one.on_error == "stop"
                )
        return False

    def _report_missing_metrics(self, evaluator: Evaluator, found: Mapping[str, object], step: int) -> None:
        """Report each rule with missing metrics once, because such a rule never fires.

        A rule without a due condition stays armed; a checked rule with missing metrics becomes unknown.
        """
        if not self._awaited.isdisjoint(found):
            self._awaited.difference_update([name for name, value in found.items() if value is not None])
        self._observations += 1
        if self._observations % MISSING_AFTER:
            return
        unknown = evaluator.unknown() - self._reported_missing
        reported = ", ".join(sorted(set(self._names.values()))[:MAX_REPORTED]) or "nothing"
        for rule in evaluator.rules.rules:
            missing = sorted(self._awaited.intersection(rule.metrics))
            if missing and rule.name in unknown:
                self._reported_missing.add(rule.name)
                text = (
                    f"not known after {self._observations} steps: {', '.join(missing)}; the training reports {reported}"
                )
                self._decide("rule.unevaluable", rule=rule.name, step=step, message=text)

    def _record(self, verdict: Verdict) -> None:
        self._decide(
            _EVENTS[verdict.state],
            rule=verdict.rule,
            step=verdict.step,
            severity=verdict.severity,
            dry_run=verdict.mode == "dry_run",
            operands={one.text: encode(one.value) for one in verdict.operands},
            actions=[order.action for order in make_orders(verdict._replace(mode="enforce"), 0, {})],
            message=verdict.reason,
        )

    def _decide(self, type_: str, *, step: int, **more: Any) -> None:
        self._on_decision({"type": type_, "revision": self.revision, "step": step, **more})


def _carried(evaluator: Evaluator, state: Any) -> tuple[frozenset[str], str]:
    """Restore the counters. Returns the rules with new counters, and the end of a sentence about these rules."""
    try:
        anew = {one.rule: f"{one.rule} ({one.reason})" for one in evaluator.load_state_dict(state) if not one.kept}
    except StateError as error:
        return frozenset(rule.name for rule in evaluator.rules.rules), f"; all counters begin anew: {error}"
    return frozenset(anew), f"; counters begin anew: {', '.join(anew.values())}" if anew else ""
