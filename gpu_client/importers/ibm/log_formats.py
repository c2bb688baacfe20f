"""Translate log formats to message texts whose fields are metrics.

The original formats with all objects of the trainer, therefore a format can print a token or read the environment. The
translation refuses every field that is no metric of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from baton.contract.rules.language.faults import Code, ExpressionError, suggest_name
from baton.contract.rules.language.messages import is_format_spec
from baton.contract.rules.language.syntax_tree import FunctionCall, Name, Number, format_number
from gpu_client.importers.ibm.metrics import Keys, MetricSource, refuse, translate_number

_FIELD = re.compile(r"\{\{|\}\}|\{(?P<path>[^{}:!]*)(?P<conversion>![^{}:]*)?(?::(?P<form>[^{}]*))?\}|[{}]")
_PATH = re.compile(r"(?P<name>[^.\[\]]*)(?P<rest>(?:\.[^.\[\]]+|\[[^\]]+\])*)")
_STEP = re.compile(r"\.([^.\[\]]+)|\[([^\]]+)\]")
_WHOLE = {
    "TrainingState": "step {step:d}, epoch {epoch:.2f}",
    "Loss": "{loss}",
    "EvalMetrics": "eval.loss {eval.loss}",
    "HistoryBasedMetric": "loss {loss}",
    "PerProcessState": "rank 0",
}


class FormatNames(NamedTuple):
    """Names that a format can use."""

    sources: Mapping[str, MetricSource]
    controller: str
    events: tuple[str, ...]
    """Triggers, under the original's names."""


def translate_format(format_text: str, known: FormatNames, differs: Callable[[int, str], None]) -> str:
    """Translate a format. Raises ExpressionError.

    `differs(offset, reason)` reports output that differs from the original.
    """
    parts: list[str] = []
    last = 0
    for found in _FIELD.finditer(format_text):
        parts.append(format_text[last : found.start()])
        last = found.end()
        if found[0] in ("{{", "}}"):
            parts.append(found[0])
            continue
        try:
            parts.append(_field(found, known, partial(differs, found.start())))
        except ExpressionError as error:
            error.offset = found.start()
            raise
    parts.append(format_text[last:])
    return "".join(parts)


def _field(found: re.Match[str], known: FormatNames, differs: Callable[[str], None]) -> str:
    path = _PATH.fullmatch(found["path"] or "")
    if found["path"] is None or path is None:
        raise refuse(f"has a field that cannot be read: {found[0][:40]!r}", "Write one like {loss[loss]:.3f}.")
    form = found["form"] or ""
    if found["conversion"] or not is_format_spec(form):
        raise refuse(f"has the form {found[0][:40]!r}", "Write a form like .3f, .2e, .4g, d or .1%.", Code.INVALID_TEXT)
    name = path["name"]
    attribute = any(step[1] for step in _STEP.finditer(path["rest"]))
    keys = tuple(_key(step[1] or step[2]) for step in _STEP.finditer(path["rest"]))
    fixed = {"event_name": " or ".join(known.events), "control_name": known.controller}
    if name in fixed and not keys:
        if name == "event_name" and len(known.events) > 1:
            differs("{event_name} is rendered as all triggers of the rule")
        return fixed[name].replace("{", "{{").replace("}", "}}")
    if name in ("path", "hf_path") and not keys:
        differs(f"{{{name}}} is rendered as the step of the checkpoint")
        return "checkpoint of step {step:d}"
    if name == "state" and name not in known.sources:
        return _of_source(MetricSource("state", "TrainingState"), keys, form, differs)
    if name not in known.sources:
        if name in ("args", "control", "model", "tokenizer", "processing_class", "optimizer", "kwargs"):
            raise refuse(f"{{{name}}} could print any secret of the trainer", "Name metrics: {loss}, {step:d}.")
        raise refuse(f"there is no metric {name[:40]!r}", suggest_name(name, known.sources), Code.UNKNOWN_METRIC)
    if attribute:
        raise refuse("a log format does not walk along attributes", "Write the key in brackets: {loss[loss]}.")
    return _of_source(known.sources[name], keys, form, differs)


def _key(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else text


def _of_source(source: MetricSource, keys: Keys, form: str, differs: Callable[[str], None]) -> str:
    if not keys and not source.bare:
        differs(f"{{{source.name}}} renders every value of {source.kind} there; here its numbers alone")
        return _WHOLE[source.kind]
    if (source.kind, keys) == ("PerProcessState", ("rank",)):
        differs("a line is written once for all ranks, by rank 0")
        return "0"
    node = translate_number(source, keys, full=False)
    match node:
        case Number(value):
            return format_number(value)
        case Name(name):
            pass
        case FunctionCall("at", (Name(name), Name())):
            differs(f"{source.path_text(keys)} is rendered with its value when the line is written")
        case _:
            raise refuse(
                f"{source.path_text(keys)} is no metric by itself", "Name the newest: [-1].", Code.INVALID_TEXT
            )
    if name in ("step", "tokens") and form in ("", ","):
        form += "d"
    return f"{{{name}:{form}}}" if form else f"{{{name}}}"
