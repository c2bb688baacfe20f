"""A rule as it was read and checked, and a set of them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Literal, NamedTuple

from baton.contract.rules.document.actions import NAMES, Action, Alert, Log
from baton.contract.rules.document.durations import ONE_CHECK, Hold, Period
from baton.contract.rules.language.typed_ast import Aggregate, Grouped, Typed, metrics_of, moves_by_itself, walk
from baton.contract.rules.limits import LIMITS, Limits
from baton.contract.rules.metrics import SIGNALS, Metric, Metrics

EVENTS = ("start", "step", "log", "evaluate", "save", "epoch", "end", "heartbeat", "timer", "state")
"""What an observation can be: of the training, then of the control plane."""
CONTROL_PLANE_EVENTS = frozenset(EVENTS[-3:])
REPORT = "report"
"""What an observation can be besides: a `step` and a `log` at once, of loops that report numbers with each step."""

Severity = Literal["info", "warning", "error"]
Mode = Literal["enforce", "dry_run"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a document says of one rule, with its expressions checked."""

    name: str
    when: Typed
    clear: Typed | None = None
    on: frozenset[str] = frozenset()
    """Events at which it is checked; without them and `every`, whenever one of its metrics has a new value."""
    every: Period | None = None
    hold: Hold = ONE_CHECK
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
        """Those that its expressions read."""
        cleared = metrics_of(self.clear) if self.clear is not None else []
        return tuple(dict.fromkeys((*metrics_of(self.when), *cleared)))

    @property
    def told(self) -> tuple[str, ...]:
        """The metrics that its texts name."""
        texts = [action.text for action in self.actions if isinstance(action, Log | Alert)]
        return tuple(dict.fromkeys(field.metric for text in texts for field in text.fields))

    @property
    def moves_by_itself(self) -> bool:
        """Whether its expressions may change without a new value."""
        return moves_by_itself(self.when) or (self.clear is not None and moves_by_itself(self.clear))

    @property
    def identity(self) -> str:
        """The same for two rules whose counters mean the same."""
        cleared = self.clear.text if self.clear is not None else ""
        checked = ",".join(sorted(self.on)) or str(self.every or "")
        return _digest(self.when.text, cleared, str(self.hold), checked, *self._goals())

    def _goals(self) -> list[str]:
        """Which values are better, where its expressions ask for that: a metric's declaration may say so alone."""
        parts = [part for one in (self.when, self.clear) if one is not None for part in walk(one)]
        asked = {
            part.text: part.summary.goal if isinstance(part, Aggregate) else part.goal
            for part in parts
            if isinstance(part, (Aggregate, Grouped))
        }
        return [f"{text} {goal}" for text, goal in asked.items() if goal is not None]

    @property
    def deeds(self) -> str:
        """The same for two rules that do the same when they fire."""
        return _digest(self.mode, *map(_said, self.actions))


def _said(action: Action) -> str:
    """With what is not as if left out: a parameter that only later versions know changes nothing here."""
    values = asdict(action)
    given = [(one.name, values[one.name]) for one in fields(action) if values[one.name] != one.default]
    return f"{NAMES[type(action)]} {given}"


def _digest(*said: str) -> str:
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


class Signal(NamedTuple):
    """A text that is counted in what the training prints: the metric `log.<name>`."""

    name: str
    text: str

    @property
    def metric(self) -> Metric:
        """How many lines of the attempt had it."""
        meaning = "lines of the attempt that had the text"
        return Metric(SIGNALS + self.name, goal="min", low=0, meaning=meaning, control_plane=True)


class RuleSet(NamedTuple):
    """All rules of a document, and the metrics that it declares."""

    rules: tuple[Rule, ...] = ()
    declared: tuple[Metric, ...] = ()
    limits: Limits = LIMITS
    signals: tuple[Signal, ...] = ()
    presets_off: frozenset[str] = frozenset()
    """Those that are not to tell anything."""
    digest: str = ""
    """Of the document's text: another revision has another."""

    def metrics(self) -> Metrics:
        """What its rules may name."""
        return Metrics((*self.declared, *(signal.metric for signal in self.signals)))
