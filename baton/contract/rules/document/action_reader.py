"""Reader of the `do` entries: `stop`, `save: best`, `set: {knob: lr, factor: 0.5}`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from baton.contract.rules.document.actions import ACTIONS, Action
from baton.contract.rules.language.faults import Code, suggest_name
from baton.contract.rules.language.messages import Message, MessageError, parse_message
from baton.contract.rules.metrics import MetricCatalog
from baton.contract.yaml_documents import Document, Location

_TAG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
"""Characters of tags, and of group names."""
_KNOB = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")

MAX_GROUP_JOBS = 100
"""Upper bound of `scale`, whatever a rule declares, because every job costs money."""


class ParameterSpec(NamedTuple):
    """Type and bounds of a parameter."""

    kind: str
    """Type: number, whole, flag, name, message or choice."""
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] = _KNOB

    def problem(self, value: Any) -> str | None:
        """Describe the expected value; None if `value` is valid."""
        match self.kind:
            case "flag":
                return None if isinstance(value, bool) else "true or false"
            case "choice":
                return None if value in self.choices else " or ".join(self.choices)
            case "name":
                fits = isinstance(value, str) and self.pattern.fullmatch(value)
                return None if fits else "a name of letters and digits"
            case "message":
                return None if isinstance(value, str) else "a text"
        kinds = int if self.kind == "whole" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not self.low <= value <= self.high:
            expected = "a whole number" if self.kind == "whole" else "a number"
            return f"{expected} from {self.low:g} to {self.high:g}" if math.isfinite(self.high) else expected
        return None if math.isfinite(value) else "a finite number"


_FINITE = ParameterSpec("number", -1e300, 1e300)
_FIELDS: Mapping[str, Mapping[str, ParameterSpec]] = {
    "stop": {"outcome": ParameterSpec("choice", choices=("complete", "failed")), "save": ParameterSpec("flag")},
    "save": {"tag": ParameterSpec("name", pattern=_TAG)},
    "evaluate": {},
    "log": {"text": ParameterSpec("message")},
    "alert": {"text": ParameterSpec("message")},
    "set": {
        "knob": ParameterSpec("name"),
        "value": _FINITE,
        "factor": ParameterSpec("number", 1e-9, 1e9),
        "min": _FINITE,
        "max": _FINITE,
    },
    "rollback": {
        "to": ParameterSpec("choice", choices=("last", "best")),
        "skip": ParameterSpec("whole", 0, 10**9),
        "lr_factor": ParameterSpec("number", 1e-9, 1),
        "budget": ParameterSpec("whole", 1, 100),
    },
    "skip_batch": {},
    "pause": {},
    "profile": {"steps": ParameterSpec("whole", 1, 100)},
    "requeue": {"exclude_host": ParameterSpec("flag")},
    "scale": {
        "group": ParameterSpec("name", pattern=_GROUP),
        "delta": ParameterSpec("whole", -MAX_GROUP_JOBS, MAX_GROUP_JOBS),
        "least": ParameterSpec("whole", 0, MAX_GROUP_JOBS),
        "most": ParameterSpec("whole", 1, MAX_GROUP_JOBS),
    },
    "hook": {"name": ParameterSpec("name")},
}
_MAIN = {"stop": "outcome", "save": "tag", "log": "text", "alert": "text", "profile": "steps", "hook": "name"}
"""ParameterSpec that an action takes in its short form: `profile: 10`."""


def read_action(document: Document, location: Location, entry: Any, metrics: MetricCatalog) -> Action | None:
    """Read one entry of `do`; None if it has faults, which are recorded in the document."""
    given: Any = {}
    if isinstance(entry, str):
        name, place = entry, location
    elif isinstance(entry, dict) and len(entry) == 1:
        name, given = next(iter(entry.items()))
        place = (*location, name)
    else:
        remedy = "Write one like 'stop', 'save: best' or 'set: {knob: lr, factor: 0.5}'."
        document.fault(location, "is no action", remedy, code=Code.WRONG_SHAPE)
        return None
    if name not in ACTIONS:
        document.fault(place, f"there is no action {name!r}", suggest_name(name, ACTIONS), code=Code.UNKNOWN_ACTION)
        return None
    if given is None:
        given = {}
    if not isinstance(given, dict):
        if name not in _MAIN:
            known = ", ".join(_FIELDS[name]) or "none"
            document.fault(place, f"needs its parameters by name ({known})", "Add them.", code=Code.WRONG_SHAPE)
            return None
        given = {_MAIN[name]: given}
        return _action(document, place, name, given, metrics, alone=True)
    return _action(document, place, name, given, metrics, alone=False)


def _action(
    document: Document, place: Location, name: str, given: dict[str, Any], metrics: MetricCatalog, *, alone: bool
) -> Action | None:
    known = _FIELDS[name]
    taken: dict[str, Any] = {}
    before = len(document.faults)
    for key, value in given.items():
        where = place if alone else (*place, key)
        if key not in known:
            remedy = suggest_name(key, known) if known else "Leave it out."
            document.fault(where, f"is no parameter of {name}", remedy, code=Code.UNKNOWN_KEY)
            continue
        wanted = known[key].problem(value)
        if wanted is not None:
            document.fault(where, f"{key} of {name} must be {wanted}", "Correct the value.", code=Code.INVALID_VALUE)
        elif known[key].kind == "message":
            taken[key] = _message(document, where, value, metrics)
        else:
            taken[key] = float(value) if known[key].kind == "number" else value
    kind = ACTIONS[name]
    for one in fields(kind):
        if one.name not in given and one.default is MISSING:
            reason = f"{name} needs '{one.name}'"
            document.fault(place, reason, f"Write {name}: {{{one.name}: ...}}.", code=Code.MISSING_KEY)
    if len(document.faults) == before:
        _check_combination(document, place, name, taken)
    return kind(**taken) if len(document.faults) == before else None


def _message(document: Document, where: Location, text: str, metrics: MetricCatalog) -> Message | None:
    try:
        message = parse_message(text)
    except MessageError as error:
        document.text_fault(where, error.offset, error.reason, error.remedy, code=Code.INVALID_TEXT)
        return None
    for field in message.fields:
        if field.metric not in metrics and not metrics.open:
            reason = f"the metric {field.metric} never appears"
            remedy = suggest_name(field.metric, metrics)
            document.text_fault(where, field.offset, reason, remedy, code=Code.UNKNOWN_METRIC)
    return message


def _check_combination(document: Document, place: Location, name: str, taken: dict[str, Any]) -> None:
    """Check parameters against each other."""
    if name == "set":
        if ("value" in taken) == ("factor" in taken):
            remedy = "Write 'value: 1e-5', or 'factor: 0.5'."
            document.fault(place, "set needs exactly one of 'value' and 'factor'", remedy, code=Code.CONFLICT)
        elif taken.get("min", -math.inf) > taken.get("max", math.inf):
            document.fault(place, "min is more than max", "Exchange them.", code=Code.CONFLICT)
        elif "value" in taken and not taken.get("min", -math.inf) <= taken["value"] <= taken.get("max", math.inf):
            document.fault(place, "the value is out of its bounds", "Change one of them.", code=Code.CONFLICT)
    elif name == "scale" and taken["delta"] == 0:
        document.fault(place, "a delta of 0 changes nothing", "Write 1 or -1.", code=Code.INVALID_VALUE)
    elif name == "scale" and taken.get("least", 0) > taken.get("most", MAX_GROUP_JOBS):
        # The delta has one sign, therefore only one of `least` and `most` applies if the rule gives one of them.
        document.fault(place, "least is more than most", "Exchange them.", code=Code.CONFLICT)
