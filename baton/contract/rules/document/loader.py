"""Loader: a document becomes checked rules, or a list of faults with place and remedy."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from baton.contract.errors import Fault
from baton.contract.rules.document.action_reader import read_action
from baton.contract.rules.document.durations import (
    MAX_CHECKS_OF,
    ONE_CHECK,
    Measure,
    Period,
    parse_pending_period,
    parse_period,
)
from baton.contract.rules.document.lint import TrainingBounds, lint_rule
from baton.contract.rules.document.presets import NAMES as PRESETS
from baton.contract.rules.document.rule import EVENTS, Rule, RuleSet, Signal
from baton.contract.rules.document.rule_placement import check_placement, collect_group_values
from baton.contract.rules.language.checker import Checked, check_condition
from baton.contract.rules.language.faults import Code, suggest_name
from baton.contract.rules.language.typed_ast import Aggregate, Typed, walk
from baton.contract.rules.limits import LIMITS, Limits
from baton.contract.rules.metrics import BUILT_IN, REDUCES, SIGNALS, Kind, Metric, MetricCatalog, explain_doubt, is_name
from baton.contract.yaml_documents import Document, Location, read_document

MAX_ACTIONS = 16
MAX_FIRES = 10**9
_RULE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEYS = ("version", "presets", "metrics", "signals", "rules")
_METRIC_KEYS = ("kind", "goal", "unit", "reduce")
_RULE_KEYS = (
    "name", "description", "when", "on", "every", "for", "warmup", "cooldown", "once", "max_fires", "clear", "do",
    "severity", "mode", "on_error",
)  # fmt: skip
_CHOICES = {
    "severity": ("info", "warning", "error"),
    "mode": ("enforce", "dry_run"),
    "on_error": ("ignore", "stop"),
}
_SWITCHES = ("on", "off", True, False)


class Loaded(NamedTuple):
    """Result of loading: `rules` is None if there are faults; warnings leave the rules usable."""

    rules: RuleSet | None
    faults: list[Fault]
    warnings: list[Fault]


def load(
    text: str,
    *,
    reported: Iterable[str] | None = None,
    max_steps: int | None = None,
    max_silence_s: float | None = None,
    limits: Limits = LIMITS,
    presets: bool = False,
) -> Loaded:
    """Load a document in YAML or JSON. Never raises.

    `reported`: all metrics that the training reports; any other name is a fault. `max_steps` and `max_silence_s`
    (steps of the training, greatest age of a heartbeat in seconds) enable warnings about rules that exceed them.
    `presets`: the document is that of the presets, whose names are reserved otherwise.
    """
    document = read_document(text)
    if document.faults and not document.too_large and text.lstrip()[:1] == "{":
        # YAML forbids the tabs of some JSON, therefore parse JSON itself; its faults have no place.
        try:
            document = Document(value=json.loads(text))
        except (ValueError, RecursionError):
            return Loaded(None, _coded(document.faults, Code.UNREADABLE), [])
    if document.faults:
        return Loaded(None, _coded(document.faults, Code.UNREADABLE), [])
    reach = TrainingBounds(max_steps, max_silence_s=max_silence_s)
    loaded = _DocumentReader(document, reported, reach, limits, () if presets else PRESETS).loaded()
    if loaded.rules is None:
        return loaded
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return loaded._replace(rules=loaded.rules._replace(digest=digest))


def load_values(
    value: Any, *, reported: Iterable[str] | None = None, max_steps: int | None = None, limits: Limits = LIMITS
) -> Loaded:
    """Load a document from plain JSON values; its faults have no place."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return Loaded(None, [Fault("", "is not plain JSON", "Send a JSON object.", code=Code.UNREADABLE)], [])
    loaded = load(text, reported=reported, max_steps=max_steps, limits=limits)
    plain = [[one._replace(line=None, column=None) for one in found] for found in loaded[1:]]
    return Loaded(loaded.rules, *plain)


def _coded(faults: Iterable[Fault], code: Code) -> list[Fault]:
    return [fault if fault.code else fault._replace(code=code) for fault in faults]


def _ordered(faults: Iterable[Fault]) -> list[Fault]:
    return sorted(dict.fromkeys(faults), key=lambda fault: (fault.line or 0, fault.column or 0, fault.field))


class _DocumentReader:
    def __init__(
        self,
        document: Document,
        reported: Iterable[str] | None,
        reach: TrainingBounds,
        limits: Limits,
        taken: tuple[str, ...],
    ) -> None:
        """Create a reader; `taken` lists reserved rule names."""
        self._document = document
        self._taken = taken
        self._reported = reported
        self._limits = limits
        self._reach = reach
        self._warnings = Document(places=document.places, texts=document.texts)
        self._metrics = MetricCatalog(reported=reported)

    def loaded(self) -> Loaded:
        value = self._document.value
        if not isinstance(value, dict):
            self._fault((), "this is no rule document", "Write 'rules:' and a list.", Code.WRONG_SHAPE)
            return self._result(None)
        self._unknown_keys((), value, _KEYS)
        if type(value.get("version", 1)) is not int or value.get("version", 1) != 1:
            self._fault(("version",), "the version is not known", "Write 'version: 1'.", Code.INVALID_VALUE)
        declared = self._declared(value.get("metrics"))
        signals = read_signals(self._document, value.get("signals"), {metric.name for metric in declared})
        known = (*declared, *(signal.metric for signal in signals))
        self._metrics = MetricCatalog(known, reported=self._reported)
        self._reach = self._reach._replace(metrics=self._metrics)
        if "rules" not in value:
            self._fault((), "'rules' is missing", "Write 'rules:' and a list.", Code.MISSING_KEY)
        entry = value.get("rules", [])
        if not isinstance(entry, list):
            self._fault(("rules",), "is no list", "Begin each rule with '- name: ...'.", Code.WRONG_SHAPE)
            entry = []
        if len(entry) > self._limits.rules:
            reason = f"there are {len(entry)} rules; at most {self._limits.rules} are allowed"
            self._fault(("rules",), reason, "Leave some out.", Code.TOO_LARGE)
            return self._result(None)
        rules = [self._rule(("rules", number), one) for number, one in enumerate(entry)]
        self._check_duplicate_names(entry)
        kept = tuple(rule for rule in rules if rule is not None)
        off = self._presets_off(value.get("presets", True))
        found = RuleSet(kept, tuple(declared), self._limits, tuple(signals), off)
        self._check_memory(found)
        return self._result(found)

    def _result(self, rules: RuleSet | None) -> Loaded:
        faults = _coded(self._document.faults, Code.INVALID_VALUE)
        return Loaded(None if faults else rules, _ordered(faults), _ordered(self._warnings.faults))

    def _fault(self, location: Location, reason: str, remedy: str, code: Code) -> None:
        self._document.fault(location, reason, remedy, code=code)

    def _unknown_keys(self, location: Location, value: Mapping[str, Any], known: Iterable[str]) -> None:
        for key in value:
            if key not in known:
                self._fault((*location, key), "is not a key here", suggest_name(key, known), Code.UNKNOWN_KEY)

    def _declared(self, entry: Any) -> list[Metric]:
        if entry is None:
            return []
        if not isinstance(entry, dict):
            remedy = "Write 'my.metric: {goal: max}'."
            self._fault(("metrics",), "is no mapping of metrics", remedy, Code.WRONG_SHAPE)
            return []
        return [metric for name, about in entry.items() if (metric := self._metric(name, about)) is not None]

    def _metric(self, name: str, about: Any) -> Metric | None:
        location: Location = ("metrics", name)
        about = {} if about is None else about
        if not isinstance(about, dict):
            self._fault(location, "is no mapping", "Write '{goal: max}' or '{kind: bool}'.", Code.WRONG_SHAPE)
            return None
        self._unknown_keys(location, about, _METRIC_KEYS)
        if not is_name(name):
            remedy = "Write letters, digits and '_', joined by '.': eval.f1_macro."
            self._fault(location, "cannot be a metric's name", remedy, Code.INVALID_VALUE)
            return None
        if name in BUILT_IN:
            self._fault(location, "is built in", "Leave it out, or choose another name.", Code.DUPLICATE_NAME)
            return None
        kind, goal, unit = about.get("kind", "number"), about.get("goal"), about.get("unit", "")
        if kind not in tuple(Kind) or goal not in (None, "min", "max") or not isinstance(unit, str):
            remedy = "There are kind (number, duration, size, bool), goal (min, max) and unit (a text)."
            self._fault(location, "has an invalid declaration", remedy, Code.INVALID_VALUE)
            return None
        reduce = about.get("reduce")
        if reduce not in (None, *REDUCES):
            remedy = (
                f"Write {', '.join(REDUCES[:-1])} or {REDUCES[-1]}: what becomes of the values of several processes."
            )
            self._fault((*location, "reduce"), "cannot be that", remedy, Code.INVALID_VALUE)
            return None
        return Metric(name, Kind(kind), unit[:16], goal, reduce=reduce)

    def _presets_off(self, entry: Any) -> frozenset[str]:
        """Read `presets: off` or `presets: {preset-stuck: off}`."""
        switches = entry if isinstance(entry, dict) else dict.fromkeys(PRESETS, entry)
        for name, switch in switches.items():
            place: Location = ("presets", name) if isinstance(entry, dict) else ("presets",)
            if name not in PRESETS:
                self._fault(place, f"there is no preset {name[:63]!r}", suggest_name(name, PRESETS), Code.UNKNOWN_KEY)
            if not isinstance(switch, (str, bool)) or switch not in _SWITCHES:
                remedy = "Write 'presets: off', or 'presets: {preset-stuck: off}'."
                self._fault(place, "is neither on nor off", remedy, Code.INVALID_VALUE)
                break
        return frozenset(name for name, switch in switches.items() if switch is False or switch == "off")

    def _rule(self, location: Location, entry: Any) -> Rule | None:
        if not isinstance(entry, dict):
            self._fault(location, "is no rule", "Write 'name:', 'when:' and 'do:'.", Code.WRONG_SHAPE)
            return None
        before = len(self._document.faults)
        self._unknown_keys(location, entry, _RULE_KEYS)
        name = self._name(location, entry)
        when, clear = self._expression(location, entry, "when"), self._expression(location, entry, "clear")
        on, every = self._due(location, entry)
        more: dict[str, Any] = {key: self._choice(location, entry, key) for key in _CHOICES if key in entry}
        more["pending"] = self._pending(location, entry)
        more["warmup"] = self._period(location, entry, "warmup", "steps", "seconds", "checks")
        more["cooldown"] = self._period(location, entry, "cooldown", "steps", "seconds", "checks")
        more["max_fires"] = self._max_fires(location, entry)
        more["actions"] = self._actions(location, entry)
        if not isinstance(entry.get("description", ""), str):
            self._fault((*location, "description"), "is no text", "Put it into quotes.", Code.INVALID_VALUE)
        if len(self._document.faults) > before or when is None:
            return None
        more["description"] = entry.get("description", "")[:500]
        rule = Rule(name, when, clear, on=on, every=every, **more)
        lint_rule(rule, self._reach, location, self._warnings)
        for name in rule.text_metrics:
            if name not in self._metrics and (doubt := explain_doubt(name, self._metrics)):
                self._warnings.fault((*location, "do"), *doubt, code=Code.DOUBTFUL_NAME)
        check_placement(rule, self._metrics, location, self._document, self._warnings)
        return rule

    def _name(self, location: Location, entry: Mapping[str, Any]) -> str:
        name = entry.get("name")
        if name is None:
            self._fault(location, "has no name", "Add 'name: ...'.", Code.MISSING_KEY)
        elif not isinstance(name, str) or not _RULE_NAME.fullmatch(name):
            remedy = "Use up to 63 lower-case letters, digits, '-' and '_', a letter or digit first."
            self._fault((*location, "name"), "cannot be a rule's name", remedy, Code.INVALID_VALUE)
        elif name in self._taken:
            remedy = f"Choose another name; 'presets: {{{name}: off}}' switches that one off."
            self._fault((*location, "name"), "is the name of a preset", remedy, Code.DUPLICATE_NAME)
        return str(name)

    def _expression(self, location: Location, entry: Mapping[str, Any], key: str) -> Typed | None:
        place = (*location, key)
        if key not in entry:
            if key == "when":
                self._fault(location, "has no condition", "Add 'when: loss > 4'.", Code.MISSING_KEY)
            return None
        text = entry[key]
        if isinstance(text, bool):
            text = "true" if text else "false"
        if not isinstance(text, str):
            self._fault(place, "is no expression", "Write one like loss > 4.", Code.WRONG_SHAPE)
            return None
        checked: Checked = check_condition(text, self._metrics, self._limits)
        for error in checked.faults:
            self._document.text_fault(place, error.offset, error.reason, error.remedy, code=error.code)
        for doubt in checked.doubts:
            self._warnings.text_fault(place, doubt.offset, doubt.reason, doubt.remedy, code=doubt.code)
        return checked.typed

    def _due(self, location: Location, entry: Mapping[str, Any]) -> tuple[frozenset[str], Period | None]:
        if "on" in entry and "every" in entry:
            remedy = "Leave out one of them."
            self._fault((*location, "every"), "'on' and 'every' exclude each other", remedy, Code.CONFLICT)
        every = self._period(location, entry, "every", "steps", "seconds")
        if every is not None and every.amount == 0:
            self._fault((*location, "every"), "is zero", "Write '1 step' or more.", Code.INVALID_VALUE)
        events = entry.get("on", [])
        events = [events] if isinstance(events, str) else events
        if not isinstance(events, list) or ("on" in entry and not events):
            remedy = f"Write one or a list of {', '.join(EVENTS)}."
            self._fault((*location, "on"), "names no event", remedy, Code.WRONG_SHAPE)
            return frozenset(), every
        for number, event in enumerate(events):
            if event not in EVENTS:
                place = (*location, "on", number) if isinstance(entry["on"], list) else (*location, "on")
                self._fault(
                    place,
                    f"there is no event {str(event)[:40]!r}",
                    suggest_name(str(event), EVENTS),
                    Code.UNKNOWN_EVENT,
                )
        return frozenset(event for event in events if isinstance(event, str)), every

    def _period(self, location: Location, entry: Mapping[str, Any], key: str, *measures: Measure) -> Period | None:
        if key not in entry:
            return None
        period = parse_period(entry[key], *measures)
        if period is None:
            words = {"checks": "'3 checks'", "steps": "'200 steps'", "seconds": "'10m'"}
            remedy = f"Write it like {' or '.join(words[measure] for measure in measures)}."
            self._fault((*location, key), "is no valid period", remedy, Code.INVALID_VALUE)
        return period

    def _pending(self, location: Location, entry: Mapping[str, Any]) -> Any:
        pending = parse_pending_period(entry["for"]) if "for" in entry else ONE_CHECK
        if pending is None:
            remedy = f"Write '3 checks', '200 steps', '10m', '3 of 5' (of at most {MAX_CHECKS_OF}) or '3 of all'."
            self._fault((*location, "for"), "is no valid period", remedy, Code.INVALID_VALUE)
        return pending

    def _choice(self, location: Location, entry: Mapping[str, Any], key: str) -> Any:
        if entry[key] not in _CHOICES[key]:
            remedy = f"Write {' or '.join(_CHOICES[key])}."
            self._fault((*location, key), f"{key} cannot be that", remedy, Code.INVALID_VALUE)
        return entry[key]

    def _max_fires(self, location: Location, entry: Mapping[str, Any]) -> int | None:
        once, most = entry.get("once", False), entry.get("max_fires")
        if not isinstance(once, bool):
            self._fault((*location, "once"), "is neither true nor false", "Write 'once: true'.", Code.INVALID_VALUE)
        if "max_fires" not in entry:
            return 1 if once is True else None
        if type(most) is not int or not 1 <= most <= MAX_FIRES:
            remedy = "Write how often it may fire at most: 1 or more."
            self._fault((*location, "max_fires"), "is no valid count", remedy, Code.INVALID_VALUE)
            return None
        if once is True and most != 1:
            remedy = "Leave out one of them."
            self._fault((*location, "max_fires"), "'once: true' contradicts it", remedy, Code.CONFLICT)
        return most

    def _actions(self, location: Location, entry: Mapping[str, Any]) -> tuple[Any, ...]:
        place = (*location, "do")
        given = entry.get("do")
        if given is None:
            self._fault(location, "has no action", "Add 'do: [alert: ...]' or another action.", Code.MISSING_KEY)
            return ()
        items = given if isinstance(given, list) else [given]
        if not 1 <= len(items) <= MAX_ACTIONS:
            self._fault(place, f"has {len(items)} actions", f"Give 1 to {MAX_ACTIONS}.", Code.INVALID_VALUE)
            return ()
        places = [(*place, number) if isinstance(given, list) else place for number in range(len(items))]
        pairs = zip(places, items, strict=True)
        return tuple(read_action(self._document, where, item, self._metrics) for where, item in pairs)

    def _check_duplicate_names(self, entry: list[Any]) -> None:
        seen: dict[str, int] = {}
        for number, one in enumerate(entry):
            name = one.get("name") if isinstance(one, dict) else None
            if isinstance(name, str):
                if name in seen:
                    reason = f"there is a rule {name[:63]!r} already (rule {seen[name] + 1})"
                    self._fault(("rules", number, "name"), reason, "Choose another name.", Code.DUPLICATE_NAME)
                seen.setdefault(name, number)

    def _check_memory(self, found: RuleSet) -> None:
        """Bound the points of all windows, equal windows counted once, and the values kept for a group."""
        limits = self._limits
        values = len(collect_group_values(found))
        if values > limits.group_values:
            reason = f"group functions need {values} metrics or steps; at most {limits.group_values} are allowed"
            self._fault(("rules",), reason, "Use the same metrics and steps in several rules.", Code.TOO_LARGE)
        expressions = [one for rule in found.rules for one in (rule.when, rule.clear) if one is not None]
        summaries = {part.summary for one in expressions for part in walk(one) if isinstance(part, Aggregate)}
        windows = {(one.metric, one.function, one.window) for one in summaries if one.window is not None}
        points = sum(math.ceil(window.points or limits.duration_points) for _, _, window in windows)
        if points > limits.total_points:
            reason = f"all windows together hold {points:,} points; at most {limits.total_points:,} are allowed"
            self._fault(("rules",), reason, "Make windows smaller, or use ema.", Code.TOO_LARGE)


MAX_SIGNALS = 16
MAX_SIGNAL_CHARS = 200
_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")


def read_signals(document: Document, entry: Any, declared: Set[str]) -> list[Signal]:
    """Read the signals; invalid ones become faults. `declared`: names of the user's own metrics."""
    place: Location = ("signals",)
    if entry is None:
        return []
    if not isinstance(entry, dict):
        remedy = "Write 'ecc: uncorrectable ECC error'."
        document.fault(place, "is no mapping of names to texts", remedy, code=Code.WRONG_SHAPE)
        return []
    if len(entry) > MAX_SIGNALS:
        reason = f"there are {len(entry)} signals; at most {MAX_SIGNALS} are allowed"
        document.fault(place, reason, "Leave some out.", code=Code.TOO_LARGE)
        return []
    return [one for name, text in entry.items() if (one := _signal(document, name, text, declared)) is not None]


def _signal(document: Document, name: str, text: Any, declared: Set[str]) -> Signal | None:
    place: Location = ("signals", name)
    if not _NAME.fullmatch(name):
        remedy = "Use up to 31 lower-case letters, digits and '_', a letter first."
        document.fault(place, "cannot be a signal's name", remedy, code=Code.INVALID_VALUE)
        return None
    if SIGNALS + name in declared:
        reason = f"there is a metric {SIGNALS}{name} already"
        document.fault(place, reason, "Choose another name.", code=Code.DUPLICATE_NAME)
        return None
    # Log lines are searched after control characters are removed, therefore a text must be printable.
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_SIGNAL_CHARS or not text.isprintable():
        remedy = f"Write a text of the line: 1 to {MAX_SIGNAL_CHARS} printable characters."
        document.fault(place, "is no text of one line", remedy, code=Code.INVALID_VALUE)
        return None
    return Signal(name, text)
