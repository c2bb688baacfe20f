"""The log formats of IBM's files, as texts of this language: metrics, and nothing else that lies about.

The original formats with everything that the trainer has at hand, so that a format could print a token or walk to the
environment. Here a field is one of the file's metrics, or it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from baton.contract.rules.language.faults import Code, ExpressionError, did_you_mean
from baton.contract.rules.language.messages import is_form
from baton.contract.rules.language.syntax_tree import Call, Name, Number, number_text
from gpu_client.importers.ibm.metrics import Keys, Source, number_at, refusal

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


class Known(NamedTuple):
    """What a format can name."""

    sources: Mapping[str, Source]
    controller: str
    events: tuple[str, ...]
    """As the original calls them."""


def text_of_format(said: str, known: Known, differs: Callable[[int, str], None]) -> str:
    """Raises ExpressionError. `differs`: told of what is not shown as the original does, with the offset."""
    parts: list[str] = []
    last = 0
    for found in _FIELD.finditer(said):
        parts.append(said[last : found.start()])
        last = found.end()
        if found[0] in ("{{", "}}"):
            parts.append(found[0])
            continue
        try:
            parts.append(_field(found, known, partial(differs, found.start())))
        except ExpressionError as error:
            error.offset = found.start()
            raise
    parts.append(said[last:])
    return "".join(parts)


def _field(found: re.Match[str], known: Known, differs: Callable[[str], None]) -> str:
    path = _PATH.fullmatch(found["path"] or "")
    if found["path"] is None or path is None:
        raise refusal(f"has a field that cannot be read: {found[0][:40]!r}", "Write one like {loss[loss]:.3f}.")
    form = found["form"] or ""
    if found["conversion"] or not is_form(form):
        raise refusal(
            f"has the form {found[0][:40]!r}", "Write a form like .3f, .2e, .4g, d or .1%.", Code.INVALID_TEXT
        )
    name = path["name"]
    attribute = any(step[1] for step in _STEP.finditer(path["rest"]))
    keys = tuple(_key(step[1] or step[2]) for step in _STEP.finditer(path["rest"]))
    fixed = {"event_name": " or ".join(known.events), "control_name": known.controller}
    if name in fixed and not keys:
        if name == "event_name" and len(known.events) > 1:
            differs("{event_name} is told as all the rule's triggers")
        return fixed[name].replace("{", "{{").replace("}", "}}")
    if name in ("path", "hf_path") and not keys:
        differs(f"{{{name}}} is told as the step of the checkpoint")
        return "checkpoint of step {step:d}"
    if name == "state" and name not in known.sources:
        return _of_source(Source("state", "TrainingState"), keys, form, differs)
    if name not in known.sources:
        if name in ("args", "control", "model", "tokenizer", "processing_class", "optimizer", "kwargs"):
            raise refusal(f"{{{name}}} could print any secret of the trainer", "Name metrics: {loss}, {step:d}.")
        raise refusal(f"there is no metric {name[:40]!r}", did_you_mean(name, known.sources), Code.UNKNOWN_METRIC)
    if attribute:
        raise refusal("a log format does not walk along attributes", "Write the key in brackets: {loss[loss]}.")
    return _of_source(known.sources[name], keys, form, differs)


def _key(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else text


def _of_source(source: Source, keys: Keys, form: str, differs: Callable[[str], None]) -> str:
    if not keys and not source.bare:
        differs(f"{{{source.name}}} was everything that {source.kind} has; its numbers are told")
        return _WHOLE[source.kind]
    if (source.kind, keys) == ("PerProcessState", ("rank",)):
        differs("a line is written once for all ranks, by rank 0")
        return "0"
    node = number_at(source, keys, full=False)
    match node:
        case Number(value):
            return number_text(value)
        case Name(name):
            pass
        case Call("at", (Name(name), Name())):
            differs(f"{source.said(keys)} is told as it is when the line is written")
        case _:
            raise refusal(f"{source.said(keys)} is no metric by itself", "Name the newest: [-1].", Code.INVALID_TEXT)
    if name in ("step", "tokens") and form in ("", ","):
        form += "d"
    return f"{{{name}:{form}}}" if form else f"{{{name}}}"
