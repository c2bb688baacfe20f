"""Texts of logs and alerts: `{loss}` and `{loss:.3f}` become a metric's value.

`parse_message` splits a text once. Python's formatting then sees only a float and a format spec that the pattern
allows, therefore a text cannot reach an attribute or an object.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from baton.contract.rules.metrics import is_name

MAX_CHARS = 1_000
_FIELD = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}:]*)(?::(?P<form>[^{}]*))?\}|[{}]")
_FORM = re.compile(r",?(?:\.[0-9]{1,2})?[fegd%]?")


class MessageError(Exception):
    """Fault of a message text. `offset` counts its characters from 0."""

    def __init__(self, reason: str, remedy: str, offset: int) -> None:
        """Create the fault; `remedy` says how to correct the text."""
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.offset = offset


class MessageField(NamedTuple):
    """Reference to a metric in a text."""

    metric: str
    form: str
    offset: int

    def __repr__(self) -> str:
        """Return the text that stored rule states have a digest of: a rule with another digest fires anew."""
        return f"Field(metric={self.metric!r}, form={self.form!r}, offset={self.offset!r})"


class Message(NamedTuple):
    """A parsed message text."""

    text: str
    parts: tuple[str | MessageField, ...]

    @property
    def fields(self) -> tuple[MessageField, ...]:
        """The referenced metrics, in order."""
        return tuple(part for part in self.parts if isinstance(part, MessageField))

    def render(self, values: Mapping[str, float | None]) -> str:
        """Render the text; an unknown value becomes `unknown`."""
        return "".join(
            part if isinstance(part, str) else _format_value(values.get(part.metric), part.form) for part in self.parts
        )


def parse_message(text: str) -> Message:
    """Parse a message text. Raises MessageError."""
    if len(text) > MAX_CHARS:
        raise MessageError(f"has {len(text)} characters; at most {MAX_CHARS} are allowed", "Shorten it.", 0)
    if not text.strip():
        raise MessageError("is empty", "Describe the event.", 0)
    parts: list[str | MessageField] = []
    last = 0
    for found in _FIELD.finditer(text):
        parts.append(text[last : found.start()])
        last = found.end()
        if found[0] in ("{{", "}}"):
            parts.append(found[0][0])
        elif found["name"] is None:
            raise MessageError(
                f"has a single '{found[0]}'", f"Write '{found[0] * 2}' for the character.", found.start()
            )
        else:
            parts.append(_field(found))
    parts.append(text[last:])
    return Message(text, tuple(part for part in parts if part))


def is_format_spec(form: str) -> bool:
    """Check whether `form` is an allowed format spec: `.3f`, `d`, `.1%`, or empty."""
    return _FORM.fullmatch(form) is not None


def _field(found: re.Match[str]) -> MessageField:
    name, form = found["name"], found["form"] or ""
    if not is_name(name):
        remedy = "Write a metric's name between braces: {loss}, {eval.loss:.3f}."
        raise MessageError(f"names {name[:40]!a}, which is no metric", remedy, found.start())
    if not is_format_spec(form):
        remedy = "Write a form like .3f, .2e, .4g, d, .1% or ,.0f."
        raise MessageError(f"has the form {form[:40]!a}", remedy, found.start())
    return MessageField(name, form, found.start())


def _format_value(value: float | None, form: str) -> str:
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if form.endswith("d"):
        return format(round(value), form.partition(".")[0].rstrip("d") + "d")
    return format(value, form or ".6g")
