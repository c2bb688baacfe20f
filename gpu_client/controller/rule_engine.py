"""Rules in force: observations in, orders and decisions out. No clock, no process, no torch in here."""

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
from baton.contract.rules.engine.evaluator import Evaluator, StateError
from baton.contract.rules.engine.verdicts import State, Verdict
from baton.contract.rules.metrics import BUILT_IN, Reduce, name_in_rules
from baton.contract.rules.numbers import encode
from gpu_client.controller.orders import Order, orders_of

BUDGET_S = 200e-6
"""Of processor time, for each step in the mean."""
MEASURE_EVERY = 8
"""Observations: measuring costs a system call."""
SAMPLES = 32
"""After so many measurements it is judged: one that was interrupted says nothing."""
MAX_EVERY = 64
MAX_KINDS = 64
"""Of reports, by what they have."""


class Budget:
    """Watches how long observations take. What it has slowed down it lets go on as before once there is room."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: seconds of processor time of this thread; others on the machine do not count."""
        self.clock = clock
        self.every = 1
        """Rules are checked at each so many steps."""
        self._seen = 0
        self._spent_s = 0.0
        self._samples = 0
        self.looked: dict[frozenset[str], int] = {}
        """The newest step that was looked at, by what it had of what rules read."""

    def passes_over(self, step: int, metrics: Mapping[str, object]) -> bool:
        """Whether this step is left out. Never one with a value that is not finite: it may be the only one.

        Of so many steps in a row the first that has these metrics is looked at: a loop may report them seldom.
        """
        names = frozenset(metrics)
        if len(self.looked) >= MAX_KINDS:
            self.looked.clear()
        before = self.looked.setdefault(names, step if step % self.every else -1)
        if before == -1 or before // self.every != step // self.every:
            self.looked[names] = step
            return False
        return all(
            value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in metrics.values()
        )

    def is_due(self) -> bool:
        """Whether this observation is to be measured; called once for each that is not left out.

        All of the few that are left are.
        """
        self._seen += 1
        return self.every > 1 or self._seen % MEASURE_EVERY == 0

    def spent(self, seconds: float) -> str:
        """So long an observation took; what is changed therefore, in words."""
        self._spent_s += seconds
        self._samples += 1
        if self._samples < SAMPLES:
            return ""
        mean_s, self._spent_s, self._samples = self._spent_s / SAMPLES, 0.0, 0
        wanted = min(MAX_EVERY, max(1, math.ceil(mean_s / BUDGET_S)))
        # More often again only where there is plenty of room: no going to and fro.
        if wanted == self.every or (wanted < self.every and mean_s > self.every * BUDGET_S / 4):
            return ""
        self.every = wanted
        at = "every step" if wanted == 1 else f"every {wanted} steps"
        return f"rules take {mean_s * 1e6:.0f} us (budget {BUDGET_S * 1e6:.0f}): checked at {at} from now on"


log = logging.getLogger("baton.rules")

STATE_VERSION = 1
MAX_STATUS_CHARS = 200
UNSEEN_AFTER = 200
"""Observations after which it is said of a rule that what it reads has never come."""
MAX_REPORTED = 20
MAX_NAMES = 4096
"""A loop that puts the step into its metrics' names has a new one at every step."""
MAX_COMBINATIONS = 256

_EVENTS = {State.FIRED: "rule.fired", State.CLEARED: "rule.cleared", State.ERROR: "rule.error"}
_PASSED_OVER = frozenset({"step", REPORT})
"""At some steps, where rules take too long."""
_NO_ORDERS: tuple[Order, ...] = ()

Tell = Callable[[dict[str, Any]], object]


class Engine:
    """One rule set at a time, with its counters.

    `tell` is called with each decision: a dictionary with `type`, `rule`, `step`, `operands`, `actions`, `message`.
    """

    def __init__(self, tell: Tell, budget: Budget | None = None) -> None:
        self._tell = tell
        self._budget = budget or Budget()
        self._evaluator: Evaluator | None = None
        self._names: dict[str, str] = {}
        self._canonical: set[tuple[str, ...]] = set()
        """Combinations of names that are the same in rules."""
        self._usual: tuple[str, ...] = ()
        """The one that came last."""
        self._seen = 0
        self._awaited: set[str] = set()
        """Metrics that rules read and that have not come yet."""
        self._unseen_told: set[str] = set()
        """Rules of which that was told."""
        self._anew: frozenset[str] = frozenset()
        """Rules whose counters a checkpoint did not have."""
        self.revision = 0
        self.reads: frozenset[str] = frozenset()
        """The metrics that rules read, in conditions and in texts."""
        self.presets_off: frozenset[str] = frozenset()
        """Those that the document switches off; the agent evaluates them."""
        self.reducers: Mapping[str, Reduce] = {}
        """How the values of several processes become one, of those that rules read."""

    @property
    def active(self) -> bool:
        """Whether there is a rule."""
        return self._evaluator is not None

    def install(self, revision: int, text: str, *, step: int) -> str:
        """Put these rules into force, but for the control plane's; what is unchanged in them keeps its counters.

        Answers with the reason why they cannot be; those before stay in force then. Never raises.
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
        told = f"revision {revision} is in force"
        if old is not None and evaluator is not None:
            told += _carried(evaluator, old.state_dict())[1]
        self.revision = revision
        self.presets_off = loaded.rules.presets_off if loaded is not None and loaded.rules else frozenset()
        here = evaluator.rules.rules if evaluator is not None else ()
        self.reads = frozenset(name for rule in here for name in (*rule.metrics, *rule.text_metrics))
        known = evaluator.rules.metrics() if evaluator is not None else BUILT_IN
        self.reducers = {name: known[name].reduced_by for name in self.reads if name in known}
        self._seen = 0
        self._awaited, self._unseen_told = self._not_come(), set()
        self._decide("rule.updated", step=step, severity="info", message=told)
        return ""

    def _not_come(self) -> set[str]:
        """Metrics that conditions read and that the evaluator knows nothing of yet."""
        if self._evaluator is None:
            return set()
        values, rules = self._evaluator.values(), self._evaluator.rules.rules
        return {name for rule in rules for name in rule.metrics if name != "step" and values.get(name) is None}

    def observe(self, metrics: Mapping[str, object], *, step: int, now: float, event: str = "step") -> Sequence[Order]:
        """Look at what came with a step or another event; what is to be done about it. Never raises.

        `metrics` by the names that the loop uses. `now`: seconds, which go on where they were when a training resumes.
        """
        evaluator = self._evaluator
        if evaluator is None:
            return _NO_ORDERS
        found = self.renamed(metrics)
        budget = self._budget
        if budget.every > 1:
            found = {**found, **(read := self._read(found))}
            if event in _PASSED_OVER and budget.passes_over(step, read):
                return _NO_ORDERS
        measured = budget.is_due()
        if measured and budget.every == 1 and not all(type(value) is float for value in found.values()):
            # Ahead of it, for it may wait for the GPU: that is no fault of the rules.
            found = {**found, **self._read(found)}
        began = budget.clock() if measured else 0.0
        verdicts = evaluator.observe(found, step=step, now=now, event=event)
        if measured and (told := budget.spent(budget.clock() - began)):
            self._decide("rule.updated", step=step, message=told)
        if self._awaited:
            self._look_for_unseen(evaluator, found, step)
        if not verdicts:
            return _NO_ORDERS
        orders: list[Order] = []
        for verdict in verdicts:
            self._record(verdict)
            if verdict.actions:
                orders += orders_of(verdict, self.revision, evaluator.values())
        return orders

    def _read(self, found: Mapping[str, object]) -> dict[str, object]:
        """What rules read of it, as plain numbers; what is none stays as it is."""
        read: dict[str, object] = {}
        for name in self.reads & found.keys():
            value = found[name]
            try:
                read[name] = to_number(value)
            except Exception:  # noqa: BLE001 - any object at all: the evaluator says what is wrong with it
                read[name] = value
        return read

    def renamed(self, metrics: Mapping[str, object]) -> Mapping[str, object]:
        """By their names in rules."""
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
        """How each rule stands, in words."""
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
        """Everything that later decisions depend on, as plain JSON."""
        return {
            "version": STATE_VERSION,
            "rules": self._evaluator.state_dict() if self._evaluator else None,
            "seen": self._seen,
            "every": self._budget.every,
            "looked": [[sorted(names), looked] for names, looked in self._budget.looked.items()],
            "unseen_told": sorted(self._unseen_told),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Go on where that was saved. What cannot be taken back is told, and begins anew. Never raises."""
        saved = state.get("rules")
        if self._evaluator is None or saved is None:
            return
        self._anew = frozenset(rule.name for rule in self._evaluator.rules.rules)
        if state.get("version") == STATE_VERSION:
            self._anew, told = _carried(self._evaluator, saved)
            self._budget.every = int(state.get("every", 1))
            self._budget.looked = {frozenset(names): int(looked) for names, looked in state.get("looked", ())}
            self._seen, self._unseen_told = int(state.get("seen", 0)), set(state.get("unseen_told", ()))
            self._awaited = self._not_come()
        else:
            told = "; all counters begin anew: their version is not known"
        if told:
            self._decide("rule.updated", step=step, severity="info", message=f"resumed{told}")

    def wants(self, rule: str, action: str) -> bool:
        """Whether that rule is in force as it was in the checkpoint, and still does that."""
        rules = self._evaluator.rules.rules if self._evaluator is not None else ()
        for one in rules:
            if one.name == rule and one.name not in self._anew and one.mode == "enforce":
                return action in {NAMES[type(each)] for each in one.actions} or (
                    action == "stop" and one.on_error == "stop"
                )
        return False

    def _look_for_unseen(self, evaluator: Evaluator, found: Mapping[str, object], step: int) -> None:
        """Rules whose metrics never come would be silent for ever: say so once, however they stand.

        A rule that nothing has made due stays armed, and one that was checked without them is unknown.
        """
        if not self._awaited.isdisjoint(found):
            self._awaited.difference_update([name for name, value in found.items() if value is not None])
        self._seen += 1
        if self._seen % UNSEEN_AFTER:
            return
        unknown = evaluator.unknown() - self._unseen_told
        reported = ", ".join(sorted(set(self._names.values()))[:MAX_REPORTED]) or "nothing"
        for rule in evaluator.rules.rules:
            missing = sorted(self._awaited.intersection(rule.metrics))
            if missing and rule.name in unknown:
                self._unseen_told.add(rule.name)
                told = f"not known after {self._seen} steps: {', '.join(missing)}; the training reports {reported}"
                self._decide("rule.unevaluable", rule=rule.name, step=step, message=told)

    def _record(self, verdict: Verdict) -> None:
        self._decide(
            _EVENTS[verdict.state],
            rule=verdict.rule,
            step=verdict.step,
            severity=verdict.severity,
            dry_run=verdict.mode == "dry_run",
            operands={one.text: encode(one.value) for one in verdict.operands},
            actions=[order.action for order in orders_of(verdict._replace(mode="enforce"), 0, {})],
            message=verdict.reason,
        )

    def _decide(self, type_: str, *, step: int, **more: Any) -> None:
        self._tell({"type": type_, "revision": self.revision, "step": step, **more})


def _carried(evaluator: Evaluator, state: Any) -> tuple[frozenset[str], str]:
    """Take the counters over; which begin anew, and that as the end of a sentence."""
    try:
        anew = {one.rule: f"{one.rule} ({one.reason})" for one in evaluator.load_state_dict(state) if not one.kept}
    except StateError as error:
        return frozenset(rule.name for rule in evaluator.rules.rules), f"; all counters begin anew: {error}"
    return frozenset(anew), f"; counters begin anew: {', '.join(anew.values())}" if anew else ""
