"""Read trainer-controller files to typed records, or list every fault with its place.

The reader accepts `controller_metrics`, a list, as in the original's code, and `controller-metrics`, a mapping of names
to classes or a list, as in the original's design.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from baton.contract.rules.language.faults import Code, suggest_name
from baton.contract.rules.limits import LIMITS
from baton.contract.yaml_documents import Document, Location
from gpu_client.importers.ibm.metrics import CLASSES, MetricSource

EVENTS: Mapping[str, str] = {
    "on_train_begin": "start",
    "on_step_end": "step",
    "on_log": "log",
    "on_evaluate": "evaluate",
    "on_save": "save",
    "on_epoch_end": "epoch",
    "on_train_end": "end",
}
_REFUSED_EVENTS: Mapping[str, tuple[str, str]] = {
    "on_init_end": ("comes before the trainer is ready, which forgets what was asked then", "Write on_train_begin."),
    "on_step_begin": ("sees the metrics of the step before", "Write on_step_end."),
    "on_substep_end": ("never comes without gradient accumulation", "Write on_step_end."),
    "on_optimizer_step": ("sees the metrics of the step before", "Write on_step_end."),
    "on_pre_optimizer_step": ("is no trigger of the original, and comes in the midst of a step", "Write on_step_end."),
    "on_push_begin": ("is no trigger of the original, and comes in the midst of a save", "Write on_save."),
    "on_epoch_begin": ("sees what on_epoch_end saw", "Write on_epoch_end."),
    "on_predict": ("comes after the training", "Write on_train_end."),
    "on_prediction_step": ("comes in the midst of an evaluation", "Write on_evaluate."),
}
ACTIONS: Mapping[str, str] = {
    "should_training_stop": "stop",
    "should_save": "save",
    "should_evaluate": "evaluate",
    "should_log": "log",
}
LEVELS: Mapping[str, str] = {
    "notset": "info", "debug": "info", "info": "info", "warn": "warning", "warning": "warning", "error": "error",
    "critical": "error", "fatal": "error",
}  # fmt: skip
"""Severity of a rule for each Python log level."""

_METRICS_KEYS = ("controller_metrics", "controller-metrics")
_KEYS = (*_METRICS_KEYS, "operations", "controllers")
_CONTROLLER_KEYS = ("name", "triggers", "rule", "operations", "patience", "config")
_MODES = ("reset_on_failure", "no_reset_on_failure")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
MAX_PATIENCE = 10**6


class Item(NamedTuple):
    """Definition of a metric or an operation."""

    name: str
    kind: str
    arguments: Mapping[str, Any]
    place: Location
    arguments_place: Location


class LogFormat(NamedTuple):
    """Operation that writes a log line."""

    text: str
    level: str
    place: Location


class Controller(NamedTuple):
    """Definition of a controller, which becomes a rule."""

    place: Location
    name: str
    events: tuple[str, ...]
    rule: str
    operations: tuple[tuple[Location, str, LogFormat | None], ...]
    """Place, key of ACTIONS, and the format of a LogControl."""
    patience: int
    resets: bool
    """True if a false check resets the patience."""


class FileReader:
    """Reader of one file; faults go to its document."""

    def __init__(self, document: Document, notes: Document) -> None:
        """Create a reader; `notes` collects the omitted parts."""
        self._document = document
        self._notes = notes
        self.sources: dict[str, MetricSource] = {}
        self.unsound: set[str] = set()
        """Names of invalid definitions; a reference to such a name is no second fault."""
        self._formats: dict[str, LogFormat | None] = {"hfcontrols": None}

    def controllers(self) -> list[Controller]:
        """Read the controllers with readable rules, even if other parts are invalid."""
        value = self._document.value
        if not isinstance(value, dict):
            self._fault((), "this is no trainer-controller file", "Write 'controllers:' and a list.", Code.WRONG_SHAPE)
            return []
        self._unknown_keys((), value, _KEYS)
        given = [key for key in _METRICS_KEYS if key in value]
        if len(given) > 1:
            self._fault((given[1],), "metrics are given twice", f"Move them to {given[0]}.", Code.CONFLICT)
        for key in given:
            for item in self._items((key,), value[key], "loss"):
                self._take(item, self._take_bare_metric if key == "controller-metrics" else self._take_metric)
        for item in self._items(("operations",), value.get("operations"), "log"):
            self._take(item, self._take_operation)
        entry = value.get("controllers")
        if not isinstance(entry, list) or not entry:
            place: Location = ("controllers",) if "controllers" in value else ()
            self._fault(place, "there are no controllers", "Write 'controllers:' and a list.", Code.MISSING_KEY)
            return []
        if len(entry) > LIMITS.rules:
            reason = f"there are {len(entry)} controllers; at most {LIMITS.rules} are allowed"
            self._fault(("controllers",), reason, "Leave some out.", Code.TOO_LARGE)
            return []
        found = [self._controller(("controllers", number), one) for number, one in enumerate(entry)]
        return [one for one in found if one is not None]

    def _fault(self, place: Location, reason: str, remedy: str, code: Code) -> None:
        self._document.fault(place, reason, remedy, code=code)

    def _unknown_keys(self, place: Location, value: Mapping[str, Any], known: Iterable[str]) -> None:
        for key in value:
            if key not in known:
                remedy = suggest_name(key, known) if known else "Leave it out."
                self._fault((*place, key), "is not a key here", remedy, Code.UNKNOWN_KEY)

    # Metrics and operations

    def _items(self, place: Location, entry: Any, example: str) -> list[Item]:
        """Read a list of name, class and arguments, or a mapping of names to classes."""
        if entry is None:
            return []
        if isinstance(entry, dict):
            items = [self._mapped((*place, name), name, one) for name, one in entry.items()]
        elif isinstance(entry, list):
            items = [self._listed((*place, number), one) for number, one in enumerate(entry)]
        else:
            remedy = f"Begin each with '- name: {example}'."
            self._fault(place, "is no list", remedy, Code.WRONG_SHAPE)
            return []
        found: dict[str, Item] = {}
        for item in items:
            if item is None:
                continue
            if not _IDENTIFIER.fullmatch(item.name):
                remedy = "Use letters, digits and '_', a letter first."
                self._fault(item.place, f"{item.name[:40]!r} is no name", remedy, Code.INVALID_VALUE)
            elif item.name in found:
                reason = f"there is one called {item.name} already"
                self._fault(item.place, reason, "Choose another name.", Code.DUPLICATE_NAME)
            else:
                found[item.name] = item
        return list(found.values())

    def _listed(self, place: Location, entry: Any) -> Item | None:
        if not isinstance(entry, dict):
            self._fault(place, "has no name and no class", "Write 'name:' and 'class:'.", Code.WRONG_SHAPE)
            return None
        self._unknown_keys(place, entry, ("name", "class", "arguments"))
        for key in ("name", "class"):
            if not isinstance(entry.get(key), str):
                where = (*place, key) if key in entry else place
                self._fault(where, f"'{key}' is no text or not there", f"Write '{key}: ...'.", Code.MISSING_KEY)
                return None
        return self._item(entry["name"], entry["class"], entry.get("arguments"), place, (*place, "arguments"))

    def _mapped(self, place: Location, name: str, entry: Any) -> Item | None:
        if isinstance(entry, str):
            return self._item(name, entry, None, place, place)
        if isinstance(entry, dict) and len(entry) == 1:
            kind, arguments = next(iter(entry.items()))
            return self._item(name, kind, arguments, place, (*place, kind))
        self._fault(place, "has no class", "Write 'loss: {Loss: }'.", Code.WRONG_SHAPE)
        return None

    def _item(self, name: str, kind: str, arguments: Any, place: Location, where: Location) -> Item | None:
        if arguments is not None and not isinstance(arguments, dict):
            self._fault(where, "is no mapping of arguments", "Write 'window_size: 5'.", Code.WRONG_SHAPE)
            return None
        return Item(name, kind, arguments or {}, place, where)

    def _take(self, item: Item, take: Callable[[Item], None]) -> None:
        before = len(self._document.faults)
        take(item)
        if len(self._document.faults) > before:
            self.unsound.add(item.name)

    def _take_bare_metric(self, item: Item) -> None:
        self._take_metric(item, bare=True)

    def _take_metric(self, item: Item, *, bare: bool = False) -> None:
        if item.kind not in CLASSES:
            reason = f"there is no metric of class {item.kind[:40]!r}"
            remedy = f"{suggest_name(item.kind, CLASSES)} A metric of your own: report it, and name it in a rule."
            self._fault(item.place, reason, remedy, Code.UNSUPPORTED)
            return
        self._unknown_keys(item.arguments_place, item.arguments, CLASSES[item.kind])
        window = item.arguments.get("window_size", 1)
        if type(window) is not int or window == 0 or window > LIMITS.window_points:
            reason = "window_size is no number of points"
            remedy = f"Write 1 to {LIMITS.window_points:,}, or -1 for all."
            self._fault((*item.arguments_place, "window_size"), reason, remedy, Code.INVALID_WINDOW)
            return
        if item.arguments.get("source_event", "on_evaluate") != "on_evaluate":
            place = (*item.arguments_place, "source_event")
            self._fault(place, "metrics come from on_evaluate alone", "Leave it out.", Code.UNSUPPORTED)
            return
        self.sources[item.name] = MetricSource(item.name, item.kind, window, bare)

    def _take_operation(self, item: Item) -> None:
        if item.kind == "HFControls":
            self._unknown_keys(item.arguments_place, item.arguments, ())
            self._formats[item.name] = None
            return
        if item.kind != "LogControl":
            reason = f"there is no operation of class {item.kind[:40]!r}"
            remedy = (
                "There are HFControls and LogControl. One of your own: register it in the image, 'do: {hook: name}'."
            )
            self._fault(item.place, reason, remedy, Code.UNSUPPORTED)
            return
        place = item.arguments_place
        self._unknown_keys(place, item.arguments, ("log_format", "log_level"))
        text, level = item.arguments.get("log_format"), item.arguments.get("log_level")
        if not isinstance(text, str):
            self._fault(place, "has no log_format", "Add 'log_format: loss is {loss[loss]}'.", Code.MISSING_KEY)
        elif not isinstance(level, str) or level.lower() not in LEVELS:
            remedy = f"Write {', '.join(LEVELS)}."
            self._fault((*place, "log_level"), "is no level of logs", remedy, Code.INVALID_VALUE)
        else:
            self._formats[item.name] = LogFormat(text, level.lower(), (*place, "log_format"))

    # Controllers

    def _controller(self, place: Location, entry: Any) -> Controller | None:
        if not isinstance(entry, dict):
            self._fault(place, "is no controller", "Write name, triggers, rule and operations.", Code.WRONG_SHAPE)
            return None
        self._unknown_keys(place, entry, _CONTROLLER_KEYS)
        for key in ("name", "triggers", "rule", "operations"):
            if key not in entry:
                self._fault(place, f"has no '{key}'", f"Add '{key}:'.", Code.MISSING_KEY)
        for key in ("name", "rule"):
            if key in entry and not isinstance(entry[key], str):
                self._fault((*place, key), "is no text", "Put it into quotes.", Code.WRONG_SHAPE)
        events = [self._event(where, one) for where, one in self._texts((*place, "triggers"), entry.get("triggers"))]
        operations = [
            self._action(where, one) for where, one in self._texts((*place, "operations"), entry.get("operations"))
        ]
        patience, resets = self._patience((*place, "patience"), entry.get("patience"))
        self._note_config((*place, "config"), entry.get("config"))
        if not isinstance(entry.get("name"), str) or not isinstance(entry.get("rule"), str):
            return None
        known = tuple(dict.fromkeys(one for one in events if one))
        for number, event in enumerate(events):
            if event and event in events[:number]:
                reason = f"{event} is there already: the rule is checked once; the original checks it twice"
                self._notes.fault((*place, "triggers", number), reason, "Leave it out.", code=Code.DIFFERS)
        wanted = tuple(one for one in operations if one is not None)
        return Controller(place, entry["name"], known, entry["rule"], wanted, patience, resets)

    def _texts(self, place: Location, entry: Any) -> list[tuple[Location, str]]:
        if entry is None and place[-1] not in self._at(place[:-1]):
            return []
        if not isinstance(entry, list) or not entry or not all(isinstance(one, str) for one in entry):
            self._fault(place, "is no list of names", "Begin each with '- '.", Code.WRONG_SHAPE)
            return []
        return [((*place, number), one) for number, one in enumerate(entry)]

    def _at(self, place: Location) -> Any:
        value = self._document.value
        for key in place:
            value = value[key]
        return value

    def _event(self, place: Location, event: str) -> str:
        if event in _REFUSED_EVENTS:
            reason, remedy = _REFUSED_EVENTS[event]
            self._fault(place, f"{event} {reason}", remedy, Code.UNSUPPORTED)
        elif event not in EVENTS:
            reason = f"there is no event {event[:40]!r}"
            self._fault(place, reason, suggest_name(event, EVENTS), Code.UNKNOWN_EVENT)
        else:
            return event
        return ""

    def _action(self, place: Location, entry: str) -> tuple[Location, str, LogFormat | None] | None:
        name, _, action = entry.partition(".")
        if name in self.unsound:
            return None
        if name not in self._formats:
            reason = f"there is no operation {name[:40]!r}"
            self._fault(place, reason, suggest_name(name, self._formats), Code.UNKNOWN_ACTION)
            return None
        known = ("should_log",) if self._formats[name] is not None else tuple(ACTIONS)
        if action == "should_epoch_stop" and self._formats[name] is None:
            remedy = "Write should_training_stop, or shorten the epochs."
            self._fault(place, "an epoch cannot be ended alone here", remedy, Code.UNSUPPORTED)
            return None
        if action not in known:
            reason = f"{name} has no action {action[:40]!r}"
            self._fault(place, reason, suggest_name(action, known), Code.UNKNOWN_ACTION)
            return None
        return place, action, self._formats[name]

    def _patience(self, place: Location, entry: Any) -> tuple[int, bool]:
        if entry is None and place[-1] not in self._at(place[:-1]):
            return 0, True
        if not isinstance(entry, dict):
            self._fault(place, "is no mapping", "Write 'patience_threshold: 2'.", Code.WRONG_SHAPE)
            return 0, True
        self._unknown_keys(place, entry, ("patience_threshold", "mode"))
        threshold, mode = entry.get("patience_threshold", 1), entry.get("mode", _MODES[0])
        if type(threshold) is not int or not 0 <= threshold <= MAX_PATIENCE:
            remedy = f"Write how many checks are put up with: 0 to {MAX_PATIENCE:,}."
            self._fault((*place, "patience_threshold"), "is no valid count", remedy, Code.INVALID_VALUE)
            threshold = 0
        if mode not in _MODES:
            remedy = suggest_name(str(mode), _MODES)
            self._fault((*place, "mode"), "is no mode of patience", remedy, Code.INVALID_VALUE)
        return threshold, mode != _MODES[1]

    def _note_config(self, place: Location, entry: Any) -> None:
        if entry is None:
            return
        if not isinstance(entry, dict):
            self._fault(place, "is no mapping", "Leave it out.", Code.WRONG_SHAPE)
            return
        self._unknown_keys(place, entry, ("trigger_log_level",))
        if "trigger_log_level" in entry:
            reason = "trigger_log_level is left out: every decision is reported with its values"
            self._notes.fault((*place, "trigger_log_level"), reason, "Nothing is to be done.", code=Code.DROPPED)
