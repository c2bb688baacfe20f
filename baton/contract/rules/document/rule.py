"""Records of checked rules and rule sets."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Literal, NamedTuple

from baton.contract.rules.document.actions import NAMES, Action, Alert, Log
from baton.contract.rules.document.durations import ONE_CHECK, PendingPeriod, Period
from baton.contract.rules.language.typed_ast import Aggregate, Grouped, Typed, find_metrics, is_time_dependent, walk
from baton.contract.rules.limits import LIMITS, Limits
from baton.contract.rules.metrics import SIGNALS, Metric, MetricCatalog

EVENTS = ("start", "step", "log", "evaluate", "save", "epoch", "end", "heartbeat", "timer", "state")
"""Events of the training, then (last three) of the control plane."""
CONTROL_PLANE_EVENTS = frozenset(EVENTS[-3:])
REPORT = "report"
"""Observation event that is a `step` and a `log` at once, for loops that report numbers with each step."""

Severity = Literal["info", "warning", "error"]
Mode = Literal["enforce", "dry_run"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of a document, with its expressions checked."""

    name: str
    when: Typed
    clear: Typed | None = None
    on: frozenset[str] = frozenset()
    """Events that check the rule. Without `on` and `every`, a new value of one of its metrics does."""
    every: Period | None = None
    pending: PendingPeriod = ONE_CHECK
    warmup: Period | None = None
    cooldown: Period | None = None
    max_fires: int | None = None
    actions: tuple[Action, ...] = ()
    severity: Severity = "warning"
    mode: Mode = "enforce"
    on_error: Literal["ignore", "stop"] = "ignore"
    description: str = ""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that its expressions read."""
        cleared = find_metrics(self.clear) if self.clear is not None else []
        return tuple(dict.fromkeys((*find_metrics(self.when), *cleared)))

    @property
    def text_metrics(self) -> tuple[str, ...]:
        """Metrics that its texts name."""
        texts = [action.text for action in self.actions if isinstance(action, Log | Alert)]
        return tuple(dict.fromkeys(field.metric for text in texts for field in text.fields))

    @property
    def is_time_dependent(self) -> bool:
        """Return True if the rule's expressions can change without a new point."""
        return is_time_dependent(self.when) or (self.clear is not None and is_time_dependent(self.clear))

    @property
    def identity(self) -> str:
        """Digest that is equal for two rules whose counters have the same meaning."""
        cleared = self.clear.text if self.clear is not None else ""
        checked = ",".join(sorted(self.on)) or str(self.every or "")
        return _digest(self.when.text, cleared, str(self.pending), checked, *self._goals())

    def _goals(self) -> list[str]:
        """List the goals that its expressions use, since a metric's declaration can change a goal without changing the
        text.
        """
        parts = [part for one in (self.when, self.clear) if one is not None for part in walk(one)]
        asked = {
            part.text: part.summary.goal if isinstance(part, Aggregate) else part.goal
            for part in parts
            if isinstance(part, (Aggregate, Grouped))
        }
        return [f"{text} {goal}" for text, goal in asked.items() if goal is not None]

    @property
    def action_identity(self) -> str:
        """Digest that is equal for two rules with the same actions and mode."""
        return _digest(self.mode, *map(_format_action, self.actions))


def _format_action(action: Action) -> str:
    """Format an action without default values, so that a parameter added in a later version keeps the digest."""
    values = asdict(action)
    given = [(one.name, values[one.name]) for one in fields(action) if values[one.name] != one.default]
    return f"{NAMES[type(action)]} {given}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class Signal(NamedTuple):
    """A text to count in the log: the metric `log.<name>`."""

    name: str
    text: str

    @property
    def metric(self) -> Metric:
        """Metric that counts the lines of the attempt with the text."""
        meaning = "lines of the attempt that had the text"
        return Metric(SIGNALS + self.name, goal="min", low=0, meaning=meaning, control_plane=True)


class RuleSet(NamedTuple):
    """All rules of a document, with the metrics that it declares."""

    rules: tuple[Rule, ...] = ()
    declared: tuple[Metric, ...] = ()
    limits: Limits = LIMITS
    signals: tuple[Signal, ...] = ()
    presets_off: frozenset[str] = frozenset()
    """Names of the disabled presets."""
    digest: str = ""
    """Digest of the document's text; it differs between revisions."""

    def metrics(self) -> MetricCatalog:
        """Return the metrics that its rules may name."""
        return MetricCatalog((*self.declared, *(signal.metric for signal in self.signals)))
